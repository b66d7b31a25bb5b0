/* Computes masses, the leaves of the tree, from priorities: (raw + eps) ** alpha. No function in this file takes the
 * mutex. */
#include <math.h>

#include "core/power.h"
#include "core/ring.h"

/* Schaul et al. 2016, algorithm 1: the largest priority so far; the first item has 1. */
double shmb_default_priority(const struct shmb_runtime *runtime) {
    return runtime->max_priority > 1.0 ? runtime->max_priority : 1.0;
}

void shmb_masses(const struct shmb_runtime *runtime, const double *raw, double *masses, uint64_t count) {
    shmb_powers(raw, runtime->eps, runtime->alpha, masses, count);
}

double shmb_mass(const struct shmb_runtime *runtime, double raw) {
    double mass;
    shmb_masses(runtime, &raw, &mass, 1);
    return mass;
}

/* A buffer full of items with the largest mass has a finite sum. */
double shmb_largest_mass(const struct shmb_ring *ring) { return 1e300 / (double)ring->elements; }

/* False: all items have equal weight. */
bool shmb_draws_by_mass(const struct shmb_ring *ring, bool prioritized) {
    /* otherwise the masses are outdated */
    bool maintained = atomic_load_explicit(&ring->runtime->prioritized, memory_order_relaxed) != 0;
    return prioritized && maintained && shmb_tree_total(&ring->tree) > 0;
}

/* `prioritized`: whether the draw asks for priorities. */
struct shmb_totals shmb_compute_totals(const struct shmb_ring *ring, bool prioritized) {
    const struct shmb_runtime *runtime = ring->runtime;
    bool by_mass = shmb_draws_by_mass(ring, prioritized);
    return (struct shmb_totals){by_mass ? shmb_tree_total(&ring->tree) : 0, by_mass ? shmb_tree_min(&ring->tree) : 0,
                                atomic_load_explicit(&runtime->max_priority, memory_order_relaxed),
                                atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes};
}

/* Returns the bits of the largest number. Numbers from 0 on are ordered as their bits, and all others (also -0) have
 * larger bits. So one comparison tells whether all numbers are within a limit. */
uint64_t shmb_greatest_bits(const double *numbers, uint64_t count) {
    uint64_t greatest = 0;
#pragma GCC unroll 4
    for (uint64_t i = 0; i < count; i++) greatest = bits_of(numbers[i]) > greatest ? bits_of(numbers[i]) : greatest;
    return greatest;
}

/* Every priority must be a nonnegative number, and a buffer full of it must have a finite sum. The mass grows with
 * the priority, so the power of the greatest one suffices. */
int shmb_check_priorities(struct shmb_ring *ring, const double *priorities, uint64_t count) {
    double limit = shmb_largest_mass(ring), greatest = 0;
    uint64_t at = 0, bits = shmb_greatest_bits(priorities, count);
    if (__builtin_expect(bits <= bits_of(limit) && shmb_mass(ring->runtime, from_bits(bits)) <= limit, 1)) return SHMB_OK;
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

void shmb_ring_leaves(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    shmb_tree_clear_padding(&ring->tree);
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    uint64_t length = 0;
    double last_raw = -1, last_mass = 0;
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
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

void shmb_ring_parents(struct shmb_ring *ring) { shmb_tree_range(&ring->tree, 0, shmb_written_slots(ring) * ring->lanes); }
