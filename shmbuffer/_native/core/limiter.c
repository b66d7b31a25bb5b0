/* Flow control: neither side may run too far ahead of the other, and a queue's items are not overwritten before they
 * are handed out.
 *
 *     inserted = write_count + pending - inserts_base     elements since the ratio counts, including open claims
 *     drawn    = drawn - samples_base
 *     ahead    = inserted * samples_per_insert - drawn    0 if both sides have done their share
 *
 * A claim may begin if `ahead`, including the claim, is at most the error buffer, or if fewer than min_size elements
 * are present. A draw may begin if `ahead` is at least minus the error buffer. So the ratio stays within the buffer
 * in any order of calls. (In Reverb's RateLimiter, max_diff and min_diff are samples_per_insert * min_size plus and
 * minus the buffer. Here the first min_size inserts are not counted instead.)
 *
 * A quota limits how much is written to one of several rings: a number of elements counted from inserts_base. The
 * process that coordinates the rings increases it as the others advance. It does not affect draws.
 *
 * `inserted` is derived and not counted, so the claim of a dead writer disappears from it. This file has the setting
 * in force and its numbers, for callers that hold the mutex. The waiting is in flow.c, and the order of a queue is
 * in queue.c. */
#include <math.h>

#include "core/ring.h"

static bool is_valid_limiter(const struct shmb_limiter *limiter) {
    double ratio = limiter->samples_per_insert, buffer = limiter->error_buffer;
    bool known = !(limiter->limits & ~(uint32_t)(SHMB_RATIO | SHMB_QUEUE | SHMB_AGES)) || limiter->limits == SHMB_QUOTA;
    return known && limiter->when_no_peer <= SHMB_ALONE_QUEUE && ratio >= 0 &&
           isfinite(ratio) && buffer >= 0 && isfinite(buffer) &&
           (!(limiter->limits & SHMB_RATIO) || (ratio > 0 && buffer >= 1 && buffer >= ratio)) &&
           (!(limiter->limits & SHMB_QUEUE) || (limiter->max_times_sampled > 0 && limiter->when_no_peer != SHMB_ALONE_PASS));
}

/* The limiter in force; NULL: there is none, or it is damaged. */
struct shmb_limiter *shmb_get_limiter(struct shmb_runtime *runtime) {
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
    struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    return version && is_valid_limiter(limiter) ? limiter : NULL;
}

/* The ages that belong to the limiter in force. */
static inline struct shmb_ages *current_ages(struct shmb_runtime *runtime) {
    return &runtime->ages[atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed) & 1];
}

/* The ages in force; NULL: ages are not limited. */
const struct shmb_ages *shmb_get_ages(const struct shmb_runtime *runtime) {
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
    const struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    return version && is_valid_limiter(limiter) && limiter->limits & SHMB_AGES ? &runtime->ages[version & 1] : NULL;
}

static inline uint64_t read_version(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->runtime->consumer_version, memory_order_relaxed);
}

/* True if an item of that version may no longer be committed. At its place it is used for the version made from the
 * items before it, or for the present version, whichever is later. */
bool shmb_is_too_old(const struct shmb_ring *ring, uint64_t version, uint64_t place) {
    const struct shmb_ages *ages = shmb_get_ages(ring->runtime);
    if (ages == NULL) return false;
    uint64_t then = read_version(ring);
    int64_t before = (int64_t)(place - ages->inserts_base);
    if (ages->items_per_version && before > 0) {
        uint64_t counted = ages->version_base + (uint64_t)before / ages->items_per_version;
        then = counted > then ? counted : then;
    }
    return then > version && then - version > ages->max_staleness;
}

/* True if the place of an item determines the version at which a learner uses it. */
bool shmb_is_counting_versions(const struct shmb_ring *ring) {
    const struct shmb_ages *ages = shmb_get_ages(ring->runtime);
    return ages && ages->items_per_version;
}

/* Call this before the first write. Versions that learners published before were made from no items and do not
 * count. */
void shmb_begin_version_count(struct shmb_runtime *runtime) {
    struct shmb_ages *ages = current_ages(runtime);
    ages->version_base = atomic_load_explicit(&runtime->consumer_version, memory_order_relaxed);
    CP(flow_base);
}

/* The element at that place is the next one that a learner uses, at the present version. `only_later`: other
 * learners may be at earlier places, so the base may only move to a later version. It is one store, so a death
 * leaves the old or the new base. */
void shmb_move_version_base(struct shmb_ring *ring, uint64_t place, bool only_later) {
    struct shmb_runtime *runtime = ring->runtime;
    if (!shmb_is_counting_versions(ring)) return;
    struct shmb_ages *ages = current_ages(runtime);
    int64_t versions = (int64_t)(read_version(ring) - ages->version_base), before;
    if (versions < 0 || __builtin_mul_overflow(versions, (int64_t)ages->items_per_version, &before)) return;
    int64_t base = (int64_t)place - before, was = (int64_t)ages->inserts_base;
    if (only_later ? base < was : base != was) ages->inserts_base = (uint64_t)base;
    CP(flow_base);
}

/* Copies limiter and ages without the mutex; all zeros if there are no limits. */
struct shmb_setting shmb_copy_setting(const struct shmb_runtime *runtime) {
    struct shmb_setting copy = {{0}, {0}};
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, SYNC_LIMITER_SET_ACQUIRE), before = 0;
    while (version != before) {
        before = version;
        SHMB_OPTIMISTIC(copy.limiter = runtime->limiters[version & 1]);
        SHMB_OPTIMISTIC(copy.ages = runtime->ages[version & 1]);
        atomic_thread_fence(SYNC_LIMITER_REUSE_ACQUIRE);
        version = atomic_load_explicit(&runtime->limiter_version, SYNC_LIMITER_SET_ACQUIRE);
    }
    return version && is_valid_limiter(&copy.limiter) ? copy : (struct shmb_setting){{0}, {0}};
}

uint32_t shmb_read_limits(struct shmb_runtime *runtime) {
    struct shmb_limiter limiter = shmb_copy_setting(runtime).limiter;
    return limiter.limits | (limiter.min_size ? SHMB_MIN_SIZE : 0);
}

static inline void change_pending(struct shmb_runtime *runtime, uint64_t elements) {
    uint64_t pending = atomic_load_explicit(&runtime->pending, memory_order_relaxed);
    atomic_store_explicit(&runtime->pending, pending + elements, memory_order_relaxed);
}

/* Counts the elements of a new claim, even without limits, because the claim may still be open when limits are set. */
void shmb_begin_pending(struct shmb_ring *ring, uint64_t elements) {
    atomic_store_explicit(&ring->me->pending, elements, memory_order_relaxed);
    CP(flow_pending);
    change_pending(ring->runtime, elements);
    CP(flow_promised);
}

/* Ends the count of a claim: its elements are in write_count, or were aborted. A repair counts again. */
void shmb_end_pending(struct shmb_ring *ring, struct shmb_entry *entry) {
    uint64_t elements = atomic_load_explicit(&entry->pending, memory_order_relaxed);
    if (elements == 0) return;
    change_pending(ring->runtime, -elements);
    CP(flow_settled);
    atomic_store_explicit(&entry->pending, 0, memory_order_relaxed);
    CP(flow_pending);
}

void shmb_clear_waiting(struct shmb_ring *ring, struct shmb_entry *entry, uint32_t sides) {
    uint32_t before = atomic_load_explicit(&entry->waits_for, memory_order_relaxed);
    if (!(before & sides)) return;
    atomic_store_explicit(&entry->waits_for, before & ~sides, memory_order_release);
    CP(flow_waits);
    uint32_t limited = atomic_load_explicit(&ring->runtime->limited, memory_order_relaxed);
    if ((before & ~sides) == 0 && limited) /* a client that waited before the ring existed was not counted */
        atomic_store_explicit(&ring->runtime->limited, limited - 1, memory_order_relaxed);
    CP(flow_limited);
}

/* Recounts after the death of an owner of the mutex. A claim that a repair has ended is not open any more. Otherwise
 * the process that reaps its owner would subtract it again. */
void shmb_recount_pending(struct shmb_ring *ring) {
    uint64_t pending = 0;
    uint32_t limited = 0;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        struct shmb_entry *entry = &ring->entries[i];
        limited += atomic_load_explicit(&entry->waits_for, memory_order_relaxed) != 0;
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) == SHMB_PAYLOAD)
            pending += atomic_load_explicit(&entry->pending, memory_order_relaxed);
        else
            atomic_store_explicit(&entry->pending, 0, memory_order_relaxed);
        CP(flow_pending);
    }
    atomic_store_explicit(&ring->runtime->pending, pending, memory_order_relaxed);
    CP(flow_promised);
    atomic_store_explicit(&ring->runtime->limited, limited, memory_order_relaxed);
    CP(flow_limited);
}

/* For a commit: elements that pass the limiter must leave `ahead` unchanged, so inserts_base moves with write_count.
 * The two are stored one after the other, so the goal is noted first. A repair after a death stores it from there. */
void shmb_prepare_base(struct shmb_ring *ring) {
    const struct shmb_limiter *limiter = shmb_get_limiter(ring->runtime);
    if (limiter) ring->runtime->inserts_goal = limiter->inserts_base + (ring->claim_passes ? ring->claim_written : 0);
    CP(flow_goal);
}

void shmb_set_base(struct shmb_ring *ring) {
    struct shmb_limiter *limiter = shmb_get_limiter(ring->runtime);
    if (limiter) limiter->inserts_base = ring->runtime->inserts_goal;
    CP(flow_base);
}

/* The ratio counts from here on: both sides are even once there are min_size elements. The mutex is held. */
void shmb_restart_limiter(struct shmb_ring *ring, uint64_t write_count, uint64_t elements) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_limiter *limiter = shmb_get_limiter(runtime);
    if (limiter == NULL) return;
    if (limiter->limits & SHMB_QUOTA) {
        limiter->error_buffer = 0; /* first, because a quota that ends too early does no harm */
        CP(flow_base);
    }
    limiter->inserts_base = write_count + (limiter->min_size > elements ? limiter->min_size - elements : 0);
    CP(flow_base);
    limiter->samples_base = atomic_load_explicit(&runtime->drawn, memory_order_relaxed);
    CP(flow_base);
    struct shmb_ages *ages = current_ages(runtime);
    ages->inserts_base = write_count;
    CP(flow_base);
    ages->version_base = atomic_load_explicit(&runtime->consumer_version, memory_order_relaxed);
    CP(flow_base);
}

/* No version is made from a dropped element, so the gate must not count it. Otherwise writers would wait forever for
 * a version made of dropped elements. The mutex is held. */
void shmb_uncount_insert(struct shmb_runtime *runtime) {
    if (shmb_get_ages(runtime) == NULL) return;
    struct shmb_ages *ages = current_ages(runtime);
    uint64_t written = atomic_load_explicit(&runtime->write_count, memory_order_relaxed);
    /* the base may be below 0: see shmb_move_version_base */
    if ((int64_t)ages->inserts_base < (int64_t)written) ages->inserts_base++;
    CP(flow_base);
}
