/* The calls of a consumer's clients: opening it, taking items and acknowledging them. Each call is one locked
 * section. ledger.c describes what happens to the ledger. */
#include <string.h>

#include "core/flow.h"

/* The mutex is held after SHMB_OK. */
static int lock_book(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, struct shmb_book *book) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (shmb_consumer_at(ring, consumer_id.which, book) && book->consumer->number == consumer_id.number) {
        if (shmb_is_ours(ring)) return SHMB_OK;
        status = SHMB_FENCED;
    } else {
        status = SHMB_CONSUMER_GONE;
    }
    shmb_unlock(ring);
    return status;
}

static int end_book(struct shmb_ring *ring, int status) {
    shmb_unlock(ring);
    if (status == SHMB_OK) shmb_wake_waiters(ring->runtime);
    return status;
}

static uint64_t deadline_of(uint64_t now, uint64_t lease_ns) { return lease_ns > UINT64_MAX - now ? UINT64_MAX : now + lease_ns; }

/* The first place of a new consumer: the oldest present item, or the head. */
static uint64_t first_place(const struct shmb_ring *ring, uint64_t head, bool newest) {
    return newest ? head : head > ring->capacity ? head - ring->capacity : 0;
}

/* Under init.lock, after the ledger file was extended. No process reads the part of a consumer that is not open, so
 * it is cleared without the mutex. */
int shmb_open_consumer(struct shmb_ring *ring, struct shmb_call *call, uint32_t which, const struct shmb_consumer_options *wanted,
                       uint64_t *number) {
    struct shmb_runtime *runtime = ring->runtime;
    /* by a consumer that was removed */
    uint64_t used = ring->parts.deliveries + shmb_written_slots(ring) * sizeof(struct shmb_delivery);
    memset((char *)ring->ledger + ring->parts.consumers + which * ring->parts.each, 0, used);
    CP(consume_cleared);
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_consumer *consumer = &ring->ledger->consumers[which];
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed), begin = first_place(ring, head, wanted->newest);
    memset(consumer, 0, sizeof *consumer);
    CP(consume_opened);
    memcpy(consumer->name, wanted->name, SHMB_CONSUMER_NAME);
    CP(consume_opened);
    consumer->times = wanted->times;
    CP(consume_opened);
    consumer->holds = wanted->holds;
    CP(consume_opened);
    consumer->since = head;
    CP(consume_opened);
    atomic_store_explicit(&consumer->next, begin, memory_order_relaxed);
    CP(consume_next);
    atomic_store_explicit(&consumer->floor, begin, memory_order_relaxed);
    CP(consume_floor);
    consumer->created_ns = (uint64_t)shmb_clock_ns(CLOCK_REALTIME);
    CP(consume_opened);
    *number = atomic_load_explicit(&ring->ledger->next_lease, memory_order_relaxed);
    if (*number == 0) *number = wanted->seed;
    atomic_store_explicit(&ring->ledger->next_lease, *number + 1, memory_order_relaxed);
    CP(consume_numbered);
    consumer->number = *number;
    CP(consume_opened);
    atomic_fetch_add_explicit(&runtime->consumers, 1, memory_order_relaxed);
    CP(consume_counted);
    atomic_store_explicit(&consumer->state, SHMB_CONSUMER_OPEN, memory_order_release);
    CP(consume_begun);
    return end_book(ring, SHMB_OK);
}

int shmb_remove_consumer(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id) {
    struct shmb_book book;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    atomic_store_explicit(&book.consumer->state, SHMB_CONSUMER_CLOSED, memory_order_release);
    CP(consume_removed);
    atomic_fetch_sub_explicit(&ring->runtime->consumers, 1, memory_order_relaxed);
    CP(consume_counted);
    return end_book(ring, SHMB_OK);
}

/* A learner that makes versions from this consumer's items is about to take the next ones. With several consumers it
 * is unknown which of them makes versions. */
static void update_version_base(struct shmb_ring *ring, const struct shmb_book *book, uint64_t now) {
    bool makes_versions = atomic_load_explicit(&ring->runtime->consumers, memory_order_relaxed) == 1 && book->consumer->times == 1;
    if (makes_versions && shmb_is_counting_versions(ring)) shmb_restart_version_count(ring, shmb_count_deliverable_places(ring, book, now) * ring->lanes);
}

/* Delivers `count` items under a new lease. It delivers fewer, but at least `least`, if there are not more, and
 * fewer than `least` if no more can be written before these are delivered. */
int shmb_deliver(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t wanted, uint64_t least,
                 uint64_t lease_ns, int64_t *slots, int64_t *tickets, uint64_t *lease_id, uint64_t *delivered) {
    struct shmb_book book;
    uint64_t next, n_redelivered = 0, now = shmb_boot_ns();
    bool before;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    *delivered = 0;
    update_version_base(ring, &book, now);
    uint64_t chosen = shmb_choose_items(ring, &book, wanted, now, slots, tickets, &next);
    bool cannot_grow = chosen && chosen < least && wanted <= ring->capacity && shmb_is_stuck(ring, &book, wanted - chosen, now);
    if (chosen < least && !cannot_grow) return end_book(ring, shmb_register_waiting(ring, SHMB_FOR_INSERTS, wanted, SHMB_SCARCE));
    struct shmb_lease *lease = chosen ? shmb_begin_lease(ring, &book, tickets, chosen, deadline_of(now, lease_ns)) : NULL;
    if (chosen && lease == NULL) return end_book(ring, SHMB_NO_LEASE);
    for (uint64_t i = 0; i < chosen; i++) {
        shmb_is_deliverable(ring, &book, (uint64_t)slots[i], (uint64_t)tickets[i], now, &before);
        n_redelivered += before;
        shmb_deliver_item(&book, (uint64_t)slots[i], (uint64_t)tickets[i], lease);
    }
    shmb_advance_next(&book, next);
    *lease_id = lease ? atomic_load_explicit(&lease->id, memory_order_relaxed) : 0;
    atomic_fetch_add_explicit(&book.consumer->delivered, chosen, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&book.consumer->redelivered, n_redelivered, memory_order_relaxed);
    CP(count_added);
    shmb_clear_waiting(ring, ring->me, SHMB_FOR_INSERTS);
    atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
    CP(count_added);
    *delivered = chosen;
    return end_book(ring, SHMB_OK);
}

/* Delivers each group completely or not at all; accepted[i] tells which. All delivered groups are under one new lease.
 * With lease_ns 0 nothing is delivered, and accepted[i] tells which groups could be. */
int shmb_claim_groups(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const int64_t *slots,
                      const int64_t *tickets, const int64_t *sizes, uint64_t groups, uint64_t lease_ns, unsigned char *accepted,
                      uint64_t *lease_id, uint64_t *delivered) {
    struct shmb_book book;
    uint64_t total = 0, n_redelivered = 0, items = 0, now = shmb_boot_ns();
    bool before;
    for (uint64_t group = 0; group < groups; group++) total += (uint64_t)sizes[group];
    *lease_id = *delivered = 0;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    bool gives = total && lease_ns;
    if (gives) update_version_base(ring, &book, now);
    struct shmb_lease *lease = gives ? shmb_begin_lease(ring, &book, tickets, total, deadline_of(now, lease_ns)) : NULL;
    if (gives && lease == NULL) return end_book(ring, SHMB_NO_LEASE);
    for (uint64_t group = 0, first = 0; group < groups; first += (uint64_t)sizes[group++]) {
        uint64_t end = first + (uint64_t)sizes[group], twice = 0;
        bool all = true;
        for (uint64_t i = first; all && i < end; i++) {
            all = shmb_is_deliverable(ring, &book, (uint64_t)slots[i], (uint64_t)tickets[i], now, &before);
            twice += before;
        }
        accepted[group] = all;
        if (!all) continue;
        for (uint64_t i = first; gives && i < end; i++) shmb_deliver_item(&book, (uint64_t)slots[i], (uint64_t)tickets[i], lease);
        items += end - first;
        n_redelivered += twice;
        ++*delivered;
    }
    if (!gives) {
        shmb_unlock(ring);
        return SHMB_OK;
    }
    *lease_id = atomic_load_explicit(&lease->id, memory_order_relaxed);
    shmb_free_empty_lease(&book, lease);
    if (*delivered) shmb_clear_waiting(ring, ring->me, SHMB_FOR_INSERTS);
    atomic_fetch_add_explicit(&book.consumer->delivered, items, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&book.consumer->redelivered, n_redelivered, memory_order_relaxed);
    CP(count_added);
    atomic_store_explicit(&ring->me->last_sample_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
    CP(count_added);
    return end_book(ring, SHMB_OK);
}

/* Completes items without a delivery, if no client holds them. */
int shmb_drop_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const int64_t *slots,
                    const int64_t *tickets, uint64_t items, uint64_t *dropped) {
    struct shmb_book book;
    uint64_t now = shmb_boot_ns();
    bool before;
    *dropped = 0;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    for (uint64_t i = 0; i < items; i++) {
        if (!shmb_is_deliverable(ring, &book, (uint64_t)slots[i], (uint64_t)tickets[i], now, &before)) continue;
        /* first: a death in between lets one more element be written, instead of one less forever */
        shmb_uncount_insert(ring->runtime);
        shmb_deliver_item(&book, (uint64_t)slots[i], (uint64_t)tickets[i], NULL);
        ++*dropped;
    }
    atomic_fetch_add_explicit(&book.consumer->dropped, *dropped, memory_order_relaxed);
    CP(count_added);
    shmb_move_floor(ring, &book);
    return end_book(ring, SHMB_OK);
}

/* Acknowledges each item; repeating it has no effect. `acked` counts the items that are acknowledged under the given
 * lease. */
int shmb_acknowledge_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const uint64_t *leases,
                           const int64_t *slots, const int64_t *tickets, uint64_t items, uint64_t *acked) {
    struct shmb_book book;
    uint64_t now = 0, late = 0;
    *acked = 0;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    for (uint64_t i = 0; i < items; i++) {
        int done = shmb_acknowledge(ring, &book, (uint64_t)slots[i], (uint64_t)tickets[i], leases[i]);
        now += done > 0;
        late += done < 0;
    }
    *acked = items - late;
    atomic_fetch_add_explicit(&book.consumer->acked, now, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&book.consumer->refused, late, memory_order_relaxed);
    CP(count_added);
    shmb_move_floor(ring, &book);
    return end_book(ring, SHMB_OK);
}

/* Returns a lease, so that its items can be delivered to others at once. */
int shmb_return_lease(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t lease_id) {
    struct shmb_book book;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    shmb_end_lease(&book, lease_id);
    return end_book(ring, SHMB_OK);
}

/* True if a batch that lacks `missing` items cannot be completed before its oldest item is taken. */
int shmb_check_stuck(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t missing, bool *stuck) {
    struct shmb_book book;
    *stuck = false;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    *stuck = shmb_is_stuck(ring, &book, missing, shmb_boot_ns());
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Registers a client as waiting that chooses items itself and found fewer than `wanted`. The client then looks
 * again, and sleeps until something has happened since the registration. `since` is 0 in the first call, and then
 * that of the last look. */
int shmb_await_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t wanted, uint64_t *since) {
    struct shmb_book book;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    update_version_base(ring, &book, shmb_boot_ns());
    status = shmb_register_waiting(ring, SHMB_FOR_INSERTS, wanted, SHMB_SCARCE);
    shmb_unlock(ring);
    if (*since) shmb_refusal.blocker.progress = (uint32_t)*since;
    *since = ((uint64_t)1 << 32) + shmb_refusal.blocker.progress;
    return status;
}

/* Counts how many of the wanted items could be delivered now. */
int shmb_count_deliverable(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t wanted, uint64_t *available) {
    struct shmb_book book;
    uint64_t next;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    *available = shmb_choose_items(ring, &book, wanted, shmb_boot_ns(), NULL, NULL, &next);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Lists the items that were returned since the previous call; see shmb_find_returned. */
int shmb_list_returned(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t *known, int64_t *slots,
                       int64_t *tickets, uint64_t max_count, uint64_t *count) {
    struct shmb_book book;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    *count = shmb_find_returned(ring, &book, shmb_boot_ns(), known, slots, tickets, max_count);
    shmb_unlock(ring);
    return SHMB_OK;
}

/* The oldest item, if it can be delivered and no write is open. */
int shmb_find_oldest_item(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, struct shmb_oldest_item *oldest,
                        bool *available) {
    struct shmb_book book;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed), floor = shmb_move_floor(ring, &book);
    *available = book.consumer->holds && atomic_load_explicit(&ring->runtime->pending, memory_order_relaxed) == 0 &&
             shmb_is_place_deliverable(ring, &book, floor, shmb_boot_ns());
    if (*available) {
        uint64_t slot = floor % ring->capacity, word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        bool reserved = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed) != 0;
        *oldest = (struct shmb_oldest_item){(int64_t)slot, (int64_t)SHMB_TICKET(word), (int64_t)head, (int64_t)(floor + ring->capacity - head),
                                       !reserved && shmb_blocks_writers(ring, &book, floor)};
    }
    shmb_unlock(ring);
    return SHMB_OK;
}

/* State of each slot's item for a consumer, all read in one locked section. */
int shmb_read_item_states(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, unsigned char *states,
                   int64_t *tickets, uint64_t *notes) {
    struct shmb_book book;
    uint64_t now = shmb_boot_ns(), ticket;
    int status = lock_book(ring, call, consumer_id, &book);
    if (status != SHMB_OK) return status;
    shmb_move_floor(ring, &book);
    for (uint64_t slot = 0; slot < ring->capacity; slot++) { /* the caller's arrays have this length */
        states[slot] = (unsigned char)shmb_read_item_state(ring, &book, slot, now, &ticket, &notes[slot]);
        tickets[slot] = (int64_t)ticket;
    }
    shmb_unlock(ring);
    return SHMB_OK;
}
