/* What a slot word means to others: whose it is, and where in a queue its item stands. */
#include "core/ring.h"

/* W1: does an open claim cover this word? A WRITING word that none covers is nobody's and may be taken. */
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *whose) {
    if (__builtin_expect(SHMB_STATE(word) != SHMB_WRITING, 1)) return false;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) != SHMB_PAYLOAD) continue;
        uint64_t first = atomic_load_explicit(&entry->first, memory_order_relaxed);
        if (SHMB_TICKET(word) - first < atomic_load_explicit(&entry->count, memory_order_relaxed)) {
            if (whose) *whose = i;
            return true;
        }
    }
    return false;
}

/* Where in the queue an item is: at its ticket. One that was there before the buffer became a queue may be many laps old,
 * beside a placed write or after a load, and is where its slot comes in the last lap before: in the order in which the
 * ring would have written over it. */
uint64_t shmb_place_of(const struct shmb_ring *ring, uint64_t ticket) {
    return shmb_place_since(ticket, ring->runtime->queue_since, ring->capacity);
}
