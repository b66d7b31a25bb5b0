/* The tree of sums: wide, and recomputed from the children instead of adjusted by differences.
 *
 * Level 0 holds the mass of each element, which is 0 if its slot is not COMMITTED. A node of level k >= 1 holds the
 * sum of 16 children and the smallest positive value below it (0: there is none). The order of summation is fixed,
 * four quarters of four, so that every computation gives the same bits. A process that changes a tree holds the
 * mutex of its ring. */
#include "core/tree.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/crashpoint.h"
#include "core/power.h"

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

/* Nonnegative numbers are ordered as their bits. Subtracting 1 makes the bits of 0 the largest. */
static __attribute__((noinline)) double least_but_zero(const double *c) {
    uint64_t least[2] = {UINT64_MAX, UINT64_MAX}; /* two lanes that run in parallel */
    for (unsigned i = 0; i < SHMB_FANOUT; i += 2)
        for (unsigned lane = 0; lane < 2; lane++) least[lane] = lesser(bits_of(c[i + lane]) - 1, least[lane]);
    return from_bits(lesser(least[0], least[1]) + 1);
}

static inline double smaller(double a, double b) { return a < b ? a : b; }

/* Usually every place has an item, so that no zeros have to be skipped. */
static inline double least_of(const struct shmb_tree *tree, const double *c) {
    double q0 = smaller(smaller(c[0], c[4]), smaller(c[8], c[12])), q1 = smaller(smaller(c[1], c[5]), smaller(c[9], c[13]));
    double q2 = smaller(smaller(c[2], c[6]), smaller(c[10], c[14])), q3 = smaller(smaller(c[3], c[7]), smaller(c[11], c[15]));
    double all = smaller(smaller(q0, q2), smaller(q1, q3));
    return __builtin_expect(all > 0, 1) || tree->dense ? all : least_but_zero(c);
}

#if defined(__x86_64__)
/* The same numbers in the same order, four at a time. */
__attribute__((target("avx2"))) static inline double sum_by_four(const double *c) {
    __m256d a = _mm256_hadd_pd(_mm256_loadu_pd(c), _mm256_loadu_pd(c + 4));
    __m256d b = _mm256_hadd_pd(_mm256_loadu_pd(c + 8), _mm256_loadu_pd(c + 12));
    __m256d q = _mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31));
    __m128d q01 = _mm256_castpd256_pd128(q), q23 = _mm256_extractf128_pd(q, 1);
    return ((q01[0] + q01[1]) + q23[0]) + q23[1];
}

__attribute__((target("avx2"))) static inline double least_by_four(const struct shmb_tree *tree, const double *c) {
    __m256d q = _mm256_min_pd(_mm256_min_pd(_mm256_loadu_pd(c), _mm256_loadu_pd(c + 4)),
                              _mm256_min_pd(_mm256_loadu_pd(c + 8), _mm256_loadu_pd(c + 12)));
    __m128d half = _mm_min_pd(_mm256_castpd256_pd128(q), _mm256_extractf128_pd(q, 1));
    double all = smaller(half[0], half[1]);
    return __builtin_expect(all > 0, 1) || tree->dense ? all : least_but_zero(c);
}
#else
#define sum_by_four sum_of_children
#define least_by_four least_of
#endif

/* A level of the tree, and the level below it. */
struct level_arrays {
    const struct shmb_tree *tree;
    const double *sums, *leasts; /* of the level below */
    double *node_sums, *node_leasts;
    bool by_four;
};

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline struct level_arrays get_level(const struct shmb_tree *tree, unsigned level, bool by_four) {
    bool leaves = level == 1;
    return (struct level_arrays){tree, leaves ? tree->mass : tree->sum[level - 1], leaves ? tree->mass : tree->min[level - 1],
                           tree->sum[level], tree->min[level], by_four};
}

ALWAYS_INLINE void recompute_sum(struct level_arrays arrays, uint64_t node) {
    const double *c = arrays.sums + node * SHMB_FANOUT;
    arrays.node_sums[node] = arrays.by_four ? sum_by_four(c) : sum_of_children(c);
    CP(tree_sum);
}

/* Returns true if the value changed. */
ALWAYS_INLINE bool recompute_least(struct level_arrays arrays, uint64_t node) {
    const double *c = arrays.leasts + node * SHMB_FANOUT;
    double low = arrays.by_four ? least_by_four(arrays.tree, c) : least_of(arrays.tree, c);
    bool other = low != arrays.node_leasts[node];
    arrays.node_leasts[node] = low;
    CP(tree_least);
    return other;
}

void shmb_tree_range(struct shmb_tree *tree, uint64_t first, uint64_t count) {
    if (count == 0) return;
    uint64_t last = first + count - 1;
    for (unsigned level = 1; level <= tree->depth; level++) {
        struct level_arrays level_arrays = get_level(tree, level, false);
        first /= SHMB_FANOUT, last /= SHMB_FANOUT;
        for (uint64_t node = first; node <= last; node++) {
            recompute_sum(level_arrays, node);
            recompute_least(level_arrays, node);
        }
    }
}

/* levels of up to so many nodes are marked in bitmaps; for larger levels the nodes are listed */
#define MARKED_NODES 4096

/* Nodes of a level whose sum, and whose minimum, must be recomputed. */
struct marked {
    uint64_t words; /* bitmap of the words in use */
    struct {
        uint64_t sums, leasts;
    } word[MARKED_NODES / 64];
};

static inline void mark_node(struct marked *marked, uint64_t node, bool least) {
    marked->words |= (uint64_t)1 << node / 64;
    marked->word[node / 64].sums |= (uint64_t)1 << node % 64;
    marked->word[node / 64].leasts |= (uint64_t)least << node % 64;
}

/* Most updates change no minimum, so the minima above need not be recomputed, which saves a third of the work. */
ALWAYS_INLINE void update_nodes(struct shmb_tree *tree, uint64_t *at, uint64_t count, bool by_four) {
    struct marked marked = {.words = 0};
    unsigned small = 1;
    while (tree->nodes[small] > MARKED_NODES) small++;
    memset(marked.word, 0, (tree->nodes[small] + 63) / 64 * sizeof marked.word[0]);
    for (uint64_t i = 0, previous = UINT64_MAX; small == 1 && i < count; i++) {
        uint64_t node = at[i] / SHMB_FANOUT;
        if (node != previous) mark_node(&marked, previous = node, true);
    }
    for (unsigned level = 1; level < small; level++) {
        struct level_arrays level_arrays = get_level(tree, level, by_four);
        uint64_t retained = 0, previous = UINT64_MAX;
        for (uint64_t i = 0; i < count; i++) {
            uint64_t node = at[i] / SHMB_FANOUT;
            if (node == previous) continue;
            previous = node;
            recompute_sum(level_arrays, node);
            bool other = recompute_least(level_arrays, node);
            if (level + 1 < small)
                at[retained++] = node;
            else
                mark_node(&marked, node / SHMB_FANOUT, other);
        }
        count = retained;
    }
    for (unsigned level = small; level <= tree->depth; level++) {
        struct level_arrays level_arrays = get_level(tree, level, by_four);
        uint64_t words = marked.words;
        marked.words = 0;
        for (; words; words &= words - 1) { /* the level above reuses earlier words, which are finished */
            unsigned at_word = (unsigned)__builtin_ctzll(words), above = at_word / SHMB_FANOUT, shift = at_word % SHMB_FANOUT * 4;
            uint64_t sums = marked.word[at_word].sums, leasts = marked.word[at_word].leasts, up = 0, up_least = 0;
            for (; sums; sums &= sums - 1) {
                unsigned bit = (unsigned)__builtin_ctzll(sums);
                uint64_t node = (uint64_t)at_word * 64 + bit;
                recompute_sum(level_arrays, node);
                bool other = leasts >> bit & 1 && recompute_least(level_arrays, node);
                up |= (uint64_t)1 << bit / SHMB_FANOUT;
                up_least |= (uint64_t)other << bit / SHMB_FANOUT;
            }
            uint64_t retained = -(marked.words >> above & 1);
            marked.word[above].sums = (marked.word[above].sums & retained) | up << shift;
            marked.word[above].leasts = (marked.word[above].leasts & retained) | up_least << shift;
            marked.words |= (uint64_t)1 << above;
        }
    }
}

static void update_by_two(struct shmb_tree *tree, uint64_t *at, uint64_t count) { update_nodes(tree, at, count, false); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void update_by_four(struct shmb_tree *tree, uint64_t *at, uint64_t count) {
    update_nodes(tree, at, count, true);
}
#else
#define update_by_four update_by_two
#endif

void shmb_tree_update(struct shmb_tree *tree, uint64_t *at, uint64_t count) {
    (shmb_has_avx2 ? update_by_four : update_by_two)(tree, at, count);
}

/* Each level is padded to a multiple of 16 nodes, and the padding is part of the sums. */
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

/* Number of nodes above the first `count` leaves that differ from their children. */
uint64_t shmb_tree_count_faults(const struct shmb_tree *tree, uint64_t count) {
    uint64_t wrong = 0;
    for (unsigned level = 1; level <= tree->depth; level++) {
        struct level_arrays level_arrays = get_level(tree, level, false);
        count = (count + SHMB_FANOUT - 1) / SHMB_FANOUT;
        for (uint64_t node = 0; node < count; node++)
            wrong += tree->sum[level][node] != sum_of_children(level_arrays.sums + node * SHMB_FANOUT) ||
                     tree->min[level][node] != least_of(tree, level_arrays.leasts + node * SHMB_FANOUT);
    }
    return wrong;
}

static inline double combine(bool least, double result, double value) {
    return !least ? result + value : value < result ? value : result;
}

double shmb_tree_query(const struct shmb_tree *tree, bool least, uint64_t first, uint64_t end) {
    if (first == 0 && end == tree->nodes[0]) return least ? shmb_tree_min(tree) : shmb_tree_total(tree);
    double result = least ? INFINITY : 0;
    for (unsigned level = 0; first < end; level++, first /= SHMB_FANOUT, end /= SHMB_FANOUT) {
        const double *at = level == 0 ? tree->mass : least ? tree->min[level] : tree->sum[level];
        for (; first < end && first % SHMB_FANOUT != 0; first++) result = combine(least, result, at[first]);
        for (; first < end && end % SHMB_FANOUT != 0; end--) result = combine(least, result, at[end - 1]);
    }
    return result;
}

/* Rounding at the end of a node may lead beyond its last child. The last child is returned then. */
uint64_t shmb_tree_lower_bound(const struct shmb_tree *tree, double sum) {
    if (!(sum <= shmb_tree_total(tree))) return tree->nodes[0];
    uint64_t node = 0;
    for (unsigned level = tree->depth; level > 0; level--) {
        const double *c = (level == 1 ? tree->mass : tree->sum[level - 1]) + node * SHMB_FANOUT;
        uint64_t last = tree->nodes[level - 1] - 1;
        for (node *= SHMB_FANOUT; node < last && node % SHMB_FANOUT < SHMB_FANOUT - 1 && sum > *c; node++) sum -= *c++;
    }
    return node;
}
