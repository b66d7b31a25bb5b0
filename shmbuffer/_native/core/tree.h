/* The tree of sums and its operations: see tree.c. */
#ifndef SHMB_TREE_H
#define SHMB_TREE_H

#include "core/layout.h"

struct shmb_tree {
    unsigned depth;
    uint64_t nodes[SHMB_MAX_DEPTH];
    double *mass; /* level 0 */
    double *sum[SHMB_MAX_DEPTH], *min[SHMB_MAX_DEPTH];
    bool dense; /* every element has a number, so the smallest one may be 0 or negative */
};

void shmb_tree_map(struct shmb_tree *tree, const struct shmb_sections *sections, unsigned char *slots);
/* recomputes the parents of leaves [first, first+count) */
void shmb_tree_range(struct shmb_tree *tree, uint64_t first, uint64_t count);
void shmb_tree_update(struct shmb_tree *tree, uint64_t *elements, uint64_t count); /* overwrites `elements` */
void shmb_tree_clear_padding(struct shmb_tree *tree);
uint64_t shmb_tree_count_faults(const struct shmb_tree *tree, uint64_t count);
/* over leaves [first, end) */
double shmb_tree_query(const struct shmb_tree *tree, bool least, uint64_t first, uint64_t end);
/* the first leaf whose prefix sum reaches `sum`, or nodes[0] */
uint64_t shmb_tree_lower_bound(const struct shmb_tree *tree, double sum);
static inline double shmb_tree_total(const struct shmb_tree *tree) { return tree->sum[tree->depth][0]; }
static inline double shmb_tree_min(const struct shmb_tree *tree) { return tree->min[tree->depth][0]; }

#endif
