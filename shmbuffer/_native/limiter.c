/* Flow control: neither side runs away from the other, and nothing is overwritten that a queue has not handed out.
 *
 *     inserted = write_count + pending - inserts_base     elements since the ratio counts, open claims included
 *     drawn    = drawn - samples_base
 *     ahead    = inserted * samples_per_insert - drawn    0 where both sides have done their share
 *
 * A claim may begin while `ahead` stays at or below the error buffer with it, or fewer than min_size elements are there;
 * a draw while it stays at or above minus the error buffer. So whatever comes when, the ratio is within it. (Reverb's RateLimiter, whose max_diff and min_diff
 * are samples_per_insert * min_size plus and minus the buffer: here the first min_size inserts are left out instead.)
 *
 * What is inserted is derived and not counted: a writer that dies takes its claim with it. Everything is decided and
 * stored under the mutex; a setting is built in the block that does not count, and published by one store. */
#include <math.h>
#include <string.h>

#include "ring.h"

#define ROUNDING 1e-6 /* of a sample: products of a ratio such as 0.1 are not exact */

_Thread_local bool shmb_let_pass; /* the next claim or draw of this thread goes on whatever the ratio; it counts on no side */

static bool in_order(const struct shmb_limiter *limiter) {
    double ratio = limiter->samples_per_insert, buffer = limiter->error_buffer;
    return limiter->limits <= (SHMB_RATIO | SHMB_QUEUE) && limiter->when_alone <= SHMB_ALONE_ERROR && ratio >= 0 &&
           isfinite(ratio) && buffer >= 0 && isfinite(buffer) &&
           (!(limiter->limits & SHMB_RATIO) || (ratio > 0 && buffer >= 1 && buffer >= ratio)) &&
           (!(limiter->limits & SHMB_QUEUE) || (limiter->max_times_sampled > 0 && limiter->when_alone != SHMB_ALONE_PASS));
}

/* The one that counts; NULL: there is none, or it is damaged. */
static struct shmb_limiter *limiter_of(struct shmb_runtime *runtime) {
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
    struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    return version && in_order(limiter) ? limiter : NULL;
}

/* The same, looked at without the mutex, or one that limits nothing: a block is written over only after the version has
 * changed. */
static struct shmb_limiter copy_of_limiter(const struct shmb_runtime *runtime) {
    struct shmb_limiter copy = {0};
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_acquire), before = 0;
    while (version != before) {
        before = version;
        SHMB_OPTIMISTIC(copy = runtime->limiters[version & 1]);
        atomic_thread_fence(memory_order_acquire);
        version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed);
    }
    return version && in_order(&copy) ? copy : (struct shmb_limiter){0};
}

uint32_t shmb_limits(struct shmb_runtime *runtime) {
    struct shmb_limiter limiter = copy_of_limiter(runtime);
    return limiter.limits | (limiter.min_size ? SHMB_MIN_SIZE : 0);
}

static double ahead(const struct shmb_ring *ring, const struct shmb_limiter *limiter, uint64_t inserts, uint64_t samples) {
    struct shmb_runtime *runtime = ring->runtime;
    int64_t inserted = (int64_t)(atomic_load_explicit(&runtime->write_count, memory_order_relaxed) + inserts - limiter->inserts_base);
    int64_t drawn = (int64_t)(atomic_load_explicit(&runtime->drawn, memory_order_relaxed) + samples - limiter->samples_base);
    return (double)inserted * limiter->samples_per_insert - (double)drawn;
}

static inline void add_pending(struct shmb_runtime *runtime, uint64_t elements) {
    uint64_t pending = atomic_load_explicit(&runtime->pending, memory_order_relaxed);
    atomic_store_explicit(&runtime->pending, pending + elements, memory_order_relaxed);
}

/* A claim is open for so many elements. Also where nothing is limited: it may be still open when that changes. */
void shmb_promise(struct shmb_ring *ring, uint64_t elements) {
    atomic_store_explicit(&ring->me->pending, elements, memory_order_relaxed);
    CP(flow_pending);
    add_pending(ring->runtime, elements);
    CP(flow_promised);
}

/* The claim is over: its elements are in write_count, or gone. A repair counts anew. */
void shmb_settle(struct shmb_ring *ring, struct shmb_entry *entry) {
    uint64_t elements = atomic_load_explicit(&entry->pending, memory_order_relaxed);
    if (elements == 0) return;
    add_pending(ring->runtime, -elements);
    CP(flow_settled);
    atomic_store_explicit(&entry->pending, 0, memory_order_relaxed);
    CP(flow_pending);
}

/* Under the mutex, so that whoever changes what is waited for sees it afterwards. */
static int wait_for(struct shmb_ring *ring, enum shmb_side side, uint64_t wanted, enum shmb_reason why) {
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
    shmb_refusal.blocker.progress = atomic_load(&ring->runtime->progress);
    return SHMB_LIMITED;
}

void shmb_wait_no_more(struct shmb_ring *ring, struct shmb_entry *entry, uint32_t sides) {
    uint32_t before = atomic_load_explicit(&entry->waits_for, memory_order_relaxed);
    if (!(before & sides)) return;
    atomic_store_explicit(&entry->waits_for, before & ~sides, memory_order_release);
    CP(flow_waits);
    uint32_t limited = atomic_load_explicit(&ring->runtime->limited, memory_order_relaxed);
    if ((before & ~sides) == 0 && limited) /* who waited before there was a ring was not counted */
        atomic_store_explicit(&ring->runtime->limited, limited - 1, memory_order_relaxed);
    CP(flow_limited);
}

int shmb_give_up_waiting(struct shmb_ring *ring, struct shmb_call *call, uint32_t sides) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    shmb_wait_no_more(ring, ring->me, sides);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* What a dead owner of the mutex left is not trusted, and a claim that a repair has ended is open no more: else whoever
 * reaps its owner would settle it once again. */
void shmb_count_limited(struct shmb_ring *ring) {
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

/* The element that a queue hands out next, and how often it has done so. */
struct place {
    uint64_t element, times;
};

/* Elements of a queue are counted from ticket 0 on. Tickets two laps old are behind it: a claim that was open when the
 * ring was emptied is one lap old at most, and emptying begins another one. */
static struct place next_of(const struct shmb_ring *ring, const struct shmb_limiter *limiter) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    uint64_t oldest = head > 2 * ring->capacity ? head - 2 * ring->capacity : 0;
    struct place next = {limiter->queue_next / limiter->max_times_sampled, limiter->queue_next % limiter->max_times_sampled};
    if (next.element < oldest * ring->lanes) next = (struct place){oldest * ring->lanes, 0};
    if (next.element > head * ring->lanes) next = (struct place){head * ring->lanes, 0};
    return next;
}

/* Where in the queue an item is: at its ticket. One that was there before the buffer became a queue may be many laps old,
 * beside a placed write or after a load, and is where its slot comes in the last lap before: in the order in which the
 * ring would have written over it. */
uint64_t shmb_place_of(const struct shmb_ring *ring, uint64_t ticket) {
    uint64_t since = ring->runtime->queue_since;
    return ticket < since ? since - 1 - (since - 1 - ticket) % ring->capacity : ticket;
}

static inline uint64_t word_at(const struct shmb_ring *ring, uint64_t place) {
    return atomic_load_explicit(&ring->words[place % ring->capacity], memory_order_relaxed);
}

/* Nobody has committed it, and nobody will: its writer died or gave up, or it is forgotten or written over. */
static bool is_gone(const struct shmb_ring *ring, uint64_t place) {
    uint64_t word = word_at(ring, place);
    if (shmb_place_of(ring, SHMB_TICKET(word)) != place) return true;
    return SHMB_STATE(word) != SHMB_COMMITTED && !shmb_claim_covers(ring, word, NULL);
}

/* Past what is gone: were it waited for, a queue full of it would be full for ever. */
static struct place front_of(const struct shmb_ring *ring, struct shmb_limiter *limiter) {
    struct place next = next_of(ring, limiter);
    uint64_t first = next.element, end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) * ring->lanes;
    while (next.element < end && is_gone(ring, next.element / ring->lanes))
        next = (struct place){(next.element / ring->lanes + 1) * ring->lanes, 0};
    if (next.element != first) {
        limiter->queue_next = next.element * limiter->max_times_sampled;
        CP(flow_passed);
    }
    return next;
}

/* The first place that must not be overwritten: it waits in the queue, or is being copied out of it. */
static uint64_t needed_from(const struct shmb_ring *ring, struct shmb_limiter *limiter) {
    uint64_t needed = front_of(ring, limiter).element / ring->lanes;
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
    return rows > ring->capacity || end > needed + ring->capacity || (ring->bytes && shmb_evicts_from(ring, needed, bytes));
}

/* Before a claim that write_count grows by: may it begin? `rows` go to the head of the ring; 0: to named slots, which
 * have no place in a queue. */
int shmb_admit_insert(struct shmb_ring *ring, uint64_t rows, uint64_t elements) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_limiter *limiter = limiter_of(runtime);
    bool pass = shmb_let_pass;
    shmb_let_pass = false;
    ring->claim_passes = false;
    if (limiter == NULL) return SHMB_OK;
    if (limiter->limits & SHMB_QUEUE) {
        if (rows == 0) return SHMB_IN_QUEUE;
        if (is_full(ring, limiter, rows, ring->claim_bytes)) {
            if (ring->bytes) atomic_store_explicit(&ring->me->byte_first, ring->claim_bytes, memory_order_relaxed);
            CP(flow_waits);
            return wait_for(ring, SHMB_FOR_SAMPLES, elements, SHMB_FULL);
        }
    }
    if (elements && limiter->limits & SHMB_RATIO) {
        uint64_t open = atomic_load_explicit(&runtime->pending, memory_order_relaxed);
        double over = ahead(ring, limiter, open + elements, 0) - limiter->error_buffer;
        if (over > ROUNDING && !pass && !is_short(ring, limiter, open, elements))
            return wait_for(ring, SHMB_FOR_SAMPLES, elements, SHMB_AHEAD);
        ring->claim_passes = pass && over > ROUNDING;
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
    bool pass = shmb_let_pass;
    shmb_let_pass = false;
    *counted = 0;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = limiter_of(runtime);
    counted_draw.elements = 0;
    if (limiter && limiter->min_size > min_size) min_size = limiter->min_size;
    if (chosen && limiter && limiter->limits & SHMB_QUEUE) {
        status = SHMB_IN_QUEUE;
    } else if (size_of(ring, limiter) < min_size) {
        status = wait_for(ring, SHMB_FOR_INSERTS, min_size, SHMB_FEW);
    } else if (limiter && limiter->limits & SHMB_RATIO) {
        bool fits = ahead(ring, limiter, 0, count) >= -(limiter->error_buffer + ROUNDING);
        if (!fits && !pass) {
            status = wait_for(ring, SHMB_FOR_INSERTS, count, SHMB_BEHIND);
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
int shmb_take_back(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint32_t version) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = limiter_of(runtime);
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

/* The oldest `count` elements that were handed out fewer than max_times_sampled times, or as many as there are: they are
 * put into index and tickets, unless these are NULL, and `next` goes on past them. `first` is the place of the first. */
static uint64_t oldest(const struct shmb_ring *ring, const struct shmb_limiter *limiter, struct place *next, uint64_t count,
                       uint64_t *first, int64_t *index, int64_t *tickets) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) * ring->lanes, found = 0;
    while (found < count && next->element < end) {
        uint64_t place = next->element / ring->lanes, word = word_at(ring, place);
        if (is_gone(ring, place)) {
            *next = (struct place){(place + 1) * ring->lanes, 0};
        } else if (SHMB_STATE(word) == SHMB_COMMITTED) {
            if (found == 0) *first = place;
            if (index) index[found] = (int64_t)(place % ring->capacity * ring->lanes + next->element % ring->lanes);
            if (tickets) tickets[found] = (int64_t)SHMB_TICKET(word);
            found++;
            if (++next->times == limiter->max_times_sampled) *next = (struct place){next->element + 1, 0};
        } else {
            break; /* it comes first, once its writer has committed it */
        }
    }
    return found;
}

/* First in, first out. All or none. Their slots are not written over before shmb_release. */
int shmb_take(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, int64_t *index, int64_t *tickets) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_limiter *limiter = limiter_of(runtime);
    if (limiter == NULL || !(limiter->limits & SHMB_QUEUE)) {
        shmb_unlock(ring);
        return SHMB_NOTHING;
    }
    struct place next = front_of(ring, limiter);
    uint64_t first = 0;
    if (oldest(ring, limiter, &next, count, &first, index, tickets) < count) {
        tickets[0] = -1; /* nothing is taken */
        status = wait_for(ring, SHMB_FOR_INSERTS, count, SHMB_SHORT);
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

/* What this handle's threads took is copied: once for each shmb_take. */
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
    struct shmb_limiter *limiter = limiter_of(ring->runtime);
    uint64_t first, bytes = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
    bool in_order = !ring->bytes || (bytes <= ring->max_bytes && shmb_span_in_order(ring));
    if (limiter && limiter->limits & SHMB_QUEUE && in_order) {
        struct place next = front_of(ring, limiter);
        if (side == SHMB_FOR_SAMPLES && is_full(ring, limiter, entry->inserts_wanted / ring->lanes, bytes)) *why = SHMB_FULL;
        if (side == SHMB_FOR_INSERTS &&
            oldest(ring, limiter, &next, entry->samples_wanted, &first, NULL, NULL) < entry->samples_wanted)
            *why = SHMB_SHORT;
    }
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Elements that a queue has not handed out as often as it may; those that are being written included. */
uint64_t shmb_queued(const struct shmb_ring *ring) {
    struct shmb_limiter limiter = copy_of_limiter(ring->runtime);
    if (!(limiter.limits & SHMB_QUEUE)) return 0;
    return atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) * ring->lanes - next_of(ring, &limiter).element;
}

/* Of a commit: what passes a limiter leaves `ahead` as it is, so its base moves with write_count. The two are stored one
 * after the other, and by whoever finishes the claim for a dead owner of the mutex. */
void shmb_note_base(struct shmb_ring *ring) {
    const struct shmb_limiter *limiter = limiter_of(ring->runtime);
    if (limiter) ring->runtime->inserts_goal = limiter->inserts_base + (ring->claim_passes ? ring->claim_written : 0);
    CP(flow_goal);
}

void shmb_set_base(struct shmb_ring *ring) {
    struct shmb_limiter *limiter = limiter_of(ring->runtime);
    if (limiter) limiter->inserts_base = ring->runtime->inserts_goal;
    CP(flow_base);
}

/* The ratio counts from here on: both sides have done their share, once there are min_size elements. The mutex is held. */
void shmb_start_anew(struct shmb_ring *ring, uint64_t write_count, uint64_t elements) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_limiter *limiter = limiter_of(runtime);
    if (limiter == NULL) return;
    limiter->inserts_base = write_count + (limiter->min_size > elements ? limiter->min_size - elements : 0);
    CP(flow_base);
    limiter->samples_base = atomic_load_explicit(&runtime->drawn, memory_order_relaxed);
    CP(flow_base);
}

/* Of a ring that was emptied: what is being written stays in the queue. */
void shmb_pass_the_forgotten(struct shmb_ring *ring) {
    struct shmb_limiter *limiter = limiter_of(ring->runtime);
    if (limiter && limiter->limits & SHMB_QUEUE) front_of(ring, limiter);
}

/* Another setting. What a queue has handed out stays so, and a new one has every item that is there; the ratio starts anew. */
int shmb_limit(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_limiter *wanted) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    uint32_t version = atomic_load_explicit(&runtime->limiter_version, memory_order_relaxed) + 1;
    const struct shmb_limiter *old = limiter_of(runtime);
    struct shmb_limiter *limiter = &runtime->limiters[version & 1];
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes;
    uint64_t times = wanted->max_times_sampled;
    struct place next = {head > ring->capacity ? (head - ring->capacity) * ring->lanes : 0, 0};
    if (old && old->limits & SHMB_QUEUE) next = next_of(ring, old);
    if (next.times && next.times >= times) next = (struct place){next.element + 1, 0};
    if (version == 0) version = 2; /* 0 is none */
    limiter->samples_per_insert = wanted->samples_per_insert;
    CP(flow_stored);
    limiter->error_buffer = wanted->error_buffer;
    CP(flow_stored);
    limiter->min_size = wanted->min_size;
    CP(flow_stored);
    limiter->inserts_base = atomic_load_explicit(&runtime->write_count, memory_order_relaxed) +
                            (wanted->min_size > length ? wanted->min_size - length : 0);
    CP(flow_stored);
    limiter->samples_base = atomic_load_explicit(&runtime->drawn, memory_order_relaxed);
    CP(flow_stored);
    limiter->max_times_sampled = times;
    CP(flow_stored);
    limiter->queue_next = next.element * times + next.times;
    CP(flow_stored);
    limiter->when_alone = wanted->when_alone;
    CP(flow_stored);
    limiter->limits = wanted->limits;
    CP(flow_stored);
    if (wanted->limits & SHMB_QUEUE) {
        if (!(old && old->limits & SHMB_QUEUE)) runtime->queue_since = head;
        CP(flow_stored);
        front_of(ring, limiter);
    }
    atomic_store_explicit(&runtime->limiter_version, version, memory_order_release);
    CP(flow_published);
    shmb_touch(runtime);
    shmb_unlock(ring);
    shmb_wake_waiters(runtime);
    return SHMB_OK;
}
