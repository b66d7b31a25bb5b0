/* The order of a buffer that is a queue: which element is handed out next, and how often it was handed out. The
 * mutex is held, except for `shmb_count_queued`. */
#include "core/ring.h"

/* Elements of a queue are counted from ticket 0 on. Tickets two laps old are no longer in the queue. A claim that
 * was open when the ring was emptied is at most one lap old, and emptying begins another lap. */
struct shmb_place shmb_queue_next(const struct shmb_ring *ring, const struct shmb_limiter *limiter) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    uint64_t oldest = head > 2 * ring->capacity ? head - 2 * ring->capacity : 0;
    uint64_t times = limiter->max_times_sampled;
    struct shmb_place next = {limiter->queue_next / times, limiter->queue_next % times};
    if (next.element < oldest * ring->lanes) next = (struct shmb_place){oldest * ring->lanes, 0};
    if (next.element > head * ring->lanes) next = (struct shmb_place){head * ring->lanes, 0};
    return next;
}

static inline uint64_t word_at(const struct shmb_ring *ring, uint64_t place) {
    return atomic_load_explicit(&ring->words[place % ring->capacity], memory_order_relaxed);
}

/* True if the place will never have a committed item: its writer died or aborted, or the item was emptied or
 * overwritten. */
static bool is_gone(const struct shmb_ring *ring, uint64_t place) {
    uint64_t word = word_at(ring, place);
    if (shmb_queue_place(ring, SHMB_TICKET(word)) != place) return true;
    return SHMB_STATE(word) != SHMB_COMMITTED && !shmb_claim_covers(ring, word, NULL);
}

/* Skips places without an item. Otherwise a queue full of them would stay full forever. */
struct shmb_place shmb_queue_front(const struct shmb_ring *ring, struct shmb_limiter *limiter) {
    struct shmb_place next = shmb_queue_next(ring, limiter);
    uint64_t first = next.element, end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) * ring->lanes;
    while (next.element < end && is_gone(ring, next.element / ring->lanes))
        next = (struct shmb_place){(next.element / ring->lanes + 1) * ring->lanes, 0};
    if (next.element != first) {
        limiter->queue_next = next.element * limiter->max_times_sampled;
        CP(flow_passed);
    }
    return next;
}

/* Returns how many of the oldest elements, at most `count`, can be handed out again. They are stored in `index` and
 * `tickets` unless these are NULL, and `next` advances past them. `first` is the place of the first one. */
uint64_t shmb_queue_oldest(const struct shmb_ring *ring, const struct shmb_limiter *limiter, struct shmb_place *next,
                           uint64_t count, uint64_t *first, int64_t *index, int64_t *tickets) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) * ring->lanes, chosen = 0;
    while (chosen < count && next->element < end) {
        uint64_t place = next->element / ring->lanes, word = word_at(ring, place);
        if (is_gone(ring, place)) {
            *next = (struct shmb_place){(place + 1) * ring->lanes, 0};
        } else if (SHMB_STATE(word) == SHMB_COMMITTED) {
            if (chosen == 0) *first = place;
            if (index) index[chosen] = (int64_t)(place % ring->capacity * ring->lanes + next->element % ring->lanes);
            if (tickets) tickets[chosen] = (int64_t)SHMB_TICKET(word);
            chosen++;
            if (++next->times == limiter->max_times_sampled) *next = (struct shmb_place){next->element + 1, 0};
        } else {
            break; /* it is next in order, once its writer has committed it */
        }
    }
    return chosen;
}

/* Committed elements that the queue will still hand out. */
uint64_t shmb_count_ready_in_queue(const struct shmb_ring *ring, const struct shmb_limiter *limiter) {
    uint64_t end = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed), left = 0;
    for (uint64_t place = shmb_queue_next(ring, limiter).element / ring->lanes; place < end; place++)
        left += SHMB_STATE(word_at(ring, place)) == SHMB_COMMITTED && !is_gone(ring, place) ? ring->lanes : 0;
    return left;
}

/* Elements that the queue has not handed out max_times_sampled times, including those being written. */
uint64_t shmb_count_queued(const struct shmb_ring *ring) {
    struct shmb_limiter limiter = shmb_copy_setting(ring->runtime).limiter;
    if (!(limiter.limits & SHMB_QUEUE)) return 0;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    return head * ring->lanes - shmb_queue_next(ring, &limiter).element;
}

/* After the ring was emptied: items that are being written stay in the queue. */
void shmb_skip_emptied(struct shmb_ring *ring) {
    struct shmb_limiter *limiter = shmb_get_limiter(ring->runtime);
    if (limiter && limiter->limits & SHMB_QUEUE) shmb_queue_front(ring, limiter);
}
