/* Random draws without replacement: see choosing.c. */
#ifndef SHMB_CHOOSING_H
#define SHMB_CHOOSING_H

#include "tables/labels.h"

struct shmb_swap; /* an entry of a partial shuffle */
struct shmb_choice {
    uint64_t key, next; /* state of the random number generator */
    struct shmb_swap *swapped;
    uint64_t mask;
};

bool shmb_choice_begin(struct shmb_choice *choice, uint64_t key, uint64_t count); /* false: out of memory */
void shmb_choice_end(struct shmb_choice *choice);
/* Draws one of the numbers of a set that were not drawn yet; `left` is how many there are. */
uint64_t shmb_choose(struct shmb_choice *choice, uint64_t set, uint64_t left);
uint64_t shmb_choose_any(struct shmb_choice *choice, uint64_t bound); /* with replacement */

/* Draws elements by the weights of their labels, which are in the order of the labels. `with_replacement`: with replacement.
 * Stores their labels, too, unless `labels` is NULL. False: out of memory, or no remaining label has a weight. */
bool shmb_draw_labelled(struct shmb_labels *all, const double *weights, uint64_t key, uint64_t count, bool with_replacement, int64_t *out,
                        int64_t *labels);

#endif
