/* Samples in which some leaves are stacks of consecutive steps: see stacks.c. */
#ifndef SHMB_STACKS_H
#define SHMB_STACKS_H

#include <stdbool.h>
#include <stdint.h>

struct shmb_ring;

/* What a sample has of a leaf: one row, a row for each step, or, from a number of a leaf on, the stack of that leaf moved on by
 * one step, whose last row is the leaf's own. */
enum { SHMB_ONE_ROW = -2, SHMB_STACK = -1 };

struct shmb_stacks {
    const int64_t *index, *tickets; /* [count, steps]; the last step of each row is the item that was drawn */
    uint64_t count, steps;
    const int32_t *forms; /* of each leaf */
};

static inline uint64_t shmb_rows_of(int32_t form, uint64_t steps) { return form == SHMB_ONE_ROW ? 1 : steps; }

/* False: one of the items is another one by now. `bytes`: of a row of the sample. No lock is taken. */
bool shmb_read_stacks(const struct shmb_ring *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t bytes);

#endif
