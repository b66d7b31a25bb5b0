/* Clients of two consumers, for which writers wait, and of a third one that is created and removed. No two clients may
 * acknowledge the same item, and at the end each item has been delivered. */
#include <string.h>

#include "core/flow.h"
#include "roles.h"

#define STAY 2 /* consumers that exist from the beginning; the next one is created and removed */
#define BATCH 4
#define HANDS 3 /* largest number of batches that a thread holds */

struct taken {
    struct shmb_consumer_id whose;
    uint64_t lease, count;
    int64_t slots[BATCH], tickets[BATCH];
};

static struct shmb_consumer_id consumers[STAY];
static _Atomic unsigned char asked[STAY][MOST_TICKETS], done[STAY][MOST_TICKETS];
static _Thread_local struct taken hands[HANDS];

static uint64_t open_one(struct shmb_ring *ring, uint32_t which, const char *name) {
    struct shmb_call call = a_call();
    unsigned char padded[SHMB_CONSUMER_NAME] = {0};
    uint64_t number = 0;
    memcpy(padded, name, strlen(name));
    const struct shmb_consumer_options wanted = {padded, 1, which < STAY, false, 1000};
    expect(shmb_open_consumer(ring, &call, which, &wanted, &number), "open_consumer");
    return number;
}

void consumers_open(struct shmb_ring *ring) {
    for (uint32_t which = 0; which < STAY; which++)
        consumers[which] = (struct shmb_consumer_id){which, open_one(ring, which, which ? "second" : "first")};
}

static _Atomic unsigned char *of(_Atomic unsigned char (*marks)[MOST_TICKETS], const struct taken *taken, uint64_t i) {
    if ((uint64_t)taken->tickets[i] >= MOST_TICKETS) fail("more tickets than this program counts");
    return &marks[taken->whose.which][taken->tickets[i]];
}

/* Acknowledges each item separately, to know which was accepted. `again` is 1 in the second round. */
static void acknowledge_all(struct shmb_ring *ring, struct taken *taken, uint64_t count) {
    struct shmb_call call = a_call();
    bool mine[BATCH];
    for (int again = 0; again < 1 + (random_below(4) == 0); again++)
        for (uint64_t i = 0; i < count; i++) {
            uint64_t acked = 0;
            atomic_store(of(asked, taken, i), 1);
            expect(shmb_acknowledge_items(ring, &call, taken->whose, &taken->lease, &taken->slots[i], &taken->tickets[i], 1, &acked), "ack");
            if (!again && acked && atomic_exchange(of(done, taken, i), 1))
                fail("ticket %lld is acknowledged by two", (long long)taken->tickets[i]);
            /* The consumer does not know whether an item was acknowledged that has been overwritten since. */
            if (again && acked && !mine[i]) fail("ticket %lld came too late, and comes no more", (long long)taken->tickets[i]);
            if (!again) mine[i] = acked;
            COUNT(acked, !again && acked);
            COUNT(late, !again && !acked);
        }
}

static void deliver_one(struct shmb_ring *ring, struct taken *taken) {
    struct shmb_call call = a_call();
    uint64_t wanted = 1 + random_below(BATCH), ns = random_below(4) ? UINT64_MAX : 1 + random_below(100 * 1000);
    int status = shmb_deliver(ring, &call, taken->whose, wanted, random_below(2) ? wanted : 1, ns, taken->slots, taken->tickets,
                              &taken->lease, &taken->count);
    if (status == SHMB_LIMITED) {
        expect(shmb_stop_waiting(ring, &call, SHMB_FOR_INSERTS), "give_up_waiting");
        taken->count = 0;
        return;
    }
    expect(status, "deliver");
    if (taken->count > wanted) fail("deliver: %llu items", (unsigned long long)taken->count);
    COUNT(delivered, taken->count);
}

/* Claims slots that the thread has seen, in pairs that are delivered together or not at all, or drops them. */
static void choose_some(struct shmb_ring *ring, struct taken *taken) {
    struct shmb_call call = a_call();
    int64_t sizes[BATCH / 2], slot = (int64_t)random_below(ring->capacity);
    unsigned char kept[BATCH / 2];
    uint64_t groups = 0, given = 0;
    for (; groups < BATCH / 2 && (uint64_t)slot + 1 < ring->capacity; slot += 2, groups++) {
        for (uint64_t i = 0; i < 2; i++) {
            taken->slots[2 * groups + i] = slot + (int64_t)i;
            taken->tickets[2 * groups + i] = (int64_t)SHMB_TICKET(atomic_load(&ring->words[slot + (int64_t)i]));
        }
        sizes[groups] = 2;
    }
    taken->count = 0;
    if (random_below(8) == 0) {
        for (uint64_t i = 0; i < 2 * groups; i++) atomic_store(of(asked, taken, i), 1);
        expect(shmb_drop_items(ring, &call, taken->whose, taken->slots, taken->tickets, 2 * groups, &given), "drop");
        return;
    }
    expect(shmb_claim_groups(ring, &call, taken->whose, taken->slots, taken->tickets, sizes, groups, UINT64_MAX, kept, &taken->lease,
                             &given), "claim_groups");
    for (uint64_t group = 0; group < groups; group++)
        for (uint64_t i = 2 * group; kept[group] && i < 2 * group + 2; i++) {
            taken->slots[taken->count] = taken->slots[i];
            taken->tickets[taken->count++] = taken->tickets[i];
        }
    if (taken->count != 2 * given) fail("claim_groups: %llu of %llu", (unsigned long long)taken->count, (unsigned long long)given);
    COUNT(delivered, taken->count);
}

static void let_go(struct shmb_ring *ring, struct taken *taken) {
    struct shmb_call call = a_call();
    if (taken->count) expect(shmb_return_lease(ring, &call, taken->whose, taken->lease), "return_lease");
    taken->count = 0;
}

/* Takes items, or acknowledges all or some of the items that it holds and returns the others. */
void consume_once(struct shmb_ring *ring) {
    struct taken *taken = &hands[random_below(HANDS)];
    if (taken->count == 0) {
        taken->whose = consumers[random_below(STAY)];
        (random_below(4) ? deliver_one : choose_some)(ring, taken);
        return;
    }
    if (random_below(8)) acknowledge_all(ring, taken, random_below(8) ? taken->count : random_below(taken->count));
    let_go(ring, taken);
}

/* Returns all items because the handle of this thread stays open. */
void let_go_of_all(struct shmb_ring *ring) {
    for (int i = 0; i < HANDS; i++) let_go(ring, &hands[i]);
}

/* Creates, uses and removes a consumer for which no writer waits. */
void come_and_go(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    struct taken taken = {.whose = {STAY, 0}};
    pthread_mutex_lock(&world.init_lock);
    taken.whose.number = open_one(ring, STAY, "guest");
    deliver_one(ring, &taken);
    expect(shmb_remove_consumer(ring, &call, taken.whose), "remove_consumer");
    pthread_mutex_unlock(&world.init_lock);
    int status = shmb_return_lease(ring, &call, taken.whose, taken.lease);
    if (status != SHMB_CONSUMER_GONE) fail("return_lease of a consumer that was removed: status %d", status);
}

/* Takes all remaining items after the other threads have ended. None was acknowledged, and none is missing. */
void consume_the_rest(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    for (uint32_t which = 0; which < STAY; which++) {
        struct taken taken = {.whose = consumers[which]};
        for (;;) {
            int status = shmb_deliver(ring, &call, taken.whose, BATCH, 1, UINT64_MAX, taken.slots, taken.tickets, &taken.lease, &taken.count);
            if (status == SHMB_LIMITED) break;
            expect(status, "deliver");
            for (uint64_t i = 0; i < taken.count; i++)
                if (atomic_load(of(done, &taken, i))) fail("ticket %lld is given again", (long long)taken.tickets[i]);
            acknowledge_all(ring, &taken, taken.count);
        }
        expect(shmb_stop_waiting(ring, &call, SHMB_FOR_INSERTS), "give_up_waiting");
        for (uint64_t ticket = 0; ticket < MOST_TICKETS; ticket++)
            if (atomic_load(&world.committed[ticket]) && !atomic_load(&asked[which][ticket]))
                fail("ticket %llu was given to nobody", (unsigned long long)ticket);
        /* The floor moves with acknowledgements, and before a writer is refused. Withdrawn batches do not move it. */
        uint64_t none;
        expect(shmb_drop_items(ring, &call, taken.whose, NULL, NULL, 0, &none), "drop");
        if (atomic_load(&ring->ledger->consumers[which].floor) != atomic_load(&ring->runtime->head)) fail("the floor stays behind");
    }
}
