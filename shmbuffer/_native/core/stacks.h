/* Samples in which some leaves are stacks of consecutive steps: see stacks.c. */
#ifndef SHMB_STACKS_H
#define SHMB_STACKS_H

#include <stdbool.h>
#include <stdint.h>

struct shmb_ring;

/* Form of a leaf in a sample: one row, or a stack with a row per step. A leaf number means the stack of that leaf
 * shifted by one step; only its last row comes from the leaf itself. */
enum { SHMB_ONE_ROW = -2, SHMB_STACK = -1 };

struct shmb_stacks {
    /* [count, steps]; the last step of each row is the drawn item */
    const int64_t *index, *tickets;
    uint64_t count, steps;
    const int32_t *forms; /* for each leaf */
};

static inline uint64_t shmb_rows_of(int32_t form, uint64_t steps) { return form == SHMB_ONE_ROW ? 1 : steps; }

/* False: one of the items was overwritten. `bytes`: size of a row of the sample. No lock is taken. */
bool shmb_read_stacks(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t bytes);

#endif
