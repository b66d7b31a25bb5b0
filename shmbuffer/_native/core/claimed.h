/* The rows of the open claim: which slot and which ticket each has, and which follow each other. */
#ifndef SHMB_CLAIMED_H
#define SHMB_CLAIMED_H

#include "core/ring.h"

/* Which rows the open claim has. A copy, for loops: past a crash point a compiler reads again what is in memory. */
struct shmb_claimed {
    const int64_t *slots; /* NULL: of a ring write, one slot behind the other */
    uint64_t first, slot, rows, lanes, capacity;
    bool armed; /* a crash point is: see CP_ROW */
};

/* What is done for each row, compiled once more for what most writes are: with that known, a third of it is left. Clang would
 * make one of two calls that are the same. */
#define SHMB_FOR_CLAIMED(claimed, call) \
    ((claimed).slots == NULL && (claimed).lanes == 1 && !(claimed).armed ? (shmb_stay_apart(), (call)) : (call))

static inline void shmb_stay_apart(void) { __asm__ volatile(""); }

static inline struct shmb_claimed shmb_claimed(const struct shmb_ring *ring) {
    const int64_t *slots = ring->claim_kind == SHMB_RING_WRITE ? NULL : ring->claim_slots;
    return (struct shmb_claimed){slots,       ring->claim_first, ring->claim_slot, ring->claim_rows,
                                 ring->lanes, ring->capacity,    SHMB_ARMED};
}

/* Row k of the open claim: its slot and its ticket. A placed write has the tickets of one lap, in which each
 * slot occurs once; a ring write has consecutive ones, not more than there are slots. */
static inline uint64_t shmb_slot_claimed(const struct shmb_claimed *claimed, uint64_t row) {
    if (claimed->slots) return (uint64_t)claimed->slots[row];
    uint64_t slot = claimed->slot + row;
    return slot < claimed->capacity ? slot : slot - claimed->capacity;
}

static inline uint64_t shmb_ticket_claimed(const struct shmb_claimed *claimed, uint64_t row) {
    if (claimed->slots == NULL) return claimed->first + row;
    return shmb_ticket_in_lap(claimed->first, (uint64_t)claimed->slots[row], claimed->capacity);
}

/* Rows of which each has the slot and the ticket behind those of the one before: of a placed write each is by itself. */
struct shmb_slot_run {
    uint64_t slot, ticket, rows;
};

/* Those from `row` on, before `end`. */
static inline struct shmb_slot_run shmb_run_from(const struct shmb_claimed *claimed, uint64_t row, uint64_t end) {
    uint64_t slot = shmb_slot_claimed(claimed, row), left = claimed->slots ? 1 : claimed->capacity - slot;
    return (struct shmb_slot_run){slot, shmb_ticket_claimed(claimed, row), end - row < left ? end - row : left};
}

static inline uint64_t shmb_slot_of_row(const struct shmb_ring *ring, uint64_t row) {
    const struct shmb_claimed claimed = shmb_claimed(ring);
    return shmb_slot_claimed(&claimed, row);
}

static inline uint64_t shmb_ticket_of_row(const struct shmb_ring *ring, uint64_t row) {
    const struct shmb_claimed claimed = shmb_claimed(ring);
    return shmb_ticket_claimed(&claimed, row);
}

#endif
