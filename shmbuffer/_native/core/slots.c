/* Meaning of slot words for other processes: the claim that covers a word, and the place of its item in a queue. */
#include "core/ring.h"

/* W1: true if an open claim covers this word. A WRITING word without a claim is free to be claimed. */
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *entry_index) {
    if (__builtin_expect(SHMB_STATE(word) != SHMB_WRITING, 1)) return false;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) != SHMB_PAYLOAD) continue;
        uint64_t first = atomic_load_explicit(&entry->first, memory_order_relaxed);
        if (SHMB_TICKET(word) - first < atomic_load_explicit(&entry->count, memory_order_relaxed)) {
            if (entry_index) *entry_index = i;
            return true;
        }
    }
    return false;
}

/* Place of an item in the queue: its ticket. An item from before the buffer became a queue may be many laps old,
 * because of a placed write or a load. Its place is then that of its slot in the lap before the queue, which is the
 * order in which the ring would have overwritten it. */
uint64_t shmb_queue_place(const struct shmb_ring *ring, uint64_t ticket) {
    return shmb_place_since(ticket, ring->runtime->queue_since, ring->capacity);
}
