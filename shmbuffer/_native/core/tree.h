/* The tree of sums, and what is done with it: see tree.c. */
#ifndef SHMB_TREE_H
#define SHMB_TREE_H

#include "core/layout.h"

struct shmb_tree {
    unsigned depth;
    uint64_t nodes[SHMB_MAX_DEPTH];
    double *mass; /* level 0 */
    double *sum[SHMB_MAX_DEPTH], *min[SHMB_MAX_DEPTH];
    bool whole; /* there is a number in every place: the smallest may be 0, or below */
};

void shmb_tree_map(struct shmb_tree *tree, const struct shmb_sections *sections, unsigned char *slots);
void shmb_tree_range(struct shmb_tree *tree, uint64_t first, uint64_t count); /* parents of leaves [first, first+count) */
void shmb_tree_touched(struct shmb_tree *tree, uint64_t *elements, uint64_t count); /* consumes its argument */
void shmb_tree_clear_padding(struct shmb_tree *tree);
uint64_t shmb_tree_wrong_nodes(const struct shmb_tree *tree, uint64_t count);
double shmb_tree_query(const struct shmb_tree *tree, bool least, uint64_t first, uint64_t end); /* of leaves [first, end) */
uint64_t shmb_tree_lower_bound(const struct shmb_tree *tree, double sum); /* the first leaf that reaches it; else nodes[0] */
static inline double shmb_tree_total(const struct shmb_tree *tree) { return tree->sum[tree->depth][0]; }
static inline double shmb_tree_min(const struct shmb_tree *tree) { return tree->min[tree->depth][0]; }

#endif
