/* Drawing without an item twice: see choosing.c. */
#ifndef SHMB_CHOOSING_H
#define SHMB_CHOOSING_H

#include "tables/labels.h"

struct shmb_swapped; /* numbers that stand for others */
struct shmb_choice {
    uint64_t key, next; /* of the random numbers */
    struct shmb_swapped *swapped;
    uint64_t mask;
};

bool shmb_choice_begin(struct shmb_choice *choice, uint64_t key, uint64_t count); /* false: there is no memory */
void shmb_choice_end(struct shmb_choice *choice);
/* One of the numbers of a set that were not chosen yet, of which `left` are. */
uint64_t shmb_choose(struct shmb_choice *choice, uint64_t set, uint64_t left);
uint64_t shmb_choose_any(struct shmb_choice *choice, uint64_t of); /* again, perhaps */

/* Elements by the weight of their labels, in the order of the labels; `again`: one may come twice. Their labels, too, where
 * `labels` is not NULL. False: no memory, or nothing that weighs anything. */
bool shmb_draw_labelled(struct shmb_labels *all, const double *weights, uint64_t key, uint64_t count, bool again, int64_t *out,
                        int64_t *labels);

#endif
