/* Flow control: decides whether a claim or a draw may begin, or whether the other side must act first. Decisions are
 * made and stored under the mutex. A new setting is built in the block that is not in force, and published by one
 * store. */
#include <math.h>

#include "core/flow.h"

#define ROUNDING 1e-6 /* in samples: products with a ratio such as 0.1 are not exact */

/* The next claim or draw of this thread passes any ratio, and counts for neither side. */
_Thread_local enum shmb_bypass shmb_bypass;

static double compute_ahead(const struct shmb_ring *ring, const struct shmb_limiter *limiter, uint64_t inserts, uint64_t samples) {
    uint64_t inserted = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) + inserts - limiter->inserts_base;
    uint64_t drawn = atomic_load_explicit(&ring->runtime->drawn, memory_order_relaxed) + samples - limiter->samples_base;
    return (double)(int64_t)inserted * limiter->samples_per_insert - (double)(int64_t)drawn;
}

/* Under the mutex, so that a process that changes the awaited state afterwards sees the waiting client. */
int shmb_register_waiting(struct shmb_ring *ring, enum shmb_side side, uint64_t wanted, enum shmb_reason why) {
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

int shmb_stop_waiting(struct shmb_ring *ring, struct shmb_call *call, uint32_t sides) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    shmb_clear_waiting(ring, ring->me, sides);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* The first place that must not be overwritten, because it is in the queue or is being copied from it. */
static uint64_t find_needed_place(const struct shmb_ring *ring, struct shmb_limiter *limiter) {
    uint64_t needed = shmb_queue_front(ring, limiter).element / ring->lanes;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        uint64_t reading = atomic_load_explicit(&ring->entries[i].reading, memory_order_relaxed);
        bool live = atomic_load_explicit(&ring->entries[i].state, memory_order_relaxed) == SHMB_LIVE;
        if (live && reading && reading - 1 < needed) needed = reading - 1;
    }
    return needed;
}

/* Samples wait until min_size elements are present, so inserts must not wait for samples before that, even if a
 * batch takes them too far ahead. A batch that never fits into the error buffer waits, and is refused. */
static bool is_below_min_size(const struct shmb_ring *ring, const struct shmb_limiter *limiter, uint64_t open, uint64_t elements) {
    uint64_t present = atomic_load_explicit(&ring->runtime->length, memory_order_relaxed) * ring->lanes;
    return present + open < limiter->min_size &&
           (double)elements * limiter->samples_per_insert <= 2 * limiter->error_buffer + ROUNDING;
}

/* True if a queue has no space for so many rows, or for so many bytes of records. */
static bool is_full(struct shmb_ring *ring, struct shmb_limiter *limiter, uint64_t rows, uint64_t bytes) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) + rows;
    uint64_t needed = find_needed_place(ring, limiter);
    if (rows > ring->capacity || end > needed + ring->capacity) return true;
    return ring->bytes && shmb_evicts_from(ring, needed, ring->runtime->queue_since, bytes);
}

/* True if a writer would be further ahead than the learner's version may be behind. */
static bool is_ahead_of_versions(struct shmb_ring *ring, uint64_t open, uint64_t elements) {
    if (!shmb_is_counting_versions(ring)) return false;
    const struct shmb_ages *ages = shmb_get_ages(ring->runtime);
    uint64_t written = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) - ages->inserts_base;
    if (written + open == 0) shmb_begin_version_count(ring->runtime);
    int64_t inserted = (int64_t)(written + open + elements);
    int64_t versions = (int64_t)(atomic_load_explicit(&ring->runtime->consumer_version, memory_order_relaxed) - ages->version_base);
    double allowed = ((double)(versions > 0 ? versions : 0) + (double)ages->max_staleness + 1) * (double)ages->items_per_version;
    return (double)inserted > allowed;
}

/* A learner is about to take the next of `left` elements. If it is the only one and has just begun, no other
 * elements are being learned from. Elements that an earlier learner took without publishing a version are then not
 * waited for. */
void shmb_restart_version_count(struct shmb_ring *ring, uint64_t left) {
    bool others = atomic_load_explicit(&ring->me->last_sample_ns, memory_order_relaxed) != 0;
    for (uint32_t i = 0; !others && i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        bool samples = atomic_load_explicit(&entry->last_sample_ns, memory_order_relaxed) != 0;
        others = samples && atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
    }
    shmb_move_version_base(ring, atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) - left, others);
}

/* True if so many rows, or so many bytes of records, would overwrite an item at the place `floor` or later. */
static bool would_overwrite(struct shmb_ring *ring, uint64_t floor, uint64_t since, uint64_t rows, uint64_t bytes) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) + rows;
    return end > floor + ring->capacity || (ring->bytes && shmb_evicts_from(ring, floor, since, bytes));
}

/* True if a claim of so many rows, or so many bytes of records, would overwrite an item that a consumer needs. */
static bool is_blocked_by_consumer(struct shmb_ring *ring, uint64_t rows, uint64_t bytes) {
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++) {
        struct shmb_book book;
        if (!shmb_consumer_at(ring, which, &book) || !book.consumer->holds) continue;
        uint64_t floor = atomic_load_explicit(&book.consumer->floor, memory_order_relaxed), since = book.consumer->since;
        if (!would_overwrite(ring, floor, since, rows, bytes)) continue;
        if (would_overwrite(ring, shmb_move_floor(ring, &book), since, rows, bytes)) return true;
    }
    return false;
}

/* True if a client waits to overwrite the item at that place of a consumer. */
bool shmb_blocks_writers(struct shmb_ring *ring, const struct shmb_book *book, uint64_t place) {
    uint64_t rows = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed), since = book->consumer->since;
    uint64_t bytes = atomic_load_explicit(&ring->runtime->reserved_bytes, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        bool live = atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
        if (!live || !(atomic_load_explicit(&entry->waits_for, memory_order_relaxed) & SHMB_FOR_SAMPLES)) continue;
        uint64_t entry_bytes = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
        if (would_overwrite(ring, place, since, rows + entry->inserts_wanted, bytes + entry_bytes)) return true;
    }
    return false;
}

/* True if both sides would wait forever. That is so if a consumer's oldest item can be delivered, and before its
 * delivery the `missing` items of its batch cannot be written, or a writer cannot continue. */
bool shmb_is_stuck(struct shmb_ring *ring, const struct shmb_book *book, uint64_t missing, uint64_t now_ns) {
    const struct shmb_runtime *runtime = ring->runtime;
    if (!book->consumer->holds || atomic_load_explicit(&runtime->pending, memory_order_relaxed)) return false;
    uint64_t floor = shmb_move_floor(ring, book);
    if (!shmb_is_place_deliverable(ring, book, floor, now_ns)) return false;
    if (atomic_load_explicit(&runtime->head, memory_order_relaxed) + missing > floor + ring->capacity) return true;
    return shmb_blocks_writers(ring, book, floor);
}

static bool has_holding_consumer(const struct shmb_ring *ring) {
    struct shmb_book book;
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++)
        if (shmb_consumer_at(ring, which, &book) && book.consumer->holds) return true;
    return false;
}

static int register_room_waiting(struct shmb_ring *ring, const struct shmb_request *request, enum shmb_reason why) {
    if (ring->bytes && atomic_load_explicit(&ring->me->phase, memory_order_relaxed) == SHMB_IDLE)
        atomic_store_explicit(&ring->me->byte_first, request->bytes, memory_order_relaxed);
    CP(flow_waits);
    return shmb_register_waiting(ring, SHMB_FOR_SAMPLES, request->elements, why);
}

/* True if this call passes any ratio. */
static bool passes_ratio(void) {
    bool pass = shmb_bypass != SHMB_COUNTS;
    if (shmb_bypass == SHMB_PASSES_ONCE) shmb_bypass = SHMB_COUNTS;
    return pass;
}

/* Decides whether a claim that increases write_count, or a reservation for one, may begin. Named slots have no place
 * in a queue. A claim from a reservation was admitted with the reservation. It waits only if the buffer has become a
 * queue since. */
int shmb_admit_insert(struct shmb_ring *ring, const struct shmb_request *request, bool *passes) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_limiter *limiter = shmb_get_limiter(runtime);
    const struct shmb_reservation *reservation = request->reservation;
    bool pass = passes_ratio(), loads = shmb_bypass == SHMB_PASSES;
    *passes = reservation && reservation->flags & SHMB_PASSED;
    if (limiter == NULL && !shmb_is_consumed(ring)) return SHMB_OK;
    if (reservation == NULL) shmb_expire_reservations(ring); /* a claim's own reservation was valid, and must not expire now */
    uint64_t reserved = atomic_load_explicit(&runtime->reserved, memory_order_relaxed) - (reservation ? reservation->rows : 0);
    uint64_t bytes = atomic_load_explicit(&runtime->reserved_bytes, memory_order_relaxed) - (reservation ? reservation->bytes : 0);
    uint64_t open = atomic_load_explicit(&runtime->pending, memory_order_relaxed) + reserved * ring->lanes;
    uint64_t elements = request->elements;
    if (shmb_is_consumed(ring) && !loads) {
        /* named slots have no place in the consumer's order either */
        if (request->rows == 0 && has_holding_consumer(ring)) return SHMB_CONSUMED;
        if (is_blocked_by_consumer(ring, request->rows + reserved, request->bytes + bytes)) return register_room_waiting(ring, request, SHMB_HELD);
    }
    if (limiter == NULL) {
        shmb_clear_waiting(ring, ring->me, SHMB_FOR_SAMPLES);
        return SHMB_OK;
    }
    if (limiter->limits & SHMB_QUEUE) {
        if (request->rows == 0) return SHMB_IN_QUEUE;
        if (is_full(ring, limiter, request->rows + reserved, request->bytes + bytes)) return register_room_waiting(ring, request, SHMB_FULL);
    }
    if (elements && reservation == NULL && !loads && is_ahead_of_versions(ring, open, elements))
        return shmb_register_waiting(ring, SHMB_FOR_SAMPLES, elements, SHMB_VERSION);
    if (elements && reservation == NULL && limiter->limits & SHMB_RATIO) {
        double over = compute_ahead(ring, limiter, open + elements, 0) - limiter->error_buffer;
        if (over > ROUNDING && !pass && !is_below_min_size(ring, limiter, open, elements))
            return shmb_register_waiting(ring, SHMB_FOR_SAMPLES, elements, SHMB_AHEAD);
        *passes = *passes || (pass && over > ROUNDING);
    }
    if (elements && reservation == NULL && limiter->limits & SHMB_QUOTA) {
        uint64_t written = atomic_load_explicit(&runtime->write_count, memory_order_relaxed) - limiter->inserts_base;
        bool fits = (double)(int64_t)(written + open + elements) <= limiter->error_buffer;
        if (!fits && !pass) return shmb_register_waiting(ring, SHMB_FOR_SAMPLES, elements, SHMB_OVER_QUOTA);
        *passes = pass;
    }
    shmb_clear_waiting(ring, ring->me, SHMB_FOR_SAMPLES);
    return SHMB_OK;
}

/* Elements that are present, or were until a writer began to overwrite them. The open claims of a ring that was not
 * full, or that was emptied, overwrite none. */
static uint64_t count_elements(const struct shmb_ring *ring, const struct shmb_limiter *limiter) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t size = atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes;
    uint64_t open = atomic_load_explicit(&runtime->pending, memory_order_relaxed);
    if (limiter == NULL || open == 0) return size;
    uint64_t tickets = atomic_load_explicit(&runtime->head, memory_order_relaxed) * ring->lanes;
    int64_t inserted = (int64_t)(atomic_load_explicit(&runtime->write_count, memory_order_relaxed) - limiter->inserts_base);
    return inserted >= 0 && tickets >= ring->elements + open ? size + open : size;
}

/* How this thread's last draw was counted, in case the draw is cancelled. */
static _Thread_local struct {
    uint64_t elements;
    uint32_t version;
} counted_draw;

/* Decides whether a draw may be made, and counts it as `counted` elements. That is 0 if the draw passes the ratio,
 * or without a ratio. SHMB_IN_QUEUE: a sampler may not choose from a queue (`chosen`). */
int shmb_admit_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t min_size, bool chosen,
                      uint64_t *counted) {
    struct shmb_runtime *runtime = ring->runtime;
    bool pass = passes_ratio();
    *counted = 0;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_get_limiter(runtime);
    counted_draw.elements = 0;
    if (limiter && limiter->min_size > min_size) min_size = limiter->min_size;
    if (chosen && limiter && limiter->limits & SHMB_QUEUE) {
        status = SHMB_IN_QUEUE;
    } else if (count_elements(ring, limiter) < min_size) {
        status = shmb_register_waiting(ring, SHMB_FOR_INSERTS, min_size, SHMB_FEW);
    } else if (limiter && limiter->limits & SHMB_RATIO) {
        bool fits = compute_ahead(ring, limiter, 0, count) >= -(limiter->error_buffer + ROUNDING);
        if (!fits && !pass) {
            status = shmb_register_waiting(ring, SHMB_FOR_INSERTS, count, SHMB_BEHIND);
        } else {
            if (fits) atomic_fetch_add_explicit(&runtime->drawn, count, memory_order_relaxed);
            CP(flow_drawn);
            counted_draw.elements = *counted = fits ? count : 0;
            counted_draw.version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
        }
    }
    if (status == SHMB_OK) {
        shmb_clear_waiting(ring, ring->me, SHMB_FOR_INSERTS);
        atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
        CP(count_added);
    }
    shmb_unlock(ring);
    if (status == SHMB_OK) shmb_wake_waiters(runtime);
    return status;
}

/* Takes back the count of a draw that was admitted and not made. It is the last draw of this thread, or, if
 * `version` is given, a draw that was counted under that version of the limiter. A draw that does not count is not
 * taken back. */
int shmb_cancel_draw(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint32_t version) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_get_limiter(runtime);
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

/* First in, first out; all or nothing. The slots are not overwritten before shmb_release. */
int shmb_dequeue(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, int64_t *index, int64_t *tickets) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_get_limiter(runtime);
    if (limiter == NULL || !(limiter->limits & SHMB_QUEUE)) {
        shmb_unlock(ring);
        return SHMB_NOTHING;
    }
    struct shmb_place next = shmb_queue_front(ring, limiter);
    uint64_t first = 0;
    if (limiter->max_times_sampled == 1 && !shmb_is_consumed(ring) && shmb_is_counting_versions(ring))
        shmb_restart_version_count(ring, shmb_count_ready_in_queue(ring, limiter));
    if (shmb_queue_oldest(ring, limiter, &next, count, &first, index, tickets) < count) {
        tickets[0] = -1; /* no element is removed */
        status = shmb_register_waiting(ring, SHMB_FOR_INSERTS, count, SHMB_SHORT);
    } else {
        uint64_t reading = atomic_load_explicit(&ring->me->reading, memory_order_relaxed);
        ring->readers++;
        if (count && (ring->readers == 1 || reading == 0))
            atomic_store_explicit(&ring->me->reading, 1 + first, memory_order_relaxed);
        CP(flow_reading);
        limiter->queue_next = next.element * limiter->max_times_sampled + next.times;
        CP(flow_taken);
        shmb_clear_waiting(ring, ring->me, SHMB_FOR_INSERTS);
        atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
        CP(count_added);
    }
    shmb_unlock(ring);
    return status;
}

/* A thread of this handle has copied its elements. Call this once for each shmb_dequeue. */
int shmb_release(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (ring->readers && --ring->readers == 0) atomic_store_explicit(&ring->me->reading, 0, memory_order_relaxed);
    CP(flow_reading);
    shmb_unlock(ring);
    shmb_wake_waiters(ring->runtime);
    return SHMB_OK;
}

/* Determines why the client of an entry waits for a queue, from the numbers in its entry; SHMB_SLOT_IS_TAKEN if it
 * could continue. */
int shmb_find_queue_reason(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_entry *entry, uint32_t side,
                        enum shmb_reason *why) {
    *why = SHMB_SLOT_IS_TAKEN;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = shmb_get_limiter(ring->runtime);
    uint64_t first, bytes = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
    bool in_order = !ring->bytes || (bytes <= ring->max_bytes && shmb_is_valid_span(ring));
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

/* Sets another limiter. Elements that a queue has handed out stay handed out, and a new queue contains every present
 * item. The ratio counts from now on, and a quota from the base of the previous quota. */
int shmb_limit(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_limiter *wanted, const struct shmb_ages *wanted_ages) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed) + 1;
    const struct shmb_limiter *old = shmb_get_limiter(runtime);
    struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes;
    uint64_t times = wanted->max_times_sampled;
    struct shmb_place next = {head > ring->capacity ? (head - ring->capacity) * ring->lanes : 0, 0};
    if (old && old->limits & SHMB_QUEUE) next = shmb_queue_next(ring, old);
    if (next.times && next.times >= times) next = (struct shmb_place){next.element + 1, 0};
    if (version == 0) version = 2; /* 0 means that there is no limiter */
    struct shmb_ages *ages = &runtime->ages[version & 1];
    atomic_thread_fence(SYNC_LIMITER_REUSE_RELEASE); /* the version selects the other block before this one changes */
    limiter->samples_per_insert = wanted->samples_per_insert;
    CP(flow_stored);
    limiter->error_buffer = wanted->error_buffer;
    CP(flow_stored);
    limiter->min_size = wanted->min_size;
    CP(flow_stored);
    bool keeps_base = old && old->limits & wanted->limits & SHMB_QUOTA;
    limiter->inserts_base = keeps_base ? old->inserts_base
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
    shmb_store_touch_time(runtime);
    shmb_unlock(ring);
    shmb_wake_waiters(runtime);
    return SHMB_OK;
}
