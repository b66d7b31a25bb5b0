/* An upper bound of the speed: the random numbers, tree and stores of the core, without locks, checks and Python. An item is
 * one record, so it is contiguous in memory; the core has a file for each leaf. Nothing is validated, there are no
 * other processes, nothing survives a crash, and all batches use the same memory.
 *
 * Random numbers and weights are those of sample.c, powers those of power.c, and the tree is that of tree.c. Crash
 * points are left out. */
#define _GNU_SOURCE
#define SHMB_CRASHPOINT_H
#define CP(symbol) ((void)0)
#include "core/sample.c"

#include "core/layout.c"
#include "core/power.c"
#include "core/tree.c"

#define VISIBLE __attribute__((visibility("default")))
#define LEAVES 16
#define AT_ONCE 128 /* priorities whose masses and places are fetched together, as in the core */

_Thread_local struct shmb_refusal shmb_refusal;

static struct {
    struct shmb_tree tree;
    double *raw, alpha, eps, beta;
    unsigned char *rows, *out[LEAVES];
    uint64_t capacity, stride, head, bytes[LEAVES], offset[LEAVES];
    unsigned leaves;
    int64_t *index;
    uint64_t *touched;
    float *weights;
    double *masses, *given;
    uint32_t *order;
    struct random random;
} ring;

/* Bytes of the second file, with raw priorities and the tree. */
VISIBLE uint64_t bound_bytes(uint64_t capacity) {
    struct shmb_sections sections;
    shmb_compute_sections(capacity, 1, false, 0, &sections);
    return sections.bytes;
}

/* `most`: items of the largest batch. 0: no memory. */
VISIBLE int bound_open(unsigned char *rows, unsigned char *beside, uint64_t capacity, uint64_t stride, const uint64_t *bytes,
                       unsigned leaves, uint64_t most, double alpha, double eps, double beta) {
    struct shmb_sections sections;
    shmb_compute_sections(capacity, 1, false, 0, &sections);
    shmb_tree_map(&ring.tree, &sections, beside);
    ring.raw = (double *)(beside + sections.raw);
    ring.rows = rows, ring.capacity = capacity, ring.stride = stride, ring.leaves = leaves, ring.head = 0;
    ring.alpha = alpha, ring.eps = eps, ring.beta = beta;
    uint64_t at = 0;
    for (unsigned leaf = 0; leaf < leaves; leaf++) {
        ring.bytes[leaf] = bytes[leaf], ring.offset[leaf] = at, at += bytes[leaf];
        if (!(ring.out[leaf] = malloc(most * bytes[leaf]))) return 0;
    }
    ring.index = malloc(most * sizeof *ring.index), ring.touched = malloc(most * sizeof *ring.touched);
    ring.weights = malloc(most * sizeof *ring.weights), ring.masses = malloc(most * sizeof *ring.masses);
    ring.order = malloc(most * sizeof *ring.order), ring.given = malloc(most * sizeof *ring.given);
    for (uint64_t i = 0; ring.order && i < most; i++) ring.order[i] = (uint32_t)i;
    shmb_powers_init();
    return ring.index && ring.touched && ring.weights && ring.masses && ring.order && ring.given;
}

VISIBLE void bound_close(void) {
    for (unsigned leaf = 0; leaf < ring.leaves; leaf++) free(ring.out[leaf]);
    free(ring.index), free(ring.touched), free(ring.weights), free(ring.masses), free(ring.order), free(ring.given);
    memset(&ring, 0, sizeof ring);
}

static inline void copy_leaf(unsigned char *to, uint64_t to_stride, const unsigned char *from, const int64_t *index,
                             uint64_t from_stride, uint64_t bytes, uint64_t count) {
    switch (bytes) {
#define COPY_FIXED(n)                                                                                                \
    case n:                                                                                                          \
        for (uint64_t i = 0; i < count; i++) memcpy(to + i * to_stride, from + (index ? (uint64_t)index[i] : i) * from_stride, n); \
        break;
        COPY_FIXED(1)
        COPY_FIXED(4)
        COPY_FIXED(8)
        COPY_FIXED(16)
#undef COPY_FIXED
    default:
        for (uint64_t i = 0; i < count; i++) memcpy(to + i * to_stride, from + (index ? (uint64_t)index[i] : i) * from_stride, bytes);
    }
}

/* The rows of a few items at a time, so that they are still in the cache for the last of their leaves. */
static void gather(uint64_t count) {
    uint64_t some = ring.stride < 4096 ? 16384 / ring.stride : 4;
    for (uint64_t from = 0; from < count; from += some) {
        uint64_t n = count - from < some ? count - from : some;
        for (uint64_t i = from; i < from + n; i++)
            fetch(ring.rows + (uint64_t)ring.index[i] * ring.stride, ring.stride);
        for (unsigned leaf = 0; leaf < ring.leaves; leaf++)
            copy_leaf(ring.out[leaf] + from * ring.bytes[leaf], ring.bytes[leaf], ring.rows + ring.offset[leaf], ring.index + from,
                      ring.stride, ring.bytes[leaf], n);
    }
}

static void draw_prioritized(uint64_t from, uint64_t count) {
    const struct shmb_tree *tree = &ring.tree;
    double total = shmb_tree_total(tree), least = shmb_tree_min(tree), at[LOCKED_DRAWS];
    uint64_t node[LOCKED_DRAWS];
    struct draw draws[LOCKED_DRAWS];
    for (uint64_t i = 0; i < count; i++) at[i] = uniform(&ring.random) * total, node[i] = 0;
    for (unsigned level = tree->depth; level > 0; level--) {
        const double *children = level == 1 ? tree->mass : tree->sum[level - 1];
        for (uint64_t i = 0; i < count; i++) {
            node[i] = node[i] * SHMB_FANOUT + child_of(children + node[i] * SHMB_FANOUT, &at[i]);
            if (level == 1) continue;
            const double *below = (level == 2 ? tree->mass : tree->sum[level - 2]) + node[i] * SHMB_FANOUT;
            __builtin_prefetch(below);
            __builtin_prefetch(below + 8);
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        ring.index[from + i] = (int64_t)node[i];
        draws[i].mass = tree->mass[node[i]] / least;
    }
    weigh(draws, ring.order, count, ring.beta, ring.weights + from);
}

static void sample(uint64_t count, int prioritized) {
    for (uint64_t from = 0; prioritized && from < count; from += LOCKED_DRAWS)
        draw_prioritized(from, count - from < LOCKED_DRAWS ? count - from : LOCKED_DRAWS);
    for (uint64_t i = 0; !prioritized && i < count; i++) ring.index[i] = (int64_t)draw_below(&ring.random, ring.capacity);
    gather(count);
}

static inline void look_ahead(const double *at) { __asm__ volatile("" : : "r"(bits_of(*at))); }

static void update(const int64_t *index, const float *priorities, uint64_t count) {
    struct shmb_tree *tree = &ring.tree;
    for (uint64_t from = 0; from < count; from += AT_ONCE) {
        uint64_t n = count - from < AT_ONCE ? count - from : AT_ONCE;
        for (uint64_t i = from; i < from + n; i++) {
            uint64_t element = (uint64_t)index[i], node = element / SHMB_FANOUT;
            look_ahead(&ring.raw[element]);
            look_ahead(&tree->mass[node * SHMB_FANOUT]);
            look_ahead(&tree->mass[node * SHMB_FANOUT + SHMB_FANOUT / 2]);
            look_ahead(&tree->sum[1][node]);
            look_ahead(&tree->sum[1][node ^ SHMB_FANOUT / 2]);
            look_ahead(&tree->min[1][node]);
        }
        for (uint64_t i = 0; i < n; i++) ring.given[i] = priorities[from + i];
        shmb_powers(ring.given, ring.eps, ring.alpha, ring.masses, n);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t element = ring.touched[i] = (uint64_t)index[from + i];
            ring.raw[element] = ring.given[i];
            tree->mass[element] = ring.masses[i];
        }
        shmb_tree_update(tree, ring.touched, n);
    }
}

static void extend(const unsigned char *const *batch, const float *priorities, uint64_t count) {
    for (uint64_t done = 0; done < count;) {
        uint64_t slot = ring.head % ring.capacity, left = ring.capacity - slot, n = count - done < left ? count - done : left;
        for (unsigned leaf = 0; leaf < ring.leaves; leaf++)
            copy_leaf(ring.rows + slot * ring.stride + ring.offset[leaf], ring.stride, batch[leaf] + done * ring.bytes[leaf], NULL,
                      ring.bytes[leaf], ring.bytes[leaf], n);
        for (uint64_t i = 0; i < n; i++) ring.raw[slot + i] = priorities[done + i];
        shmb_powers(&ring.raw[slot], ring.eps, ring.alpha, &ring.tree.mass[slot], n);
        shmb_tree_range(&ring.tree, slot, n);
        ring.head += n, done += n;
    }
}

enum call { SAMPLE, UPDATE, CYCLE, EXTEND, UNIFORM };

/* Nanoseconds of so many calls of `count` items. The inputs of the calls take turns, from `first` on: sets of indices, of
 * priorities, of batches with an address a leaf. */
VISIBLE int64_t bound_calls(int call, uint64_t count, uint64_t calls, uint64_t first, uint64_t sets, const int64_t *index,
                            const float *priorities, const unsigned char *const *batches) {
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (uint64_t i = first; i < first + calls; i++) {
        uint64_t set = i % sets;
        if (call == EXTEND) extend(batches + set * ring.leaves, priorities + set * count, count);
        if (call == UPDATE) update(index + set * count, priorities + set * count, count);
        if (call == SAMPLE || call == CYCLE) sample(count, 1);
        if (call == UNIFORM) sample(count, 0);
        if (call == CYCLE) update(ring.index, priorities + set * count, count);
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return (ended.tv_sec - began.tv_sec) * 1000000000 + ended.tv_nsec - began.tv_nsec;
}

/* For tests: raw priorities, masses, the root. */
VISIBLE const void *bound_tree(int part) {
    return part == 0 ? ring.raw : part == 1 ? ring.tree.mass : ring.tree.sum[ring.tree.depth];
}

/* Of the last batch, for tests: a leaf's bytes, the indices, the weights. */
VISIBLE const void *bound_batch(int leaf) {
    return leaf == -2 ? (const void *)ring.weights : leaf == -1 ? (const void *)ring.index : (const void *)ring.out[leaf];
}
