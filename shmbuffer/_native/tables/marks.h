/* A set of numbers below a limit that can count its elements and select the k-th: see marks.c. */
#ifndef SHMB_MARKS_H
#define SHMB_MARKS_H

#include <stdbool.h>
#include <stdint.h>

#define SHMB_MARKS_DEPTH 8

struct shmb_marks {
    uint64_t limit;
    uint64_t *bits;
    unsigned depth;
    uint32_t *counts[SHMB_MARKS_DEPTH]; /* level 0: count of 512 numbers; each higher level: of 16 nodes below */
    uint64_t nodes[SHMB_MARKS_DEPTH];
    uint64_t total;
};

bool shmb_marks_make(struct shmb_marks *marks, uint64_t limit); /* false: out of memory */
void shmb_marks_free(struct shmb_marks *marks);
void shmb_marks_clear(struct shmb_marks *marks);
void shmb_marks_set(struct shmb_marks *marks, uint64_t number, bool included);
/* moves an element of the set to an unused number */
void shmb_marks_move(struct shmb_marks *marks, uint64_t from, uint64_t to);
uint64_t shmb_marks_below(const struct shmb_marks *marks, uint64_t number); /* number of smaller elements */
uint64_t shmb_marks_at(const struct shmb_marks *marks, uint64_t k);         /* the k-th element, from 0; k < total */

#endif
