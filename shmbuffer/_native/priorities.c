/* The priority tree: wide, recomputed from children, never adjusted by differences.
 *
 * Level 0 holds the mass of each element, (raw + eps) ** alpha, or 0 if its slot is not COMMITTED. A node of
 * level k >= 1 holds the sum of 16 children and the smallest positive value below it (0: there is none).
 * The order of summation is fixed, four quarters of four, so that every build gives the same bits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ring.h"

void shmb_tree_map(struct shmb_tree *tree, const struct shmb_sections *sections, unsigned char *slots) {
    tree->depth = sections->depth;
    tree->mass = (double *)(slots + sections->mass);
    memcpy(tree->nodes, sections->nodes, sizeof tree->nodes);
    for (unsigned level = 1; level <= sections->depth; level++) {
        tree->sum[level] = (double *)(slots + sections->sum[level]);
        tree->min[level] = (double *)(slots + sections->min[level]);
    }
}

/* Schaul et al. 2016, algorithm 1: the largest so far, and the first item had 1. */
double shmb_default_priority(const struct shmb_runtime *runtime) {
    return runtime->max_priority > 1.0 ? runtime->max_priority : 1.0;
}

double shmb_mass(const struct shmb_runtime *runtime, double raw) { return pow(raw + runtime->eps, runtime->alpha); }

static inline double sum_of_children(const double *c) {
    double q0 = (c[0] + c[1]) + (c[2] + c[3]), q1 = (c[4] + c[5]) + (c[6] + c[7]);
    double q2 = (c[8] + c[9]) + (c[10] + c[11]), q3 = (c[12] + c[13]) + (c[14] + c[15]);
    return ((q0 + q1) + q2) + q3;
}

/* Chains side by side, so that they run at the same time; a minimum has no rounding. */
static double least_but_zero(const double *c) {
    double least[4] = {INFINITY, INFINITY, INFINITY, INFINITY};
    for (unsigned i = 0; i < SHMB_FANOUT; i += 4)
        for (unsigned lane = 0; lane < 4; lane++) {
            double value = c[i + lane] > 0 ? c[i + lane] : INFINITY;
            least[lane] = value < least[lane] ? value : least[lane];
        }
    double low = least[0] < least[1] ? least[0] : least[1], high = least[2] < least[3] ? least[2] : least[3];
    double all = low < high ? low : high;
    return all < INFINITY ? all : 0;
}

/* Where there is an item in every place, and that is most often, none has to be left out. */
static inline double least_positive(const double *c) {
    double least[4];
    for (unsigned lane = 0; lane < 4; lane++) {
        double low = c[lane] < c[lane + 4] ? c[lane] : c[lane + 4], high = c[lane + 8] < c[lane + 12] ? c[lane + 8] : c[lane + 12];
        least[lane] = low < high ? low : high;
    }
    double low = least[0] < least[1] ? least[0] : least[1], high = least[2] < least[3] ? least[2] : least[3];
    double all = low < high ? low : high;
    return __builtin_expect(all > 0, 1) ? all : least_but_zero(c);
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
    double low = least_positive(minima_below(tree, level, node));
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

void shmb_tree_parents(struct shmb_tree *tree) { shmb_tree_range(tree, 0, tree->nodes[0]); }

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
static void clear_padding(struct shmb_tree *tree) {
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

void shmb_ring_leaves(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    clear_padding(&ring->tree);
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    uint64_t length = 0;
    double last_raw = -1, last_mass = 0;
    for (uint64_t slot = 0; slot < ring->capacity; slot++) {
        bool committed = SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed)) == SHMB_COMMITTED;
        length += committed;
        if (!prioritized) continue;
        for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; e < end; e++) {
            if (!committed) {
                ring->tree.mass[e] = 0;
                CP(leaves_mass);
                continue;
            }
            double raw = ring->raw[e];
            if (!(raw >= 0 && raw < INFINITY)) {
                ring->raw[e] = raw = shmb_default_priority(runtime);
                CP(leaves_raw);
            }
            if (raw != last_raw) last_mass = shmb_mass(runtime, last_raw = raw);
            ring->tree.mass[e] = last_mass;
            CP(leaves_mass);
        }
    }
    atomic_store_explicit(&runtime->length, length, memory_order_relaxed);
    CP(leaves_length);
}

/* The sum of a buffer full of the largest mass is finite. */
double shmb_largest_mass(const struct shmb_ring *ring) { return 1e300 / (double)ring->elements; }

/* Every priority is a number, not negative, and the sum of a buffer full of it is finite. A mass grows with its
 * priority, so the power of the greatest one is enough. */
int shmb_priorities_in_order(struct shmb_ring *ring, const double *priorities, uint64_t count) {
    double limit = shmb_largest_mass(ring), greatest = 0;
    uint64_t at = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (!(priorities[i] >= 0 && priorities[i] <= limit)) {
            shmb_refusal.bad_at = i;
            return SHMB_BAD_PRIORITY;
        }
        if (priorities[i] > greatest) greatest = priorities[i], at = i;
    }
    shmb_refusal.bad_at = at;
    return shmb_mass(ring->runtime, greatest) <= limit ? SHMB_OK : SHMB_BAD_PRIORITY;
}

int shmb_indices_in_order(struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t bound) {
    for (uint64_t i = 0; i < count; i++)
        if ((uint64_t)index[i] >= bound) {
            shmb_refusal.bad_at = i;
            return SHMB_BAD_INDEX;
        }
    return SHMB_OK;
}

#define LOCKED_UPDATES 128 /* priorities in one locked section: about ten microseconds. What more of them touch is on more
                            * pages than the processor remembers, so that it would wait for them once more, with the mutex */

/* What an update reads and writes, on its way into the cache before the mutex is asked for. */
static void fetch_elements(const struct shmb_ring *ring, const int64_t *index, uint64_t count) {
    const struct shmb_tree *tree = &ring->tree;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t element = (uint64_t)index[i], node = element / SHMB_FANOUT;
        __builtin_prefetch(&ring->words[shmb_slot_of(ring, element)]);
        __builtin_prefetch(&ring->raw[element], 1);
        __builtin_prefetch(&tree->mass[node * SHMB_FANOUT], 1);
        __builtin_prefetch(&tree->mass[node * SHMB_FANOUT + SHMB_FANOUT / 2], 1);
        __builtin_prefetch(&tree->sum[1][node], 1);
        __builtin_prefetch(&tree->sum[1][node ^ SHMB_FANOUT / 2]); /* the other half of its siblings */
        __builtin_prefetch(&tree->min[1][node], 1);
    }
}

/* The mutex is held. Returns how many were applied. */
static uint64_t apply(struct shmb_ring *ring, const int64_t *index, const int64_t *tickets, const double *priorities,
                      const double *masses, uint64_t count, uint64_t *touched) {
    struct shmb_runtime *runtime = ring->runtime;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    uint64_t changed = 0;
    double greatest = -1;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t element = (uint64_t)index[i];
        uint64_t word = atomic_load_explicit(&ring->words[shmb_slot_of(ring, element)], memory_order_relaxed);
        if (SHMB_STATE(word) != SHMB_COMMITTED || (tickets && SHMB_TICKET(word) != (uint64_t)tickets[i])) continue;
        ring->raw[element] = priorities[i];
        CP(update_raw);
        if (prioritized) ring->tree.mass[element] = masses[i];
        CP(update_leaf);
        greatest = priorities[i] > greatest ? priorities[i] : greatest;
        touched[changed++] = element;
    }
    if (changed) {
        if (greatest > runtime->max_priority) runtime->max_priority = greatest;
        CP(update_max_priority);
        if (prioritized) shmb_tree_touched(&ring->tree, touched, changed);
    }
    CP(update_parents);
    return changed;
}

/* In pieces, so that nobody waits for the mutex longer than one of them takes. If alpha was changed between two of them,
 * so that what is left would not be finite, that has come too late: it is not applied, like what is stale. */
int shmb_update(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, const int64_t *tickets,
                const double *priorities, uint64_t count, uint64_t *applied) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t touched[LOCKED_UPDATES], checked = atomic_load(&runtime->alpha_version);
    double masses[LOCKED_UPDATES];
    *applied = 0;
    int status = shmb_indices_in_order(ring, index, count, ring->elements);
    if (status == SHMB_OK) status = shmb_priorities_in_order(ring, priorities, count);
    for (uint64_t from = 0; status == SHMB_OK && from < count; from += LOCKED_UPDATES) {
        uint64_t n = count - from < LOCKED_UPDATES ? count - from : LOCKED_UPDATES;
        uint64_t version = atomic_load(&runtime->alpha_version);
        fetch_elements(ring, index + from, n);
        for (uint64_t i = 0; i < n; i++) masses[i] = shmb_mass(runtime, priorities[from + i]);
        status = shmb_lock(ring, call);
        if (status != SHMB_OK) break;
        CP(update_locked);
        uint64_t now = atomic_load_explicit(&runtime->alpha_version, memory_order_relaxed);
        if (now != checked) {
            status = shmb_priorities_in_order(ring, priorities + from, count - from);
            checked = now;
        }
        for (uint64_t i = 0; now != version && i < n; i++) masses[i] = shmb_mass(runtime, priorities[from + i]);
        if (status == SHMB_OK)
            *applied += apply(ring, index + from, tickets ? tickets + from : NULL, priorities + from, masses, n, touched);
        shmb_unlock(ring);
        CP(update_unlocked);
        if (status == SHMB_BAD_PRIORITY && from > 0) return SHMB_OK;
    }
    return status;
}

#define ORDINARY_PRIORITY 1e3 /* as in memory/settings.py */

/* Whether every mass stays finite with another alpha and eps: those of the priorities that are there, of the default
 * and of ordinary ones. A mass grows with its priority. Somebody may be filling in priorities meanwhile: his commit looks again. */
static bool masses_stay_finite(const struct shmb_ring *ring, double alpha, double eps) {
    if (!(alpha >= 0 && alpha < INFINITY && eps >= 0 && eps < INFINITY)) return false;
    double greatest = fmax(ORDINARY_PRIORITY, shmb_default_priority(ring->runtime));
    for (uint64_t e = 0; e < ring->elements; e++) {
        double raw;
        __atomic_load(&ring->raw[e], &raw, __ATOMIC_RELAXED);
        if (raw > greatest && raw < INFINITY) greatest = raw;
    }
    return pow(greatest + eps, alpha) <= shmb_largest_mass(ring);
}

/* Changes alpha (or switches the tree on, with bind); NaN: it stays what it is. The new value is stored first: whoever repairs after a
 * death in here recomputes every leaf from the raw priorities with it. */
int shmb_set_alpha(struct shmb_ring *ring, struct shmb_call *call, double alpha, double eps, bool bind) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (isnan(alpha)) alpha = runtime->alpha; /* now, with the mutex: another process may have changed it */
    if (isnan(eps)) eps = runtime->eps;
    bool on = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    if (on && runtime->alpha == alpha && runtime->eps == eps) {
        shmb_unlock(ring);
        return SHMB_OK;
    }
    if (on && bind) {
        shmb_unlock(ring);
        return SHMB_OTHER_SETTINGS;
    }
    if (!masses_stay_finite(ring, alpha, eps)) {
        shmb_unlock(ring);
        return SHMB_BAD_ALPHA;
    }
    if (eps < runtime->eps) { /* whoever repairs between the two finds masses no larger than before or after */
        runtime->eps = eps;
        CP(alpha_eps);
    }
    runtime->alpha = alpha;
    CP(alpha_alpha);
    runtime->eps = eps;
    CP(alpha_eps);
    atomic_fetch_add(&runtime->alpha_version, 1);
    CP(alpha_version);
    atomic_store_explicit(&runtime->prioritized, 1, memory_order_release);
    CP(alpha_stored);
    shmb_ring_leaves(ring);
    CP(alpha_leaves);
    shmb_tree_parents(&ring->tree);
    CP(alpha_parents);
    shmb_touch(runtime);
    shmb_unlock(ring);
    return SHMB_OK;
}

static bool is_covered(const struct shmb_ring *ring, uint64_t ticket) {
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) == SHMB_PAYLOAD &&
            ticket - atomic_load_explicit(&entry->first, memory_order_relaxed) <
                atomic_load_explicit(&entry->count, memory_order_relaxed))
            return true;
    }
    return false;
}

/* Changes nothing. Holds the mutex for the whole scan: some milliseconds for a million elements. */
int shmb_check(struct shmb_ring *ring, struct shmb_call *call, struct shmb_check *found) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_tree *tree = &ring->tree;
    memset(found, 0, sizeof *found);
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed), committed = 0;
    for (uint64_t slot = 0; slot < ring->capacity; slot++) {
        uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        bool item = SHMB_STATE(word) == SHMB_COMMITTED;
        committed += item;
        found->wrong_words += word != SHMB_WORD(0, SHMB_EMPTY) &&
                              (SHMB_TICKET(word) % ring->capacity != slot || SHMB_TICKET(word) >= head);
        found->wrong_extents += item && ring->bytes && !shmb_lies_in_use(ring, ring->extents[slot]);
        found->orphans += SHMB_STATE(word) == SHMB_WRITING && !is_covered(ring, SHMB_TICKET(word));
        for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; prioritized && e < end; e++)
            found->wrong_leaves += tree->mass[e] != (item ? shmb_mass(runtime, ring->raw[e]) : 0);
    }
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed);
    found->wrong_length = length > committed ? length - committed : committed - length;
    for (unsigned level = 1; prioritized && level <= tree->depth; level++)
        for (uint64_t node = 0; node < tree->nodes[level]; node++) {
            const double *sums = (level == 1 ? tree->mass : tree->sum[level - 1]) + node * SHMB_FANOUT;
            const double *least = (level == 1 ? tree->mass : tree->min[level - 1]) + node * SHMB_FANOUT;
            found->wrong_nodes += tree->sum[level][node] != sum_of_children(sums) ||
                                  tree->min[level][node] != least_positive(least);
        }
    shmb_unlock(ring);
    return SHMB_OK;
}
