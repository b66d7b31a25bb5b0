/* Flow control: may a claim or a draw begin, or has the other side to go on first? It is decided and stored under the
 * mutex. A setting is built in the block that does not count, and published by one store. */
#include <math.h>

#include "core/flow.h"

#define ROUNDING 1e-6 /* of a sample: products of a ratio such as 0.1 are not exact */

/* The next claim or draw of this thread goes on whatever the ratio; it counts on no side. */
_Thread_local enum shmb_bypass shmb_bypass;

static double ahead(const struct shmb_ring *ring, const struct shmb_limiter *limiter, uint64_t inserts, uint64_t samples) {
    uint64_t inserted = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) + inserts - limiter->inserts_base;
    uint64_t drawn = atomic_load_explicit(&ring->runtime->drawn, memory_order_relaxed) + samples - limiter->samples_base;
    return (double)(int64_t)inserted * limiter->samples_per_insert - (double)(int64_t)drawn;
}

/* Under the mutex, so that the process that changes what is waited for sees it afterwards. */
int shmb_wait_for(struct shmb_ring *ring, enum shmb_side side, uint64_t wanted, enum shmb_reason why) {
    struct shmb_entry *me = ring->me;
    uint32_t before = atomic_load_explicit(&me->waits_for, memory_order_relaxed);
    if (!(before & side)) {
        me->waits_since_ns = (uint64_t)shmb_now_ns();
        CP(flow_waits);
        atomic_store_explicit(&me->waits_for, before | side, memory_order_release);
        CP(flow_waits);
        if (before == 0) atomic_fetch_add_explicit(&ring->runtime->limited, 1, memory_order_relaxed);
        CP(flow_limited);
    }
    uint32_t shown = wanted < UINT32_MAX ? (uint32_t)wanted : UINT32_MAX;
    if (side == SHMB_FOR_SAMPLES)
        me->inserts_wanted = shown;
    else
        me->samples_wanted = shown;
    CP(flow_waits);
    me->waits_why = (uint32_t)why;
    CP(flow_waits);
    shmb_refusal.why = why;
    shmb_refusal.needed = wanted;
    shmb_refusal.blocker.progress = atomic_load(&ring->runtime->progress);
    return SHMB_LIMITED;
}

int shmb_give_up_waiting(struct shmb_ring *ring, struct shmb_call *call, uint32_t sides) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    shmb_wait_no_more(ring, ring->me, sides);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* The first place that must not be overwritten: it waits in the queue, or is being copied out of it. */
static uint64_t needed_from(const struct shmb_ring *ring, struct shmb_limiter *limiter) {
    uint64_t needed = shmb_queue_front(ring, limiter).element / ring->lanes;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        uint64_t reading = atomic_load_explicit(&ring->entries[i].reading, memory_order_relaxed);
        bool live = atomic_load_explicit(&ring->entries[i].state, memory_order_relaxed) == SHMB_LIVE;
        if (live && reading && reading - 1 < needed) needed = reading - 1;
    }
    return needed;
}

/* Samples wait until min_size elements are there, so inserts must not wait for samples before, though a batch may take
 * them too far ahead. One that is too large for the error buffer at any time waits, and is refused. */
static bool is_short(const struct shmb_ring *ring, const struct shmb_limiter *limiter, uint64_t open, uint64_t elements) {
    uint64_t there = atomic_load_explicit(&ring->runtime->length, memory_order_relaxed) * ring->lanes;
    return there + open < limiter->min_size &&
           (double)elements * limiter->samples_per_insert <= 2 * limiter->error_buffer + ROUNDING;
}

/* Has a queue no room for so many rows, or for so many bytes of records? */
static bool is_full(struct shmb_ring *ring, struct shmb_limiter *limiter, uint64_t rows, uint64_t bytes) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) + rows;
    uint64_t needed = needed_from(ring, limiter);
    if (rows > ring->capacity || end > needed + ring->capacity) return true;
    return ring->bytes && shmb_evicts_from(ring, needed, ring->runtime->queue_since, bytes);
}

/* Would there be more than what a learner makes the versions from that it may be behind? */
static bool is_early(struct shmb_ring *ring, uint64_t open, uint64_t elements) {
    if (!shmb_counts_versions(ring)) return false;
    const struct shmb_ages *ages = shmb_ages_of(ring->runtime);
    uint64_t written = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) - ages->inserts_base;
    if (written + open == 0) shmb_begin_versions(ring->runtime);
    int64_t inserted = (int64_t)(written + open + elements);
    int64_t versions = (int64_t)(atomic_load_explicit(&ring->runtime->consumer_version, memory_order_relaxed) - ages->version_base);
    double allowed = ((double)(versions > 0 ? versions : 0) + (double)ages->max_staleness + 1) * (double)ages->items_per_version;
    return (double)inserted > allowed;
}

/* A learner comes for the next of `left` elements. It is the only one, and has just begun: then nothing else is being learned
 * from, and what one before it took and made no version of is not waited for. */
void shmb_count_from_here(struct shmb_ring *ring, uint64_t left) {
    bool others = atomic_load_explicit(&ring->me->last_sample_ns, memory_order_relaxed) != 0;
    for (uint32_t i = 0; !others && i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        bool samples = atomic_load_explicit(&entry->last_sample_ns, memory_order_relaxed) != 0;
        others = samples && atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
    }
    shmb_note_turn(ring, atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) - left, others);
}

/* Would so many rows, or so many bytes of records, be written over what is to stay from that place on? */
static bool reaches(struct shmb_ring *ring, uint64_t floor, uint64_t since, uint64_t rows, uint64_t bytes) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) + rows;
    return end > floor + ring->capacity || (ring->bytes && shmb_evicts_from(ring, floor, since, bytes));
}

/* Does a consumer have items that a claim would write over, of so many rows, or so many bytes of records? */
static bool is_held_back(struct shmb_ring *ring, uint64_t rows, uint64_t bytes) {
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++) {
        struct shmb_book book;
        if (!shmb_consumer_at(ring, which, &book) || !book.consumer->holds) continue;
        uint64_t floor = atomic_load_explicit(&book.consumer->floor, memory_order_relaxed), since = book.consumer->since;
        if (!reaches(ring, floor, since, rows, bytes)) continue;
        if (reaches(ring, shmb_move_floor(ring, &book), since, rows, bytes)) return true;
    }
    return false;
}

/* Does anybody wait to write over what is in that place of a consumer? */
bool shmb_is_in_the_way(struct shmb_ring *ring, const struct shmb_book *book, uint64_t place) {
    uint64_t rows = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed), since = book->consumer->since;
    uint64_t bytes = atomic_load_explicit(&ring->runtime->reserved_bytes, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        bool live = atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
        if (!live || !(atomic_load_explicit(&entry->waits_for, memory_order_relaxed) & SHMB_FOR_SAMPLES)) continue;
        uint64_t its = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
        if (reaches(ring, place, since, rows + entry->inserts_wanted, bytes + its)) return true;
    }
    return false;
}

/* Is a consumer's oldest item to be given, and can the `missing` items of its batch not be written, or a writer not go on, before
 * that is done? Both sides would wait for ever. */
bool shmb_is_stuck(struct shmb_ring *ring, const struct shmb_book *book, uint64_t missing, uint64_t now_ns) {
    const struct shmb_runtime *runtime = ring->runtime;
    if (!book->consumer->holds || atomic_load_explicit(&runtime->pending, memory_order_relaxed)) return false;
    uint64_t floor = shmb_move_floor(ring, book);
    if (!shmb_is_to_give(ring, book, floor, now_ns)) return false;
    if (atomic_load_explicit(&runtime->head, memory_order_relaxed) + missing > floor + ring->capacity) return true;
    return shmb_is_in_the_way(ring, book, floor);
}

static bool holds_writers(const struct shmb_ring *ring) {
    struct shmb_book book;
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++)
        if (shmb_consumer_at(ring, which, &book) && book.consumer->holds) return true;
    return false;
}

static int wait_for_room(struct shmb_ring *ring, const struct shmb_request *request, enum shmb_reason why) {
    if (ring->bytes && atomic_load_explicit(&ring->me->phase, memory_order_relaxed) == SHMB_IDLE)
        atomic_store_explicit(&ring->me->byte_first, request->bytes, memory_order_relaxed);
    CP(flow_waits);
    return shmb_wait_for(ring, SHMB_FOR_SAMPLES, request->elements, why);
}

/* Whether this call goes on whatever the ratio. */
static bool goes_on(void) {
    bool pass = shmb_bypass != SHMB_COUNTS;
    if (shmb_bypass == SHMB_PASSES_ONCE) shmb_bypass = SHMB_COUNTS;
    return pass;
}

/* Before a claim that write_count grows by, or a reservation for one: may it begin? Named slots have no place in a queue.
 * A claim that is made from a reservation was admitted with it, and waits only where the queue became one since then. */
int shmb_admit_insert(struct shmb_ring *ring, const struct shmb_request *request, bool *passes) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_limiter *limiter = shmb_limiter_of(runtime);
    const struct shmb_reservation *held = request->held;
    bool pass = goes_on(), loads = shmb_bypass == SHMB_PASSES;
    *passes = held && held->flags & SHMB_PASSED;
    if (limiter == NULL && !shmb_is_consumed(ring)) return SHMB_OK;
    if (held == NULL) shmb_expire(ring); /* its own was found in time, and is not to end under it */
    uint64_t reserved = atomic_load_explicit(&runtime->reserved, memory_order_relaxed) - (held ? held->rows : 0);
    uint64_t bytes = atomic_load_explicit(&runtime->reserved_bytes, memory_order_relaxed) - (held ? held->bytes : 0);
    uint64_t open = atomic_load_explicit(&runtime->pending, memory_order_relaxed) + reserved * ring->lanes;
    uint64_t elements = request->elements;
    if (shmb_is_consumed(ring) && !loads) {
        if (request->rows == 0 && holds_writers(ring)) return SHMB_CONSUMED; /* named slots have no place in their order either */
        if (is_held_back(ring, request->rows + reserved, request->bytes + bytes)) return wait_for_room(ring, request, SHMB_HELD);
    }
    if (limiter == NULL) {
        shmb_wait_no_more(ring, ring->me, SHMB_FOR_SAMPLES);
        return SHMB_OK;
    }
    if (limiter->limits & SHMB_QUEUE) {
        if (request->rows == 0) return SHMB_IN_QUEUE;
        if (is_full(ring, limiter, request->rows + reserved, request->bytes + bytes)) return wait_for_room(ring, request, SHMB_FULL);
    }
    if (elements && held == NULL && !loads && is_early(ring, open, elements))
        return shmb_wait_for(ring, SHMB_FOR_SAMPLES, elements, SHMB_VERSION);
    if (elements && held == NULL && limiter->limits & SHMB_RATIO) {
        double over = ahead(ring, limiter, open + elements, 0) - limiter->error_buffer;
        if (over > ROUNDING && !pass && !is_short(ring, limiter, open, elements))
            return shmb_wait_for(ring, SHMB_FOR_SAMPLES, elements, SHMB_AHEAD);
        *passes = *passes || (pass && over > ROUNDING);
    }
    if (elements && held == NULL && limiter->limits & SHMB_QUOTA) {
        uint64_t written = atomic_load_explicit(&runtime->write_count, memory_order_relaxed) - limiter->inserts_base;
        bool fits = (double)(int64_t)(written + open + elements) <= limiter->error_buffer;
        if (!fits && !pass) return shmb_wait_for(ring, SHMB_FOR_SAMPLES, elements, SHMB_OVER_QUOTA);
        *passes = pass;
    }
    shmb_wait_no_more(ring, ring->me, SHMB_FOR_SAMPLES);
    return SHMB_OK;
}

/* Elements that are there, or were until somebody began to write over them. An open claim of a ring that was not full, or
 * that was emptied, writes over none. */
static uint64_t size_of(const struct shmb_ring *ring, const struct shmb_limiter *limiter) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t size = atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes;
    uint64_t open = atomic_load_explicit(&runtime->pending, memory_order_relaxed);
    if (limiter == NULL || open == 0) return size;
    uint64_t tickets = atomic_load_explicit(&runtime->head, memory_order_relaxed) * ring->lanes;
    int64_t inserted = (int64_t)(atomic_load_explicit(&runtime->write_count, memory_order_relaxed) - limiter->inserts_base);
    return inserted >= 0 && tickets >= ring->elements + open ? size + open : size;
}

/* What this thread's last draw was counted as, for the one that is not made. */
static _Thread_local struct {
    uint64_t elements;
    uint32_t version;
} counted_draw;

/* Before a draw: may it be made? It counts from here on, as `counted` elements; as none where it passes, or where there is
 * no ratio. SHMB_IN_QUEUE: `chosen` by a sampler it may not. */
int shmb_admit_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t min_size, bool chosen,
                      uint64_t *counted) {
    struct shmb_runtime *runtime = ring->runtime;
    bool pass = goes_on();
    *counted = 0;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_limiter_of(runtime);
    counted_draw.elements = 0;
    if (limiter && limiter->min_size > min_size) min_size = limiter->min_size;
    if (chosen && limiter && limiter->limits & SHMB_QUEUE) {
        status = SHMB_IN_QUEUE;
    } else if (size_of(ring, limiter) < min_size) {
        status = shmb_wait_for(ring, SHMB_FOR_INSERTS, min_size, SHMB_FEW);
    } else if (limiter && limiter->limits & SHMB_RATIO) {
        bool fits = ahead(ring, limiter, 0, count) >= -(limiter->error_buffer + ROUNDING);
        if (!fits && !pass) {
            status = shmb_wait_for(ring, SHMB_FOR_INSERTS, count, SHMB_BEHIND);
        } else {
            if (fits) atomic_fetch_add_explicit(&runtime->drawn, count, memory_order_relaxed);
            CP(flow_drawn);
            counted_draw.elements = *counted = fits ? count : 0;
            counted_draw.version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
        }
    }
    if (status == SHMB_OK) {
        shmb_wait_no_more(ring, ring->me, SHMB_FOR_INSERTS);
        atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
        CP(count_added);
    }
    shmb_unlock(ring);
    if (status == SHMB_OK) shmb_wake_waiters(runtime);
    return status;
}

/* A draw that was admitted was not made: this thread's last one, or, with a version of the limiter, one that counted then.
 * What did not count, or does not any more, is not taken back. */
int shmb_cancel(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint32_t version) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_limiter_of(runtime);
    if (version == 0 && counted_draw.elements == count) version = counted_draw.version;
    if (limiter && version == atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed) &&
        atomic_load_explicit(&runtime->drawn, memory_order_relaxed) - limiter->samples_base >= count)
        atomic_fetch_sub_explicit(&runtime->drawn, count, memory_order_relaxed);
    CP(flow_drawn);
    counted_draw.elements = 0;
    shmb_unlock(ring);
    shmb_wake_waiters(runtime);
    return SHMB_OK;
}

/* First in, first out. All or none. Their slots are not written over before shmb_release. */
int shmb_dequeue(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, int64_t *index, int64_t *tickets) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_limiter_of(runtime);
    if (limiter == NULL || !(limiter->limits & SHMB_QUEUE)) {
        shmb_unlock(ring);
        return SHMB_NOTHING;
    }
    struct shmb_place next = shmb_queue_front(ring, limiter);
    uint64_t first = 0;
    if (limiter->max_times_sampled == 1 && !shmb_is_consumed(ring) && shmb_counts_versions(ring))
        shmb_count_from_here(ring, shmb_left_in_queue(ring, limiter));
    if (shmb_queue_oldest(ring, limiter, &next, count, &first, index, tickets) < count) {
        tickets[0] = -1; /* nothing is taken */
        status = shmb_wait_for(ring, SHMB_FOR_INSERTS, count, SHMB_SHORT);
    } else {
        uint64_t reading = atomic_load_explicit(&ring->me->reading, memory_order_relaxed);
        ring->readers++;
        if (count && (ring->readers == 1 || reading == 0))
            atomic_store_explicit(&ring->me->reading, 1 + first, memory_order_relaxed);
        CP(flow_reading);
        limiter->queue_next = next.element * limiter->max_times_sampled + next.times;
        CP(flow_taken);
        shmb_wait_no_more(ring, ring->me, SHMB_FOR_INSERTS);
        atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
        CP(count_added);
    }
    shmb_unlock(ring);
    return status;
}

/* What this handle's threads took is copied: once for each shmb_dequeue. */
int shmb_release(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (ring->readers && --ring->readers == 0) atomic_store_explicit(&ring->me->reading, 0, memory_order_relaxed);
    CP(flow_reading);
    shmb_unlock(ring);
    shmb_wake_waiters(ring->runtime);
    return SHMB_OK;
}

/* What a queue has the client of an entry wait for, that says in the registry what it wants; 0: it could go on. */
int shmb_waits_in_queue(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_entry *entry, uint32_t side,
                        enum shmb_reason *why) {
    *why = SHMB_SLOT_IS_TAKEN;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_limiter_of(ring->runtime);
    uint64_t first, bytes = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
    bool in_order = !ring->bytes || (bytes <= ring->max_bytes && shmb_span_in_order(ring));
    if (limiter && limiter->limits & SHMB_QUEUE && in_order) {
        struct shmb_place next = shmb_queue_front(ring, limiter);
        uint64_t rows = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed) + entry->inserts_wanted / ring->lanes;
        bytes += atomic_load_explicit(&ring->runtime->reserved_bytes, memory_order_relaxed);
        if (side == SHMB_FOR_SAMPLES && is_full(ring, limiter, rows, bytes)) *why = SHMB_FULL;
        if (side == SHMB_FOR_INSERTS &&
            shmb_queue_oldest(ring, limiter, &next, entry->samples_wanted, &first, NULL, NULL) < entry->samples_wanted)
            *why = SHMB_SHORT;
    }
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Another setting. What a queue has handed out stays so, and a new one has every item that is there; the ratio counts from
 * here on, and a quota from where the one before did. */
int shmb_limit(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_limiter *wanted, const struct shmb_ages *wanted_ages) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed) + 1;
    const struct shmb_limiter *old = shmb_limiter_of(runtime);
    struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes;
    uint64_t times = wanted->max_times_sampled;
    struct shmb_place next = {head > ring->capacity ? (head - ring->capacity) * ring->lanes : 0, 0};
    if (old && old->limits & SHMB_QUEUE) next = shmb_queue_next(ring, old);
    if (next.times && next.times >= times) next = (struct shmb_place){next.element + 1, 0};
    if (version == 0) version = 2; /* 0 means no limiter */
    struct shmb_ages *ages = &runtime->ages[version & 1];
    atomic_thread_fence(SYNC_LIMITER_REUSE_RELEASE); /* the version names the other block before this one changes */
    limiter->samples_per_insert = wanted->samples_per_insert;
    CP(flow_stored);
    limiter->error_buffer = wanted->error_buffer;
    CP(flow_stored);
    limiter->min_size = wanted->min_size;
    CP(flow_stored);
    bool goes_on = old && old->limits & wanted->limits & SHMB_QUOTA;
    limiter->inserts_base = goes_on ? old->inserts_base
                                    : atomic_load_explicit(&runtime->write_count, memory_order_relaxed) +
                                          (wanted->min_size > length ? wanted->min_size - length : 0);
    CP(flow_stored);
    limiter->samples_base = atomic_load_explicit(&runtime->drawn, memory_order_relaxed);
    CP(flow_stored);
    limiter->max_times_sampled = times;
    CP(flow_stored);
    limiter->queue_next = next.element * times + next.times;
    CP(flow_stored);
    limiter->when_no_peer = wanted->when_no_peer;
    CP(flow_stored);
    limiter->limits = wanted->limits;
    CP(flow_stored);
    ages->max_staleness = wanted_ages->max_staleness;
    CP(flow_stored);
    ages->items_per_version = wanted_ages->items_per_version;
    CP(flow_stored);
    ages->inserts_base = atomic_load_explicit(&runtime->write_count, memory_order_relaxed);
    CP(flow_stored);
    ages->version_base = atomic_load_explicit(&runtime->consumer_version, memory_order_relaxed);
    CP(flow_stored);
    if (wanted->limits & SHMB_QUEUE) {
        if (!(old && old->limits & SHMB_QUEUE)) runtime->queue_since = head;
        CP(flow_stored);
        shmb_queue_front(ring, limiter);
    }
    atomic_store_explicit(&runtime->limiter_version, version, SYNC_LIMITER_SET_RELEASE);
    CP(flow_published);
    shmb_touch(runtime);
    shmb_unlock(ring);
    shmb_wake_waiters(runtime);
    return SHMB_OK;
}
