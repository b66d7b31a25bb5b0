/* Gathers stacks of consecutive steps directly into the sample, without a copy of single steps before.
 *
 *     index     a b c d       d is the drawn step
 *     stack     a b c d       each from the column of the leaf
 *     shifted     b c d e     b to d from the stack, which is still in the cache; e is the next observation of d
 *
 * A step is valid if its slot has the expected ticket before and after the copy. */
#include "core/stacks.h"

#include <string.h>

#include "core/pool.h"
#include "core/ring.h"

#define CACHE_LINE 64
#define AHEAD_BYTES 512 /* prefetched at the beginning of a row; the hardware prefetches the rest */

struct stacking {
    const struct shmb_ring *ring;
    const struct shmb_stacks *stacks;
    unsigned char *const *out;
    _Atomic uint32_t changed;
};

static inline void fetch_row(const unsigned char *at, uint64_t bytes) {
    for (uint64_t offset = 0; offset < bytes && offset < AHEAD_BYTES; offset += CACHE_LINE) __builtin_prefetch(at + offset);
}

/* True if the slots of a stack hold the expected items. */
static bool are_items_valid(const struct shmb_ring *ring, const struct shmb_stacks *stacks, uint64_t first) {
    for (uint64_t step = first; step < first + stacks->steps; step++) {
        uint64_t slot = shmb_slot_of(ring, (uint64_t)stacks->index[step]);
        uint64_t word = atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
        if (word != SHMB_WORD((uint64_t)stacks->tickets[step], SHMB_COMMITTED)) return false;
    }
    return true;
}

/* Offset of the leaf's last row within the leaf, for a row of the sample. */
static inline uint64_t last_row(const struct shmb_stacks *stacks, unsigned leaf, uint64_t bytes, uint64_t row) {
    uint64_t rows = shmb_rows_of(stacks->forms[leaf], stacks->steps);
    return (row * rows + rows - 1) * bytes;
}

static void copy_columns(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t row) {
    const int64_t *steps = stacks->index + row * stacks->steps;
    const uint64_t drawn = (uint64_t)steps[stacks->steps - 1];
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        const unsigned char *base = ring->leaves[leaf].base;
        const uint64_t bytes = ring->leaves[leaf].element_bytes;
        if (bytes == 0) continue; /* the leaf has no bytes, or no column */
        if (stacks->forms[leaf] == SHMB_STACK)
            for (uint64_t step = 0; step + 1 < stacks->steps; step++) {
                fetch_row(base + (uint64_t)steps[step + 1] * bytes, bytes);
                memcpy(out[leaf] + (row * stacks->steps + step) * bytes, base + (uint64_t)steps[step] * bytes, bytes);
            }
        memcpy(out[leaf] + last_row(stacks, leaf, bytes, row), base + drawn * bytes, bytes);
    }
}

/* Copies next observations that are stored once. */
static void copy_nexts_of(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t row,
                          uint64_t slot, uint64_t next) {
    for (unsigned which = 0; which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        const uint64_t at = last_row(stacks, shared->leaf, shared->bytes, row);
        memcpy(out[shared->leaf] + at, shmb_next_address(ring, which, slot, next), shared->bytes);
    }
}

/* Fills the shifted stacks from the stacks in the sample. */
static void fill_shifted(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t row) {
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        const uint64_t bytes = ring->leaves[leaf].item_bytes, stack = row * stacks->steps * bytes;
        const int32_t form = stacks->forms[leaf];
        if (form >= 0) memcpy(out[leaf] + stack, out[form] + stack + bytes, (stacks->steps - 1) * bytes);
    }
}

static void read_part_of_stacks(void *context, uint64_t first, uint64_t end) {
    struct stacking *with = context;
    const struct shmb_ring *ring = with->ring;
    const struct shmb_stacks *stacks = with->stacks;
    for (uint64_t row = first; row < end; row++) {
        if (atomic_load_explicit(&with->changed, memory_order_relaxed)) return; /* the whole sample is read again */
        const uint64_t drawn = (row + 1) * stacks->steps - 1;
        const uint64_t slot = shmb_slot_of(ring, (uint64_t)stacks->index[drawn]);
        bool valid = are_items_valid(ring, stacks, row * stacks->steps), moving = valid && ring->plan;
        if (valid) SHMB_OPTIMISTIC(copy_columns(ring, stacks, with->out, row));
        while (moving) { /* a next observation that moved during its copy is copied again */
            uint64_t next = shmb_read_next(ring, slot);
            SHMB_OPTIMISTIC(copy_nexts_of(ring, stacks, with->out, row, slot, next));
            atomic_thread_fence(SYNC_SLOT_NEXT_ACQUIRE);
            moving = !shmb_link_still_holds(ring, slot, next) && are_items_valid(ring, stacks, row * stacks->steps);
        }
        if (valid) fill_shifted(ring, stacks, with->out, row);
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        if (!valid || !are_items_valid(ring, stacks, row * stacks->steps)) atomic_store_explicit(&with->changed, 1, memory_order_relaxed);
    }
}

bool shmb_read_stacks(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t bytes) {
    struct stacking with = {ring, stacks, out, 0};
    shmb_divide(read_part_of_stacks, &with, stacks->count, bytes);
    return atomic_load_explicit(&with.changed, memory_order_relaxed) == 0;
}
