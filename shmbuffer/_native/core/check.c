/* Checks the whole ring: items, bytes, claims and tree. */
#include <string.h>

#include "core/check.h"
#include "core/ledger.h"
#include "core/reservations.h"

/* Checks all slots that were written, and at least `slots`. It changes nothing. It holds the mutex for the whole
 * scan, some milliseconds for a million elements. If no client is alive, it does not take the mutex, because that
 * would repair the work of a dead owner. The caller excludes other processes then. */
int shmb_check(struct shmb_ring *ring, struct shmb_call *call, bool alive, uint64_t slots, struct shmb_check *faults) {
    struct shmb_runtime *runtime = ring->runtime;
    memset(faults, 0, sizeof *faults);
    int status = alive ? shmb_lock(ring, call) : SHMB_OK;
    if (status != SHMB_OK) return status;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed), committed = 0;
    if (slots < shmb_written_slots(ring)) slots = shmb_written_slots(ring);
    if (slots > ring->capacity) slots = ring->capacity;
    for (uint64_t slot = 0; slot < slots; slot++) {
        uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        bool item = SHMB_STATE(word) == SHMB_COMMITTED;
        committed += item;
        faults->wrong_words += word != SHMB_WORD(0, SHMB_EMPTY) &&
                              (SHMB_TICKET(word) % ring->capacity != slot || SHMB_TICKET(word) >= head);
        faults->wrong_extents += item && ring->bytes && !shmb_is_extent_in_use(ring, ring->extents[slot]);
        faults->wrong_nexts += item && ring->plan && !shmb_is_valid_link(ring, slot, head);
        faults->orphans += SHMB_STATE(word) == SHMB_WRITING && !shmb_claim_covers(ring, word, NULL);
        for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; prioritized && e < end; e++)
            faults->wrong_leaves += ring->tree.mass[e] != (item ? shmb_mass(runtime, ring->raw[e]) : 0);
    }
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed);
    faults->wrong_length = length > committed ? length - committed : committed - length;
    faults->wrong_reserved = shmb_count_reservation_faults(ring);
    faults->wrong_ledger = shmb_count_ledger_faults(ring);
    if (prioritized) faults->wrong_nodes = shmb_tree_count_faults(&ring->tree, slots * ring->lanes);
    if (alive) shmb_unlock(ring);
    return SHMB_OK;
}
