/* Draws, copies and validates. A reader never blocks a writer: rows are copied without a lock, and used only if the
 * slot word is the same before and after the copy. */
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"
#include "core/ring.h"
#include "core/weighing.h"

#define MAX_ROUNDS 8        /* attempts without the lock; rows that still change are then drawn and copied under it */
#define LOCKED_DRAWS 512 /* draws in one locked section, some tens of microseconds */
#define MAX_REJECTIONS 64   /* uniform draws of slots without an item, before a scan finds the items */

struct draw {
    uint64_t word;
    double mass; /* later divided by the smallest mass in the buffer; 1 for a uniform draw */
};

/* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) as a
 * counter-based generator: number i of a key needs no state and no order. */
static uint64_t random_at(uint64_t key, uint64_t i) {
    uint64_t z = key + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

struct random {
    uint64_t key, next;
};

static double uniform(struct random *random) { return (double)(random_at(random->key, random->next++) >> 11) * 0x1p-53; }

static uint64_t draw_below(struct random *random, uint64_t bound) {
    return (uint64_t)(((unsigned __int128)random_at(random->key, random->next++) * bound) >> 64);
}

static void copy_row(const struct shmb_ring *ring, uint64_t element, uint64_t next, unsigned char *const *out, uint64_t row) {
    if (ring->plan) shmb_copy_next(ring, element, next, out, row);
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes;
        if (bytes == 0) continue; /* a leaf without bytes has no map */
        memcpy(out[leaf] + row * bytes, ring->leaves[leaf].base + element * bytes, bytes);
    }
}

/* Bytes of a row that are prefetched: all of a small row, and the beginning of a larger one, whose rest the hardware
 * prefetches. */
#define AHEAD_BYTES 512
#define CACHE_LINE 64

static inline void fetch(const unsigned char *at, uint64_t bytes) {
    for (uint64_t offset = 0; offset < bytes && offset < AHEAD_BYTES; offset += CACHE_LINE) __builtin_prefetch(at + offset);
}

/* Copies leaf by leaf, so that one stream of addresses is followed at a time. Rows of a fixed small size are not
 * prefetched. The processor has dozens of such short copies in flight, and a prefetch per line would only add time. */
static void copy_rows(const struct shmb_ring *ring, const int64_t *index, const uint32_t *rows, uint64_t count,
                      unsigned char *const *out) {
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes;
        const unsigned char *base = ring->leaves[leaf].base;
        unsigned char *to = out[leaf];
        if (bytes == 0) continue;
        switch (bytes) { /* sizes that the compiler turns into plain loads and stores */
#define COPY_FIXED(n)                                                                                        \
    case n:                                                                                                  \
        for (uint64_t i = 0; i < count; i++) memcpy(to + (uint64_t)rows[i] * n, base + (uint64_t)index[rows[i]] * n, n); \
        break;
            COPY_FIXED(1)
            COPY_FIXED(2)
            COPY_FIXED(4)
            COPY_FIXED(8)
            COPY_FIXED(16)
            COPY_FIXED(32)
#undef COPY_FIXED
        default: {
            uint64_t ahead = bytes < AHEAD_BYTES ? 2 * AHEAD_BYTES / bytes : 2;
            for (uint64_t i = 0; i < ahead && i < count; i++) fetch(base + (uint64_t)index[rows[i]] * bytes, bytes);
            for (uint64_t i = 0; i < count; i++) {
                if (i + ahead < count) fetch(base + (uint64_t)index[rows[i + ahead]] * bytes, bytes);
                memcpy(to + rows[i] * bytes, base + (uint64_t)index[rows[i]] * bytes, bytes);
            }
        }
        }
        CP(sample_copy);
    }
}

/* Copies next observations that are stored once. If one moves during its copy, it is copied again. */
static void copy_nexts(const struct shmb_ring *ring, const int64_t *index, const uint32_t *rows, uint64_t count,
                       unsigned char *const *out, const struct draw *draws, uint64_t *nexts) {
    for (uint64_t i = 0; i < count; i++) nexts[i] = shmb_read_next(ring, (uint64_t)index[rows[i]]);
    for (unsigned which = 0; which < ring->n_shared; which++) {
        uint64_t bytes = ring->shared[which].bytes, ahead = bytes < AHEAD_BYTES ? 2 * AHEAD_BYTES / bytes : 2;
        unsigned char *to = out[ring->shared[which].leaf];
        for (uint64_t i = 0; i < ahead && i < count; i++) fetch(shmb_next_address(ring, which, (uint64_t)index[rows[i]], nexts[i]), bytes);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t then = i + ahead;
            if (then < count) fetch(shmb_next_address(ring, which, (uint64_t)index[rows[then]], nexts[then]), bytes);
            memcpy(to + rows[i] * bytes, shmb_next_address(ring, which, (uint64_t)index[rows[i]], nexts[i]), bytes);
        }
        CP(sample_copy);
    }
    atomic_thread_fence(SYNC_SLOT_NEXT_ACQUIRE);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = (uint64_t)index[rows[i]];
        while (!shmb_link_still_holds(ring, slot, nexts[i]) && shmb_still_holds(ring, slot, draws[rows[i]].word)) {
            nexts[i] = shmb_read_next(ring, slot);
            shmb_copy_next(ring, slot, nexts[i], out, rows[i]);
            atomic_thread_fence(SYNC_SLOT_NEXT_ACQUIRE);
        }
    }
}

/* Returns the child of a node that contains x, and subtracts the mass before it from x. The sums are those of four
 * quarters, as in tree.c, and only the last test is a branch. Rounding may lead to a child without mass, which is
 * replaced by the nearest one with mass. */
static inline uint64_t child_of(const double *c, double *x) {
    double q0 = (c[0] + c[1]) + (c[2] + c[3]), q1 = (c[4] + c[5]) + (c[6] + c[7]);
    double q2 = (c[8] + c[9]) + (c[10] + c[11]);
    double before[4] = {0, q0, q0 + q1, (q0 + q1) + q2}, at = *x; /* a table lookup instead of branches */
    unsigned quarter = (unsigned)(at >= before[1]) + (unsigned)(at >= before[2]) + (unsigned)(at >= before[3]);
    at -= before[quarter];
    const double *d = c + 4 * quarter;
    double inner[4] = {0, d[0], d[0] + d[1], (d[0] + d[1]) + d[2]};
    unsigned place = (unsigned)(at >= inner[1]) + (unsigned)(at >= inner[2]) + (unsigned)(at >= inner[3]);
    at -= inner[place];
    int child = (int)(4 * quarter + place);
    if (__builtin_expect(!(c[child] > 0), 0)) {
        int nearest = child;
        while (nearest >= 0 && !(c[nearest] > 0)) nearest--;
        for (int i = child + 1; nearest < 0 && i < (int)SHMB_FANOUT; i++)
            if (c[i] > 0) nearest = i;
        child = nearest < 0 ? 0 : nearest;
        at = 0;
    }
    *x = at;
    return (uint64_t)child;
}

/* All draws of a batch descend together, level by level, so that their cache misses overlap. */
static void draw_by_mass(struct shmb_ring *ring, struct random *random, const uint32_t *rows, uint64_t count,
                         int64_t *index, struct draw *draws) {
    const struct shmb_tree *tree = &ring->tree;
    double total = shmb_tree_total(tree), at[LOCKED_DRAWS];
    uint64_t node[LOCKED_DRAWS];
    for (uint64_t i = 0; i < count; i++) at[i] = uniform(random) * total, node[i] = 0;
    for (unsigned level = tree->depth; level > 0; level--) {
        const double *children = level == 1 ? tree->mass : tree->sum[level - 1];
        for (uint64_t i = 0; i < count; i++) {
            const double *c = children + node[i] * SHMB_FANOUT;
            node[i] = node[i] * SHMB_FANOUT + child_of(c, &at[i]);
            /* the tree is damaged */
            if (__builtin_expect(node[i] >= tree->nodes[level - 1], 0)) node[i] = tree->nodes[level - 1] - 1;
            if (level > 1) {
                const double *below_it = (level == 2 ? tree->mass : tree->sum[level - 2]) + node[i] * SHMB_FANOUT;
                __builtin_prefetch(below_it);
                __builtin_prefetch(below_it + 8);
            } else {
                __builtin_prefetch(&ring->words[shmb_slot_of(ring, node[i])]);
            }
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        index[rows[i]] = (int64_t)node[i];
        draws[rows[i]] = (struct draw){atomic_load_explicit(&ring->words[shmb_slot_of(ring, node[i])], memory_order_relaxed),
                                       tree->mass[node[i]]};
    }
}

static inline void locate_record(const struct shmb_ring *ring, uint64_t slot, struct shmb_arena *arena, uint64_t row) {
    struct shmb_extent extent = ring->extents[slot];
    arena->starts[row] = (int64_t)arena->used;
    if (!shmb_is_valid_extent(ring, extent)) extent = (struct shmb_extent){0, 0}; /* it changed while it was read */
    arena->sizes[row] = (int64_t)extent.bytes;
    arena->positions[row] = extent.position;
    arena->used += (extent.bytes + 7) & ~(uint64_t)7;
}

static inline void copy_record(const struct shmb_ring *ring, const struct shmb_arena *arena, uint64_t row) {
    memcpy(arena->data + arena->starts[row], shmb_record_at(ring, arena->positions[row]), (size_t)arena->sizes[row]);
}

/* True if a record, or its copy, belongs to that ticket and position, according to its header. */
static inline bool is_expected_record(const struct shmb_record *record, const struct shmb_arena *arena, uint64_t row,
                                 uint64_t ticket) {
    return arena->sizes[row] > 0 && record->ticket == ticket && record->position == arena->positions[row] &&
           record->bytes == (uint64_t)arena->sizes[row];
}

static inline const struct shmb_record *record_in_ring(const struct shmb_ring *ring, const struct shmb_arena *arena, uint64_t row) {
    return (const struct shmb_record *)shmb_record_at(ring, arena->positions[row]);
}

static inline const struct shmb_record *record_in_arena(const struct shmb_arena *arena, uint64_t row) {
    return (const struct shmb_record *)(arena->data + arena->starts[row]);
}

static int by_rank(const void *a, const void *b) {
    uint64_t x = ((const uint64_t *)a)[0], y = ((const uint64_t *)b)[0];
    return (x > y) - (x < y);
}

/* Draws uniformly from the committed slots. Slots without an item are drawn again a limited number of times. For the
 * remaining rows, ranks among the committed slots are drawn, and one scan finds them all. */
static void draw_uniformly(struct shmb_ring *ring, struct random *random, const uint32_t *rows, uint64_t count,
                           int64_t *index, struct draw *draws) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    uint64_t reached = head < ring->capacity ? head : ring->capacity; /* slots from here on were never written */
    /* if the byte ring is the limit, only few slots hold an item */
    uint64_t oldest = ring->bytes ? shmb_oldest_ticket(ring) : 0;
    uint64_t low = oldest > head ? 0 : oldest;
    if (head > ring->capacity && low < head - ring->capacity) low = head - ring->capacity;
    if (!ring->bytes) low = 0, head = reached;
    uint64_t ranks[LOCKED_DRAWS][2], left = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = 0, slot = 0;
        int tries = 0;
        do {
            slot = low + draw_below(random, head - low);
            /* otherwise it is below the capacity, and a division would take longer than all the rest */
            if (ring->bytes) slot %= ring->capacity;
            word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        } while (SHMB_STATE(word) != SHMB_COMMITTED && ++tries < MAX_REJECTIONS);
        uint64_t lane = ring->lanes > 1 ? draw_below(random, ring->lanes) : 0;
        index[rows[i]] = (int64_t)(slot * ring->lanes + lane);
        draws[rows[i]] = (struct draw){word, 0};
        if (SHMB_STATE(word) != SHMB_COMMITTED) ranks[left][1] = rows[i], left++;
    }
    if (left == 0) return;
    uint64_t length = atomic_load_explicit(&ring->runtime->length, memory_order_relaxed), rank = 0, next = 0;
    for (uint64_t i = 0; i < left; i++) ranks[i][0] = draw_below(random, length);
    qsort(ranks, left, sizeof ranks[0], by_rank);
    for (uint64_t slot = 0; slot < reached && next < left; slot++) {
        uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        if (SHMB_STATE(word) != SHMB_COMMITTED) continue;
        for (; next < left && ranks[next][0] == rank; next++) {
            uint64_t row = ranks[next][1], lane = (uint64_t)index[row] % ring->lanes;
            index[row] = (int64_t)(slot * ring->lanes + lane);
            draws[row].word = word;
        }
        rank++;
    }
}

/* The mutex is held, and at least one slot is committed. False: a drawn slot has no item, which only a damaged tree
 * or count can cause; see shmb_refusal.bad_at. */
static bool draw(struct shmb_ring *ring, struct random *random, const uint32_t *rows, uint64_t count, int64_t *index,
                 int64_t *tickets, bool prioritized, struct draw *draws) {
    bool by_mass = shmb_draws_by_mass(ring, prioritized);
    if (by_mass)
        draw_by_mass(ring, random, rows, count, index, draws);
    else
        draw_uniformly(ring, random, rows, count, index, draws);
    double least = by_mass ? shmb_tree_min(&ring->tree) : 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t row = rows[i];
        if (__builtin_expect(SHMB_STATE(draws[row].word) != SHMB_COMMITTED, 0)) {
            shmb_refusal.bad_at = shmb_slot_of(ring, (uint64_t)index[row]);
            return false;
        }
        tickets[row] = (int64_t)SHMB_TICKET(draws[row].word);
        draws[row].mass = least > 0 ? draws[row].mass / least : 1;
    }
    CP(sample_drawn);
    return true;
}

/* Computes the importance weights of Schaul et al. 2016, section 3.4, divided by the largest one in the buffer, as
 * TorchRL does: (p / p_min) ** -beta. For at most LOCKED_DRAWS rows. */
static void weigh(const struct draw *draws, const uint32_t *rows, uint64_t count, double beta, float *weights) {
    double ratio[LOCKED_DRAWS];
    float weight[LOCKED_DRAWS];
    for (uint64_t i = 0; i < count; i++) ratio[i] = draws[rows[i]].mass;
    for (uint64_t i = 0; i < count; i++) weight[i] = weight_of(ratio[i], beta);
    for (uint64_t i = 0; i < count; i++) weights[rows[i]] = weight[i];
}

/* Rows that were drawn, and are to be copied and validated. */
struct gathering {
    const struct shmb_ring *ring;
    const int64_t *index;
    const uint32_t *rows;
    unsigned char *const *out;
    struct draw *draws;
    uint64_t *nexts;
    _Atomic uint64_t changed;
};

#define CACHE_MISS_BYTES 16 /* cost of the random access to a leaf of a row, in bytes that could be copied meanwhile */

/* Rows that changed during the copy get the word EMPTY, which no drawn row has. */
static void gather_rows(void *context, uint64_t first, uint64_t end) {
    struct gathering *with = context;
    const struct shmb_ring *ring = with->ring;
    const uint32_t *rows = with->rows + first;
    uint64_t count = end - first, changed = 0;
    if (with->out) SHMB_OPTIMISTIC(copy_rows(ring, with->index, rows, count, with->out));
    if (with->out && ring->plan)
        SHMB_OPTIMISTIC(copy_nexts(ring, with->index, rows, count, with->out, with->draws, with->nexts + first));
    atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
    for (uint64_t i = 0; i < count; i++) {
        struct draw *draw = &with->draws[rows[i]];
        bool holds = shmb_still_holds(ring, shmb_slot_of(ring, (uint64_t)with->index[rows[i]]), draw->word);
        if (__builtin_expect(!holds, 0)) draw->word = SHMB_WORD(0, SHMB_EMPTY), changed++;
    }
    if (changed) atomic_fetch_add_explicit(&with->changed, changed, memory_order_relaxed);
}

/* `out` may be NULL: then only indices, tickets and weights are computed. */
int shmb_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t key,
                unsigned char *const *out, int64_t *index, int64_t *tickets, float *weights, double beta,
                bool prioritized, uint64_t *redrawn, struct shmb_arena *arena) {
    struct random random = {key, 0};
    struct shmb_entry *me = ring->me;
    struct draw *draws = malloc(count * (sizeof *draws + sizeof(uint64_t) + sizeof(uint32_t)) + 1);
    if (draws == NULL) return SHMB_NO_MEMORY;
    uint64_t *nexts = (uint64_t *)(draws + count);
    uint32_t *rows = (uint32_t *)(nexts + count);
    uint64_t left = count, age = 0;
    int status = SHMB_OK;
    for (uint64_t i = 0; i < count; i++) rows[i] = (uint32_t)i;
    *redrawn = 0;
    for (int round = 0; left > 0; round++) {
        bool locked = round >= MAX_ROUNDS;
        for (uint64_t from = 0; from < left; from += LOCKED_DRAWS) {
            uint64_t n = left - from < LOCKED_DRAWS ? left - from : LOCKED_DRAWS;
            if ((status = shmb_lock(ring, call)) != SHMB_OK) goto out;
            CP(sample_locked);
            if (atomic_load_explicit(&ring->runtime->length, memory_order_relaxed) == 0) {
                shmb_unlock(ring);
                status = SHMB_NOTHING;
                goto out;
            }
            if (!draw(ring, &random, rows + from, n, index, tickets, prioritized, draws)) {
                shmb_unlock(ring);
                status = SHMB_DAMAGED;
                goto out;
            }
            for (uint64_t i = 0; ring->plan && i < n; i++) __builtin_prefetch(&ring->nexts[index[rows[from + i]]]);
            if (round == 0 && from == 0) shmb_last_draw_totals = shmb_compute_totals(ring, prioritized);
            for (uint64_t i = 0; arena && i < n; i++) /* under the same lock as the words, to which they belong */
                locate_record(ring, (uint64_t)index[rows[from + i]], arena, rows[from + i]);
            if (locked && arena && arena->used <= arena->space)
                for (uint64_t i = 0; i < n; i++) copy_record(ring, arena, rows[from + i]);
            if (locked && out)
                for (uint64_t i = 0; i < n; i++) copy_row(ring, (uint64_t)index[rows[from + i]], shmb_read_next(ring, (uint64_t)index[rows[from + i]]), out, rows[from + i]);
            shmb_unlock(ring);
            CP(sample_unlocked);
            if (weights) weigh(draws, rows + from, n, beta, weights);
        }
        if (arena && arena->used > arena->space) {
            shmb_refusal.needed = arena->used;
            status = SHMB_NO_ROOM;
            for (uint64_t i = 0; i < left; i++) { /* a damaged size must not become a request for memory */
                uint32_t row = rows[i];
                bool found;
                SHMB_OPTIMISTIC(found = is_expected_record(record_in_ring(ring, arena, row), arena, row, (uint64_t)tickets[row]));
                if (found) continue;
                atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
                uint64_t slot = shmb_slot_of(ring, (uint64_t)index[row]);
                if (shmb_still_holds(ring, slot, draws[row].word)) shmb_refusal.bad_at = slot, status = SHMB_DAMAGED;
            }
            goto out;
        }
        if (locked || (out == NULL && arena == NULL)) break;
        for (uint64_t i = 0; arena && i < left; i++) {
            if (i + 4 < left) __builtin_prefetch(shmb_record_at(ring, arena->positions[rows[i + 4]]));
            SHMB_OPTIMISTIC(copy_record(ring, arena, rows[i]));
            CP(sample_copy);
        }
        struct gathering with = {ring, index, rows, out, draws, nexts, 0};
        shmb_divide(gather_rows, &with, left, out ? ring->row_bytes / ring->lanes + CACHE_MISS_BYTES * ring->n_leaves : 1);
        uint64_t changed = 0, all = atomic_load_explicit(&with.changed, memory_order_relaxed);
        for (uint64_t i = 0; changed < all; i++)
            if (draws[rows[i]].word == SHMB_WORD(0, SHMB_EMPTY)) rows[changed++] = rows[i];
        CP(sample_validate);
        *redrawn += changed;
        left = changed;
    }
    for (uint64_t i = 0; arena && i < count; i++)
        if (!is_expected_record(record_in_arena(arena, i), arena, i, (uint64_t)tickets[i])) {
            shmb_refusal.bad_at = (uint64_t)index[i];
            status = SHMB_DAMAGED;
            goto out;
        }
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    for (uint64_t i = 0; i < count; i++) age += head - 1 - (uint64_t)tickets[i];
    atomic_fetch_add_explicit(&me->batches_sampled, 1, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&me->items_sampled, count, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&me->redraws, *redrawn, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&me->age_sum, age * ring->lanes, memory_order_relaxed);
    CP(count_added);
out:
    free(draws);
    return status;
}

/* Reads one element. Repeats until the copy is consistent, or the slot has no item. */
static int read_element(struct shmb_ring *ring, struct shmb_call *call, uint64_t element, unsigned char *const *out, uint64_t row,
                    int64_t *ticket) {
    const uint64_t slot = shmb_slot_of(ring, element);
    *ticket = -1;
    for (int round = 0;; round++) {
        bool locked = round >= MAX_ROUNDS;
        int status = locked ? shmb_lock(ring, call) : SHMB_OK;
        if (status != SHMB_OK) return status;
        uint64_t word = atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
        bool committed = SHMB_STATE(word) == SHMB_COMMITTED;
        uint64_t next = shmb_read_next(ring, slot);
        if (committed) SHMB_OPTIMISTIC(copy_row(ring, element, next, out, row));
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        bool valid = committed && shmb_link_still_holds(ring, slot, next) && shmb_still_holds(ring, slot, word);
        if (locked) shmb_unlock(ring);
        if (valid) *ticket = (int64_t)SHMB_TICKET(word);
        if (valid || !committed) return SHMB_OK;
    }
}

/* Reads elements by index. tickets[i] is -1 if the slot holds no item, and `missing` counts those. Rows are copied
 * together, leaf by leaf. Rows that change meanwhile are read one by one. */
int shmb_read(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
              unsigned char *const *out, int64_t *tickets, uint64_t *missing) {
    uint64_t words[LOCKED_DRAWS];
    uint32_t rows[LOCKED_DRAWS];
    *missing = 0;
    for (uint64_t from = 0; from < count; from += LOCKED_DRAWS) {
        const uint64_t end = count - from < LOCKED_DRAWS ? count : from + LOCKED_DRAWS;
        uint64_t n = 0;
        for (uint64_t i = from; i < end; i++) {
            uint64_t word = atomic_load_explicit(&ring->words[shmb_slot_of(ring, (uint64_t)index[i])], SYNC_SLOT_COMMIT_ACQUIRE);
            tickets[i] = -1;
            words[n] = word;
            rows[n] = (uint32_t)i;
            n += SHMB_STATE(word) == SHMB_COMMITTED;
        }
        if (!ring->plan) SHMB_OPTIMISTIC(copy_rows(ring, index, rows, n, out));
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t row = rows[i], element = (uint64_t)index[row];
            int status = SHMB_OK;
            if (!ring->plan && shmb_still_holds(ring, shmb_slot_of(ring, element), words[i]))
                tickets[row] = (int64_t)SHMB_TICKET(words[i]);
            else
                status = read_element(ring, call, element, out, row, &tickets[row]);
            if (status != SHMB_OK) return status;
        }
        for (uint64_t i = from; i < end; i++) *missing += tickets[i] < 0;
    }
    return SHMB_OK;
}

/* Prefetches the word and extent of a record that is read later, and then the record itself. */
static inline __attribute__((always_inline)) void fetch_soon(const struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t i) {
    if (i + 24 < count) __builtin_prefetch(&ring->words[index[i + 24]]), __builtin_prefetch(&ring->extents[index[i + 24]]);
    if (i + 8 >= count) return;
    struct shmb_extent extent = ring->extents[index[i + 8]];
    fetch(shmb_record_at(ring, extent.position), extent.bytes);
}

/* Reads records by slot, and stores them one after another. If the slot holds no item, tickets[i] is -1 and the size
 * is 0. SHMB_NO_ROOM: they do not fit into the arena; shmb_refusal.needed bytes suffice if nothing changes.
 * SHMB_DAMAGED: a slot refers to a place without its record. */
int shmb_read_records(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
                      struct shmb_arena *arena, int64_t *tickets) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = (uint64_t)index[i], before = arena->used;
        SHMB_OPTIMISTIC(fetch_soon(ring, index, count, i));
        for (int round = 0;; round++) {
            bool locked = round >= MAX_ROUNDS;
            int status = locked ? shmb_lock(ring, call) : SHMB_OK;
            if (status != SHMB_OK) return status;
            uint64_t word = atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
            bool committed = SHMB_STATE(word) == SHMB_COMMITTED;
            arena->used = before;
            arena->starts[i] = (int64_t)before;
            arena->sizes[i] = 0;
            tickets[i] = -1;
            if (committed) SHMB_OPTIMISTIC(locate_record(ring, slot, arena, i));
            bool found = false;
            if (committed) SHMB_OPTIMISTIC(found = is_expected_record(record_in_ring(ring, arena, i), arena, i, SHMB_TICKET(word)));
            if (found && arena->used <= arena->space) SHMB_OPTIMISTIC(copy_record(ring, arena, i));
            atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
            bool valid = committed && shmb_still_holds(ring, slot, word);
            if (locked) shmb_unlock(ring);
            if (valid && !found) {
                shmb_refusal.bad_at = slot;
                return SHMB_DAMAGED;
            }
            if (valid) tickets[i] = (int64_t)SHMB_TICKET(word);
            if (valid || !committed) break;
            arena->used = before;
            arena->sizes[i] = 0;
        }
    }
    shmb_refusal.needed = arena->used;
    return arena->used > arena->space ? SHMB_NO_ROOM : SHMB_OK;
}
