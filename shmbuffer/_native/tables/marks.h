/* A set of numbers below a limit, of which it knows how many there are and which is the k-th: see marks.c. */
#ifndef SHMB_MARKS_H
#define SHMB_MARKS_H

#include <stdbool.h>
#include <stdint.h>

#define SHMB_MARKS_DEPTH 8

struct shmb_marks {
    uint64_t limit;
    uint64_t *bits;
    unsigned depth;
    uint32_t *counts[SHMB_MARKS_DEPTH]; /* level 0: of 512 numbers each; above it of 16 of the level below */
    uint64_t nodes[SHMB_MARKS_DEPTH];
    uint64_t total;
};

bool shmb_marks_make(struct shmb_marks *marks, uint64_t limit); /* false: there is no memory */
void shmb_marks_free(struct shmb_marks *marks);
void shmb_marks_clear(struct shmb_marks *marks);
void shmb_marks_set(struct shmb_marks *marks, uint64_t number, bool there);
void shmb_marks_move(struct shmb_marks *marks, uint64_t from, uint64_t to); /* one that is there, to where none is */
uint64_t shmb_marks_below(const struct shmb_marks *marks, uint64_t number); /* how many are smaller */
uint64_t shmb_marks_at(const struct shmb_marks *marks, uint64_t k);         /* the k-th, from 0; k < total */

#endif
