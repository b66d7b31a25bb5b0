/* Changes of priorities: of items, of the largest one, and of alpha and eps for all items. */
#include <math.h>
#include <stdlib.h>

#include "core/pool.h"
#include "core/power.h"
#include "core/ring.h"

int shmb_check_indices(struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t bound) {
    for (uint64_t i = 0; i < count; i++)
        if ((uint64_t)index[i] >= bound) {
            shmb_refusal.bad_at = i;
            return SHMB_BAD_INDEX;
        }
    return SHMB_OK;
}

/* priorities in one locked section, about ten microseconds. Larger sections touch more pages than the TLB holds, and
 * would wait for them again while they hold the mutex. */
#define LOCKED_UPDATES 128

/* Loaded values are not used, so other threads may change them meanwhile. */
#define UNUSED_LOAD __attribute__((no_sanitize("thread")))

UNUSED_LOAD static inline void load(double number) { __asm__ volatile("" : : "r"(bits_of(number))); }

/* Brings the data of an update into the cache before the mutex is taken. Plain loads whose results are unused can
 * run in parallel by the dozen. Prefetches would be slower for pages that are not in the TLB. A compiler would
 * consider a function of nothing but prefetches as free of effects, and remove its calls. */
UNUSED_LOAD static void fetch_elements(const struct shmb_ring *ring, const int64_t *index, bool tickets, uint64_t count) {
    const struct shmb_tree *tree = &ring->tree;
    bool prioritized = atomic_load_explicit(&ring->runtime->prioritized, memory_order_relaxed) != 0;
    for (uint64_t i = 0; (tickets || !prioritized) && i < count; i++)
        __builtin_prefetch(&ring->words[shmb_slot_of(ring, (uint64_t)index[i])]);
    /* otherwise the tree may be a hole of its file */
    for (uint64_t i = 0, previous = UINT64_MAX; prioritized && i < count; i++) {
        uint64_t element = (uint64_t)index[i], node = element / SHMB_FANOUT;
        if (node == previous) continue;
        previous = node;
        load(ring->raw[element]);
        load(tree->mass[node * SHMB_FANOUT]);
        load(tree->mass[node * SHMB_FANOUT + SHMB_FANOUT / 2]);
        load(tree->sum[1][node]);
        load(tree->sum[1][node ^ SHMB_FANOUT / 2]); /* the other half of its siblings */
        load(tree->min[1][node]);
    }
}

/* True if the element has an item, and it is the one that the caller means. An element with a mass is committed. So
 * without a ticket the word need not be read, which would be another cache miss. */
static inline bool is_current_item(const struct shmb_ring *ring, uint64_t element, const double *mass, const int64_t *ticket) {
    if (ticket == NULL && mass && mass[element] > 0) return true;
    uint64_t word = atomic_load_explicit(&ring->words[shmb_slot_of(ring, element)], memory_order_relaxed);
    return SHMB_STATE(word) == SHMB_COMMITTED && (ticket == NULL || SHMB_TICKET(word) == (uint64_t)*ticket);
}

/* The mutex is held. Returns the number of applied priorities. */
static uint64_t apply_priorities(struct shmb_ring *ring, const int64_t *index, const int64_t *tickets, const double *priorities,
                      const double *masses, uint64_t count, uint64_t *touched) {
    struct shmb_runtime *runtime = ring->runtime;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    double *raw = ring->raw;
    double *mass = prioritized ? ring->tree.mass : NULL;
    uint64_t changed = 0;
    double greatest = runtime->max_priority;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t element = (uint64_t)index[i];
        if (!is_current_item(ring, element, mass, tickets ? &tickets[i] : NULL)) continue;
        if (priorities[i] > greatest) { /* first: after a death no item may have a larger priority */
            runtime->max_priority = greatest = priorities[i];
            CP(update_max_priority);
        }
        raw[element] = priorities[i];
        CP(update_raw);
        if (mass) mass[element] = masses[i];
        CP(update_leaf);
        touched[changed++] = element;
    }
    if (changed && prioritized) shmb_tree_update(&ring->tree, touched, changed);
    CP(update_parents);
    return changed;
}

#define SORTED_FROM 1024 /* priorities; in smaller updates few elements are close to each other */

struct changes {
    const int64_t *index, *tickets; /* may be NULL */
    const double *priorities;
    uint32_t *order; /* original position of each; NULL: not sorted */
};

/* Sorts by element; the sort is stable. Elements that share nodes of the tree are then updated together, which
 * halves the work for a thirtieth of all elements. False: there is no memory, and nothing has changed. */
static bool sort_by_element(struct changes *input, uint64_t count, uint64_t elements) {
    unsigned shift = 0;
    uint32_t from[2][256] = {0}, sum[2] = {0};
    while (elements >> shift > 65536) shift++;
    int64_t *index = malloc(count * (sizeof(int64_t) * 3 + sizeof(uint32_t) * 2));
    if (index == NULL || count > UINT32_MAX) return free(index), false;
    int64_t *tickets = index + count;
    double *priorities = (double *)(tickets + count);
    uint32_t *half = (uint32_t *)(priorities + count), *order = half + count;
    for (uint64_t i = 0; i < count; i++) {
        from[0][input->index[i] >> shift & 255]++;
        from[1][input->index[i] >> shift >> 8]++;
    }
    for (unsigned digit = 0; digit < 256; digit++)
        for (unsigned pass = 0; pass < 2; pass++) {
            uint32_t n = from[pass][digit];
            from[pass][digit] = sum[pass];
            sum[pass] += n;
        }
    for (uint64_t i = 0; i < count; i++) half[from[0][input->index[i] >> shift & 255]++] = (uint32_t)i;
    for (uint64_t i = 0; i < count; i++) order[from[1][input->index[half[i]] >> shift >> 8]++] = half[i];
    for (uint64_t i = 0; i < count; i++) {
        index[i] = input->index[order[i]];
        priorities[i] = input->priorities[order[i]];
        if (input->tickets) tickets[i] = input->tickets[order[i]];
    }
    *input = (struct changes){index, input->tickets ? tickets : NULL, priorities, order};
    return true;
}

struct powers_of {
    const struct shmb_runtime *runtime;
    const double *priorities;
    double *masses;
};

static void compute_powers(void *context, uint64_t first, uint64_t end) {
    const struct powers_of *input = context;
    shmb_masses(input->runtime, input->priorities + first, input->masses + first, end - first);
}

/* Updates in pieces, so that no other process waits for the mutex longer than one piece takes. If alpha changes
 * between two pieces so that the remaining masses would not be finite, these priorities are skipped like stale ones. */
static int apply_in_pieces(struct shmb_ring *ring, struct shmb_call *call, const struct changes *input, uint64_t count, uint64_t *applied) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t touched[LOCKED_UPDATES], checked = atomic_load(&runtime->alpha_version), first_version = checked;
    double piece_masses[LOCKED_UPDATES], *all = NULL;
    bool tickets = input->tickets != NULL;
    int status = shmb_check_priorities(ring, input->priorities, count);
    if (status == SHMB_OK && count * SHMB_POWER_BYTES >= SHMB_SHARED_BYTES && (all = malloc(count * sizeof *all)) != NULL) {
        struct powers_of powers = {runtime, input->priorities, all};
        shmb_divide_among_threads(compute_powers, &powers, count, SHMB_POWER_BYTES);
        fetch_elements(ring, input->index, tickets, LOCKED_UPDATES);
    }
    for (uint64_t from = 0; status == SHMB_OK && from < count; from += LOCKED_UPDATES) {
        uint64_t n = count - from < LOCKED_UPDATES ? count - from : LOCKED_UPDATES, then = from + n;
        uint64_t version = all ? first_version : atomic_load(&runtime->alpha_version);
        const double *priorities = input->priorities + from;
        double *masses = all ? all + from : piece_masses;
        if (all == NULL) {
            fetch_elements(ring, input->index + from, tickets, n);
            compute_powers(&(struct powers_of){runtime, priorities, piece_masses}, 0, n);
        } else if (then < count) {
            uint64_t more = count - then < LOCKED_UPDATES ? count - then : LOCKED_UPDATES;
            fetch_elements(ring, input->index + then, tickets, more);
        }
        status = shmb_lock(ring, call);
        if (status != SHMB_OK) break;
        CP(update_locked);
        uint64_t now = atomic_load_explicit(&runtime->alpha_version, memory_order_relaxed);
        if (now != checked) {
            status = shmb_check_priorities(ring, priorities, count - from);
            checked = now;
        }
        if (now != version) shmb_masses(runtime, priorities, masses, n);
        if (status == SHMB_OK)
            *applied += apply_priorities(ring, input->index + from, input->tickets ? input->tickets + from : NULL, priorities, masses, n, touched);
        shmb_unlock(ring);
        CP(update_unlocked);
        if (status == SHMB_BAD_PRIORITY && from > 0) {
            status = SHMB_OK;
            break;
        }
    }
    free(all);
    if (status == SHMB_BAD_PRIORITY && input->order) shmb_refusal.bad_at = input->order[shmb_refusal.bad_at];
    return status;
}

int shmb_update(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, const int64_t *tickets,
                const double *priorities, uint64_t count, uint64_t *applied) {
    struct changes input = {index, tickets, priorities, NULL};
    *applied = 0;
    int status = shmb_check_indices(ring, index, count, ring->elements);
    if (status != SHMB_OK) return status;
    bool sorted = count >= SORTED_FROM && sort_by_element(&input, count, ring->elements);
    status = apply_in_pieces(ring, call, &input, count, applied);
    if (sorted) free((void *)input.index);
    return status;
}

#define ORDINARY_PRIORITY 1e3 /* the same as in memory/mapped/settings.py */

/* True if all masses stay finite with another alpha and eps: those of the present priorities, of the default and of
 * ordinary priorities. The mass grows with the priority. A writer may be storing priorities meanwhile, and checks
 * them again at its commit. */
static bool masses_stay_finite(const struct shmb_ring *ring, double alpha, double eps) {
    if (!(alpha >= 0 && alpha < INFINITY && eps >= 0 && eps < INFINITY)) return false;
    double greatest = fmax(ORDINARY_PRIORITY, shmb_default_priority(ring->runtime));
    for (uint64_t e = 0, end = shmb_written_slots(ring) * ring->lanes; e < end; e++) {
        double raw;
        __atomic_load(&ring->raw[e], &raw, __ATOMIC_RELAXED);
        if (raw > greatest && raw < INFINITY) greatest = raw;
    }
    double mass;
    shmb_powers(&greatest, eps, alpha, &mass, 1);
    return mass <= shmb_largest_mass(ring);
}

/* Changes alpha and eps, or enables priorities if `bind` is true. NaN keeps the present value. The new values are
 * stored first. After a death in this function, the repair recomputes every leaf from the raw priorities with them. */
int shmb_set_alpha(struct shmb_ring *ring, struct shmb_call *call, double alpha, double eps, bool bind) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (isnan(alpha)) alpha = runtime->alpha; /* under the mutex, because another process may have changed it */
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
    if (eps < runtime->eps) { /* a repair between the two stores finds masses that are no larger than before or after */
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
    shmb_ring_parents(ring);
    CP(alpha_parents);
    shmb_store_touch_time(runtime);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* The same as shmb_last_draw_totals after a prioritized draw. */
int shmb_read_totals(struct shmb_ring *ring, struct shmb_call *call, struct shmb_totals *out) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    *out = shmb_compute_totals(ring, true);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Raises the largest priority to at least this value. SHMB_BAD_PRIORITY: no item could have it. */
int shmb_raise_max_priority(struct shmb_ring *ring, struct shmb_call *call, double value) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    status = shmb_check_priorities(ring, &value, 1); /* under the mutex, so that alpha does not change */
    if (status == SHMB_OK && value > ring->runtime->max_priority) {
        ring->runtime->max_priority = value;
        CP(raise_max_priority);
    }
    shmb_unlock(ring);
    return status;
}
