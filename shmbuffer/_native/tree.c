/* The tree of sums: wide, recomputed from children, never adjusted by differences.
 *
 * Level 0 holds the mass of each element, 0 if its slot is not COMMITTED. A node of level k >= 1 holds the sum of 16
 * children and the smallest positive value below it (0: there is none). The order of summation is fixed, four quarters of
 * four, so that every build gives the same bits. A process that changes a tree holds the mutex of its ring. */
#include "tree.h"

#include <math.h>
#include <string.h>

#include "crashpoint.h"
#include "power.h"

void shmb_tree_map(struct shmb_tree *tree, const struct shmb_sections *sections, unsigned char *slots) {
    tree->depth = sections->depth;
    tree->mass = (double *)(slots + sections->mass);
    memcpy(tree->nodes, sections->nodes, sizeof tree->nodes);
    for (unsigned level = 1; level <= sections->depth; level++) {
        tree->sum[level] = (double *)(slots + sections->sum[level]);
        tree->min[level] = (double *)(slots + sections->min[level]);
    }
}

static inline double sum_of_children(const double *c) {
    double q0 = (c[0] + c[1]) + (c[2] + c[3]), q1 = (c[4] + c[5]) + (c[6] + c[7]);
    double q2 = (c[8] + c[9]) + (c[10] + c[11]), q3 = (c[12] + c[13]) + (c[14] + c[15]);
    return ((q0 + q1) + q2) + q3;
}

static inline uint64_t lesser(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The bits of numbers from 0 on are in their order, and less one those of 0 are the largest. */
static __attribute__((noinline)) double least_but_zero(const double *c) {
    uint64_t least[2] = {UINT64_MAX, UINT64_MAX}; /* side by side, so that both run at the same time */
    for (unsigned i = 0; i < SHMB_FANOUT; i += 2)
        for (unsigned lane = 0; lane < 2; lane++) least[lane] = lesser(bits_of(c[i + lane]) - 1, least[lane]);
    return from_bits(lesser(least[0], least[1]) + 1);
}

static inline double smaller(double a, double b) { return a < b ? a : b; }

/* Where there is an item in every place, and that is most often, none has to be left out. */
static inline double least_of(const struct shmb_tree *tree, const double *c) {
    double q0 = smaller(smaller(smaller(c[0], c[1]), c[2]), c[3]), q1 = smaller(smaller(smaller(c[4], c[5]), c[6]), c[7]);
    double q2 = smaller(smaller(smaller(c[8], c[9]), c[10]), c[11]), q3 = smaller(smaller(smaller(c[12], c[13]), c[14]), c[15]);
    double all = smaller(smaller(q0, q1), smaller(q2, q3));
    return __builtin_expect(all > 0, 1) || tree->whole ? all : least_but_zero(c);
}

static inline const double *sums_below(const struct shmb_tree *tree, unsigned level, uint64_t node) {
    return (level == 1 ? tree->mass : tree->sum[level - 1]) + node * SHMB_FANOUT;
}

static inline const double *minima_below(const struct shmb_tree *tree, unsigned level, uint64_t node) {
    return (level == 1 ? tree->mass : tree->min[level - 1]) + node * SHMB_FANOUT;
}

static inline void resum(struct shmb_tree *tree, unsigned level, uint64_t node) {
    tree->sum[level][node] = sum_of_children(sums_below(tree, level, node));
    CP(tree_sum);
}

/* Whether it is another one than before. */
static inline bool relook(struct shmb_tree *tree, unsigned level, uint64_t node) {
    double low = least_of(tree, minima_below(tree, level, node));
    bool other = low != tree->min[level][node];
    tree->min[level][node] = low;
    CP(tree_least);
    return other;
}

void shmb_tree_range(struct shmb_tree *tree, uint64_t first, uint64_t count) {
    if (count == 0) return;
    uint64_t last = first + count - 1;
    for (unsigned level = 1; level <= tree->depth; level++) {
        first /= SHMB_FANOUT, last /= SHMB_FANOUT;
        for (uint64_t node = first; node <= last; node++) {
            resum(tree, level, node);
            relook(tree, level, node);
        }
    }
}

#define BITMAP_NODES 4096 /* levels up to this size remember which nodes were done, and which have another minimum below */

static inline bool has(const uint64_t *bits, uint64_t at) { return bits[at / 64] >> (at % 64) & 1; }

static inline void add(uint64_t *bits, uint64_t at) { bits[at / 64] |= (uint64_t)1 << (at % 64); }

/* Most updates change no minimum, so that those above it need not be looked for: a third of the work. */
void shmb_tree_touched(struct shmb_tree *tree, uint64_t *at, uint64_t count) {
    uint64_t done[BITMAP_NODES / 64], lower[2][BITMAP_NODES / 64];
    for (unsigned level = 1; level <= tree->depth; level++) {
        const uint64_t *below = lower[level % 2];
        uint64_t *above = lower[(level + 1) % 2];
        uint64_t kept = 0, previous = UINT64_MAX;
        bool small = tree->nodes[level] <= BITMAP_NODES;
        bool upper = level < tree->depth && tree->nodes[level + 1] <= BITMAP_NODES;
        if (small) memset(done, 0, (tree->nodes[level] + 63) / 64 * 8);
        if (upper) memset(above, 0, (tree->nodes[level + 1] + 63) / 64 * 8);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t node = at[i] / SHMB_FANOUT;
            if (node == previous) continue;
            previous = node;
            if (small && has(done, node)) continue;
            if (small) add(done, node);
            resum(tree, level, node);
            bool other = (!small || level == 1 || has(below, node)) && relook(tree, level, node);
            if (upper && other) add(above, node / SHMB_FANOUT);
            at[kept++] = node;
        }
        count = kept;
    }
}

/* Behind the last node of a level there is room up to a multiple of 16, which is summed too. */
void shmb_tree_clear_padding(struct shmb_tree *tree) {
    for (unsigned level = 0; level <= tree->depth; level++)
        for (uint64_t node = tree->nodes[level]; node % SHMB_FANOUT != 0; node++) {
            if (level == 0) {
                tree->mass[node] = 0;
            } else {
                tree->sum[level][node] = 0;
                CP(leaves_padding);
                tree->min[level][node] = 0;
            }
            CP(leaves_padding);
        }
}

/* How many are not what their children say, of those above the first `count` leaves. */
uint64_t shmb_tree_wrong_nodes(const struct shmb_tree *tree, uint64_t count) {
    uint64_t wrong = 0;
    for (unsigned level = 1; level <= tree->depth; level++) {
        count = (count + SHMB_FANOUT - 1) / SHMB_FANOUT;
        for (uint64_t node = 0; node < count; node++)
            wrong += tree->sum[level][node] != sum_of_children(sums_below(tree, level, node)) ||
                     tree->min[level][node] != least_of(tree, minima_below(tree, level, node));
    }
    return wrong;
}

static inline double with(bool least, double found, double value) {
    return !least ? found + value : value < found ? value : found;
}

double shmb_tree_query(const struct shmb_tree *tree, bool least, uint64_t first, uint64_t end) {
    if (first == 0 && end == tree->nodes[0]) return least ? shmb_tree_min(tree) : shmb_tree_total(tree);
    double found = least ? INFINITY : 0;
    for (unsigned level = 0; first < end; level++, first /= SHMB_FANOUT, end /= SHMB_FANOUT) {
        const double *at = level == 0 ? tree->mass : least ? tree->min[level] : tree->sum[level];
        for (; first < end && first % SHMB_FANOUT != 0; first++) found = with(least, found, at[first]);
        for (; first < end && end % SHMB_FANOUT != 0; end--) found = with(least, found, at[end - 1]);
    }
    return found;
}

/* Rounding at the end of a node may lead beyond its last child; that one is taken then. */
uint64_t shmb_tree_lower_bound(const struct shmb_tree *tree, double sum) {
    if (!(sum <= shmb_tree_total(tree))) return tree->nodes[0];
    uint64_t node = 0;
    for (unsigned level = tree->depth; level > 0; level--) {
        const double *c = sums_below(tree, level, node);
        uint64_t last = tree->nodes[level - 1] - 1;
        for (node *= SHMB_FANOUT; node < last && node % SHMB_FANOUT < SHMB_FANOUT - 1 && sum > *c; node++) sum -= *c++;
    }
    return node;
}
