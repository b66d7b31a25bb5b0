/* The rows of the open claim: the slot and ticket of each row, and which rows are consecutive. */
#ifndef SHMB_CLAIMED_H
#define SHMB_CLAIMED_H

#include "core/ring.h"

/* The rows of the open claim. Loops use this copy, because a compiler would reload shared memory after each crash
 * point. */
struct shmb_claimed {
    const int64_t *slots; /* NULL for a ring write, whose slots are consecutive */
    uint64_t first, slot, rows, lanes, capacity;
    bool armed; /* a crash point is armed: see CP_ROW */
};

/* Compiles `call` a second time for the most common kind of claim, which then takes a third of the time.
 * shmb_prevent_merging prevents clang from merging the two calls, which are the same. */
#define SHMB_FOR_CLAIMED(claimed, call) \
    ((claimed).slots == NULL && (claimed).lanes == 1 && !(claimed).armed ? (shmb_prevent_merging(), (call)) : (call))

static inline void shmb_prevent_merging(void) { __asm__ volatile(""); }

static inline struct shmb_claimed shmb_claimed(const struct shmb_ring *ring) {
    const int64_t *slots = ring->claim_kind == SHMB_RING_WRITE ? NULL : ring->claim_slots;
    return (struct shmb_claimed){slots,       ring->claim_first, ring->claim_slot, ring->claim_rows,
                                 ring->lanes, ring->capacity,    SHMB_ARMED};
}

/* Slot and ticket of row k of the open claim. The tickets of a placed write are from one lap, in which each slot
 * occurs once. A ring write has consecutive tickets, at most as many as there are slots. */
static inline uint64_t shmb_claimed_slot(const struct shmb_claimed *claimed, uint64_t row) {
    if (claimed->slots) return (uint64_t)claimed->slots[row];
    uint64_t slot = claimed->slot + row;
    return slot < claimed->capacity ? slot : slot - claimed->capacity;
}

static inline uint64_t shmb_claimed_ticket(const struct shmb_claimed *claimed, uint64_t row) {
    if (claimed->slots == NULL) return claimed->first + row;
    return shmb_ticket_in_lap(claimed->first, (uint64_t)claimed->slots[row], claimed->capacity);
}

/* Rows with consecutive slots and tickets. Each row of a placed write is a run of its own. */
struct shmb_slot_run {
    uint64_t slot, ticket, rows;
};

/* The run that starts at `row` and ends before `end`. */
static inline struct shmb_slot_run shmb_run_from(const struct shmb_claimed *claimed, uint64_t row, uint64_t end) {
    uint64_t slot = shmb_claimed_slot(claimed, row), left = claimed->slots ? 1 : claimed->capacity - slot;
    return (struct shmb_slot_run){slot, shmb_claimed_ticket(claimed, row), end - row < left ? end - row : left};
}

static inline uint64_t shmb_slot_of_row(const struct shmb_ring *ring, uint64_t row) {
    const struct shmb_claimed claimed = shmb_claimed(ring);
    return shmb_claimed_slot(&claimed, row);
}

static inline uint64_t shmb_ticket_of_row(const struct shmb_ring *ring, uint64_t row) {
    const struct shmb_claimed claimed = shmb_claimed(ring);
    return shmb_claimed_ticket(&claimed, row);
}

#endif
