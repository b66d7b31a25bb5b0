/* Consumers of a ring: their entries in the ledger, and the calls of their clients. */
#ifndef SHMB_LEDGER_H
#define SHMB_LEDGER_H

#include "core/ring.h"

static inline bool shmb_is_consumed(const struct shmb_ring *ring) {
    return __builtin_expect(atomic_load_explicit(&ring->runtime->consumers, memory_order_relaxed) != 0, 0);
}

/* ledger.c: deliveries of items, under the mutex */
struct shmb_book { /* the part of the ledger of one consumer */
    struct shmb_consumer *consumer;
    struct shmb_lease *leases;
    struct shmb_delivery *deliveries;
};
enum shmb_item_state { SHMB_NO_ITEM = 0, SHMB_DELIVERABLE = 1, SHMB_LEASED_HERE = 2, SHMB_LEASED_ELSEWHERE = 3, SHMB_COMPLETE = 4 };
bool shmb_consumer_at(const struct shmb_ring *ring, uint32_t which, struct shmb_book *book);
uint64_t shmb_move_floor(struct shmb_ring *ring, const struct shmb_book *book);
uint64_t shmb_count_deliverable_places(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t now_ns);
bool shmb_is_place_deliverable(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t place, uint64_t now_ns);
void shmb_repair_ledger(struct shmb_ring *ring);
void shmb_clear_stale_deliveries(struct shmb_ring *ring);
uint64_t shmb_count_ledger_faults(const struct shmb_ring *ring);
uint64_t shmb_choose_items(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t count, uint64_t now_ns,
                           int64_t *slots, int64_t *tickets, uint64_t *next);
uint64_t shmb_find_returned(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t now_ns, uint64_t *known, int64_t *slots,
                       int64_t *tickets, uint64_t max_count);
struct shmb_lease *shmb_begin_lease(struct shmb_ring *ring, const struct shmb_book *book, const int64_t *tickets, uint64_t count,
                                    uint64_t deadline_ns);
void shmb_free_empty_lease(const struct shmb_book *book, struct shmb_lease *lease);
bool shmb_is_deliverable(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t ticket, uint64_t now_ns,
                       bool *was_delivered);
void shmb_deliver_item(const struct shmb_book *book, uint64_t slot, uint64_t ticket, struct shmb_lease *lease);
void shmb_advance_next(const struct shmb_book *book, uint64_t next);
int shmb_acknowledge(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t ticket, uint64_t id);
void shmb_end_lease(const struct shmb_book *book, uint64_t id);
enum shmb_item_state shmb_read_item_state(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t now_ns,
                                    uint64_t *ticket, uint64_t *note);

/* consume.c: the calls of a consumer's clients; `number` is that of the consumer */
struct shmb_consumer_options {
    const unsigned char *name; /* SHMB_CONSUMER_NAME bytes */
    uint32_t times;
    bool holds, newest;
    uint64_t seed; /* start of the numbers of leases, if none was assigned yet */
};
struct shmb_consumer_id {
    uint32_t which;
    uint64_t number;
};
int shmb_open_consumer(struct shmb_ring *ring, struct shmb_call *call, uint32_t which, const struct shmb_consumer_options *wanted,
                       uint64_t *number);
int shmb_remove_consumer(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id);
int shmb_deliver(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t count, uint64_t least,
                 uint64_t lease_ns, int64_t *slots, int64_t *tickets, uint64_t *lease_id, uint64_t *delivered);
int shmb_claim_groups(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const int64_t *slots,
                      const int64_t *tickets, const int64_t *sizes, uint64_t groups, uint64_t lease_ns, unsigned char *accepted,
                      uint64_t *lease_id, uint64_t *delivered);
int shmb_drop_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const int64_t *slots,
                    const int64_t *tickets, uint64_t count, uint64_t *dropped);
int shmb_acknowledge_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, const uint64_t *leases,
                           const int64_t *slots, const int64_t *tickets, uint64_t count, uint64_t *acked);
int shmb_return_lease(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t lease_id);
int shmb_check_stuck(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t missing, bool *stuck);
int shmb_await_items(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t wanted, uint64_t *since);
int shmb_count_deliverable(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t wanted, uint64_t *available);
int shmb_list_returned(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, uint64_t *known, int64_t *slots,
                       int64_t *tickets, uint64_t max_count, uint64_t *count);
struct shmb_oldest_item { /* the oldest item that the consumer has not completed */
    int64_t slot, ticket;
    int64_t head;
    int64_t max_count;  /* rows that can be written before it is complete */
    int64_t waits; /* 1: a client waits to overwrite it, and there is no reservation */
};
int shmb_find_oldest_item(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, struct shmb_oldest_item *oldest,
                        bool *available);
int shmb_read_item_states(struct shmb_ring *ring, struct shmb_call *call, struct shmb_consumer_id consumer_id, unsigned char *states,
                   int64_t *tickets, uint64_t *notes);

#endif
