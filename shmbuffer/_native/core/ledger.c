/* The consumers' part of the ledger: which items were delivered, and which were acknowledged. All functions hold the
 * mutex.
 *
 *     in its place ──delivered──▶ under a lease ──acknowledged──▶ complete (after `times` acknowledgements)
 *                                    └── its holder died, or the lease expired ──▶ delivered again to the next client
 *
 * The place of an item is its ticket. Items from `next` on were never delivered. All items below `floor` are
 * complete or gone.
 *
 * Always true
 *   1. An item is under at most one lease, which its delivery names. So two holders can never both acknowledge it.
 *   2. A delivery whose ticket differs from that of the slot's item is ignored, so overwriting an item clears its delivery.
 *   3. Below `next` each item is complete, gone or under a lease.
 * If a process dies here: a lease is stored before the first item is under it, so other clients get its items. The
 * repair counts the items of each lease again. */
#include <string.h>

#include "core/ledger.h"

/* up to so many places are examined one by one; beyond that the slots are scanned */
#define MAX_PLACES (2 * ring->capacity)

/* False if there is no such consumer, or if the ledger file is not large enough for it. */
bool shmb_consumer_at(const struct shmb_ring *ring, uint32_t which, struct shmb_book *book) {
    if (ring->ledger == NULL || which >= SHMB_CONSUMERS) return false;
    struct shmb_consumer *consumer = &ring->ledger->consumers[which];
    uint64_t from = ring->parts.consumers + which * ring->parts.each;
    if (atomic_load_explicit(&consumer->state, memory_order_relaxed) != SHMB_CONSUMER_OPEN || consumer->times == 0 ||
        consumer->times > SHMB_MAX_ACKS || atomic_load(&ring->ledger->bytes) < from + ring->parts.each)
        return false;
    unsigned char *base = (unsigned char *)ring->ledger + from;
    *book = (struct shmb_book){consumer, (struct shmb_lease *)base, (struct shmb_delivery *)(base + ring->parts.deliveries)};
    return true;
}

static inline uint64_t place_in(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t ticket) {
    return shmb_place_since(ticket, book->consumer->since, ring->capacity);
}

static inline uint64_t read_word(const struct shmb_ring *ring, uint64_t slot) {
    return atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
}

static inline uint64_t read_head(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
}

/* State of a place. */
enum place_state { GONE, BEING_WRITTEN, ITEM };

static inline enum place_state classify_place(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t place, uint64_t word) {
    if (place_in(ring, book, SHMB_TICKET(word)) != place) return GONE;
    if (SHMB_STATE(word) == SHMB_COMMITTED) return ITEM;
    return shmb_claim_covers(ring, word, NULL) ? BEING_WRITTEN : GONE;
}

/* The first place from `place` on that can hold an item. If `place` is laps behind, it is that of the oldest item. */
static uint64_t find_oldest_place(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t place) {
    uint64_t head = read_head(ring), oldest = head;
    if (place >= head || head - place <= MAX_PLACES) return place;
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
        uint64_t word = read_word(ring, slot), item_place = place_in(ring, book, SHMB_TICKET(word));
        if (SHMB_STATE(word) != SHMB_EMPTY && item_place >= place && item_place < oldest) oldest = item_place;
    }
    return oldest;
}

static inline bool is_recorded(const struct shmb_book *book, uint64_t slot, uint64_t ticket) {
    return atomic_load_explicit(&book->deliveries[slot].ticket, memory_order_relaxed) == ticket + 1;
}

static inline uint64_t read_delivery(const struct shmb_book *book, uint64_t slot, uint64_t ticket) {
    return is_recorded(book, slot, ticket) ? atomic_load_explicit(&book->deliveries[slot].bits, memory_order_relaxed) : 0;
}

static inline bool is_done(const struct shmb_book *book, uint64_t bits) {
    return !(bits & SHMB_LEASED_BIT) && SHMB_ACKS_OF(bits) >= book->consumer->times;
}

static inline struct shmb_lease *lease_at(const struct shmb_book *book, uint64_t id) {
    struct shmb_lease *lease = &book->leases[id % SHMB_LEASES];
    return id && atomic_load_explicit(&lease->id, memory_order_relaxed) == id ? lease : NULL;
}

/* True if its holder is gone, or if it has expired. */
static bool lease_has_ended(const struct shmb_ring *ring, const struct shmb_lease *lease, uint64_t now_ns) {
    if (lease->entry >= SHMB_ENTRIES || lease->deadline_ns < now_ns) return true;
    const struct shmb_entry *entry = &ring->entries[lease->entry];
    return atomic_load_explicit(&entry->state, memory_order_relaxed) != SHMB_LIVE ||
           atomic_load_explicit(&entry->incarnation, memory_order_relaxed) != lease->incarnation;
}

/* True if another client has the item, and may still acknowledge it. */
static bool is_leased_to_another(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t bits, uint64_t now_ns) {
    if (!(bits & SHMB_LEASED_BIT)) return false;
    const struct shmb_lease *lease = lease_at(book, SHMB_LEASE_OF(bits));
    return lease && !lease_has_ended(ring, lease, now_ns);
}

static void store_next(const struct shmb_book *book, uint64_t place) {
    atomic_store_explicit(&book->consumer->next, place, memory_order_relaxed);
    CP(consume_next);
}

/* Advances the floor past items that are complete or gone. */
uint64_t shmb_move_floor(struct shmb_ring *ring, const struct shmb_book *book) {
    struct shmb_consumer *consumer = book->consumer;
    uint64_t first = atomic_load_explicit(&consumer->floor, memory_order_relaxed), end = read_head(ring);
    uint64_t floor = find_oldest_place(ring, book, first), slot = floor % ring->capacity;
    for (; floor < end; floor++) {
        uint64_t word = read_word(ring, slot);
        enum place_state state = classify_place(ring, book, floor, word);
        if (state == BEING_WRITTEN) break;
        if (state == ITEM && !is_done(book, read_delivery(book, slot, SHMB_TICKET(word)))) break;
        slot = slot + 1 < ring->capacity ? slot + 1 : 0;
    }
    if (floor != first) atomic_store_explicit(&consumer->floor, floor, memory_order_relaxed);
    CP(consume_floor);
    if (atomic_load_explicit(&consumer->next, memory_order_relaxed) < floor) store_next(book, floor);
    return floor;
}

/* True if the place has an incomplete item, and no client holds it that may still acknowledge it. */
bool shmb_is_place_deliverable(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t place, uint64_t now_ns) {
    uint64_t slot = place % ring->capacity, word = read_word(ring, slot);
    if (place >= read_head(ring) || classify_place(ring, book, place, word) != ITEM) return false;
    uint64_t bits = read_delivery(book, slot, SHMB_TICKET(word));
    return !is_done(book, bits) && !is_leased_to_another(ring, book, bits, now_ns);
}

/* Number of items that can be delivered. */
uint64_t shmb_count_deliverable_places(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t now_ns) {
    uint64_t left = 0, floor = atomic_load_explicit(&book->consumer->floor, memory_order_relaxed), head = read_head(ring);
    for (uint64_t place = find_oldest_place(ring, book, floor); place < head; place++) left += shmb_is_place_deliverable(ring, book, place, now_ns);
    return left;
}

static void free_lease(const struct shmb_book *book, struct shmb_lease *lease) {
    atomic_store_explicit(&lease->id, 0, memory_order_relaxed);
    CP(consume_freed);
    atomic_fetch_sub_explicit(&book->consumer->open_leases, 1, memory_order_relaxed);
    CP(consume_freed);
}

/* Removes one item from a lease. */
static void release_item(const struct shmb_book *book, uint64_t id) {
    struct shmb_lease *lease = lease_at(book, id);
    if (lease == NULL) return;
    if (lease->left) lease->left--;
    CP(consume_left);
    if (lease->left == 0) free_lease(book, lease);
}

/* Recounts the items of each lease and their range of places. Items whose lease does not exist can be delivered
 * again. The counts of a dead owner of the mutex are not trusted, and items that were emptied or overwritten are
 * under no lease any more. */
static void recount_leases(struct shmb_ring *ring, const struct shmb_book *book) {
    struct shmb_consumer *consumer = book->consumer;
    uint64_t open = 0;
    for (uint32_t i = 0; i < SHMB_LEASES; i++) {
        struct shmb_lease *lease = &book->leases[i];
        bool cannot_be = lease->entry >= SHMB_ENTRIES || atomic_load_explicit(&lease->id, memory_order_relaxed) % SHMB_LEASES != i;
        if (cannot_be) atomic_store_explicit(&lease->id, 0, memory_order_relaxed);
        CP(consume_repaired);
        lease->left = 0;
        CP(consume_repaired);
    }
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
        struct shmb_delivery *delivery = &book->deliveries[slot];
        uint64_t word = read_word(ring, slot), bits = read_delivery(book, slot, SHMB_TICKET(word));
        if (SHMB_STATE(word) != SHMB_COMMITTED || !(bits & SHMB_LEASED_BIT)) continue;
        struct shmb_lease *lease = lease_at(book, SHMB_LEASE_OF(bits));
        uint64_t place = place_in(ring, book, SHMB_TICKET(word));
        if (lease) {
            bool first = lease->left++ == 0;
            CP(consume_repaired);
            if (first || place < lease->first) lease->first = place;
            CP(consume_repaired);
            if (first || place >= lease->end) lease->end = place + 1;
            CP(consume_repaired);
            continue;
        }
        if (place < atomic_load_explicit(&consumer->next, memory_order_relaxed)) store_next(book, place);
        atomic_store_explicit(&delivery->bits, SHMB_ACKS_OF(bits) << SHMB_LEASE_BITS, memory_order_relaxed);
        CP(consume_repaired);
    }
    for (uint32_t i = 0; i < SHMB_LEASES; i++) {
        struct shmb_lease *lease = &book->leases[i];
        bool retained = lease->left > 0;
        if (!retained) atomic_store_explicit(&lease->id, 0, memory_order_relaxed);
        CP(consume_repaired);
        open += retained;
    }
    atomic_store_explicit(&consumer->open_leases, open, memory_order_relaxed);
    CP(consume_repaired);
}

/* After the death of an owner of the mutex, and after the buffer was emptied. */
void shmb_repair_ledger(struct shmb_ring *ring) {
    uint32_t open = 0;
    uint64_t head = read_head(ring);
    if (ring->ledger == NULL) return;
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++) {
        struct shmb_book book;
        if (!shmb_consumer_at(ring, which, &book)) continue;
        open++;
        if (book.consumer->since > head) book.consumer->since = head;
        CP(consume_repaired);
        recount_leases(ring, &book);
        if (atomic_load_explicit(&book.consumer->next, memory_order_relaxed) > head) store_next(&book, head);
        if (atomic_load_explicit(&book.consumer->floor, memory_order_relaxed) > head)
            atomic_store_explicit(&book.consumer->floor, head, memory_order_relaxed);
        CP(consume_floor);
        shmb_move_floor(ring, &book);
    }
    atomic_store_explicit(&ring->runtime->consumers, open, memory_order_relaxed);
    CP(consume_counted);
}

/* Clears deliveries without an item. Recovery needs this, because the tickets may be assigned again. */
void shmb_clear_stale_deliveries(struct shmb_ring *ring) {
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++) {
        struct shmb_book book;
        if (!shmb_consumer_at(ring, which, &book)) continue;
        for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
            uint64_t word = read_word(ring, slot);
            bool has_item = SHMB_STATE(word) == SHMB_COMMITTED && is_recorded(&book, slot, SHMB_TICKET(word));
            if (!has_item) atomic_store_explicit(&book.deliveries[slot].ticket, 0, memory_order_relaxed);
            CP(consume_repaired);
        }
    }
    shmb_repair_ledger(ring);
}

/* The next ended lease, in the order of first place and index. */
static const struct shmb_lease *find_next_ended_lease(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t now_ns,
                                           const struct shmb_lease *previous) {
    uint64_t open = atomic_load_explicit(&book->consumer->open_leases, memory_order_relaxed);
    const struct shmb_lease *next = NULL;
    for (uint32_t i = 0; open && i < SHMB_LEASES; i++) {
        const struct shmb_lease *lease = &book->leases[i];
        uint64_t id = atomic_load_explicit(&lease->id, memory_order_relaxed);
        if (id == 0) continue;
        open--;
        if (!lease_has_ended(ring, lease, now_ns)) continue;
        if (previous && (lease->first < previous->first || (lease->first == previous->first && lease <= previous))) continue;
        if (next == NULL || lease->first < next->first) next = lease;
    }
    return next;
}

static uint64_t choose_returned(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t count, uint64_t now_ns,
                                int64_t *slots, int64_t *tickets) {
    uint64_t chosen = 0, floor = atomic_load_explicit(&book->consumer->floor, memory_order_relaxed), head = read_head(ring);
    for (const struct shmb_lease *lease = find_next_ended_lease(ring, book, now_ns, NULL); lease && chosen < count;
         lease = find_next_ended_lease(ring, book, now_ns, lease)) {
        uint64_t id = atomic_load_explicit(&lease->id, memory_order_relaxed), end = lease->end < head ? lease->end : head;
        for (uint64_t place = lease->first > floor ? lease->first : floor; chosen < count && place < end; place++) {
            uint64_t slot = place % ring->capacity, word = read_word(ring, slot);
            if (classify_place(ring, book, place, word) != ITEM) continue;
            uint64_t bits = read_delivery(book, slot, SHMB_TICKET(word));
            if (!(bits & SHMB_LEASED_BIT) || SHMB_LEASE_OF(bits) != id) continue;
            if (slots) slots[chosen] = (int64_t)slot;
            if (slots) tickets[chosen] = (int64_t)SHMB_TICKET(word);
            chosen++;
        }
    }
    return chosen;
}

/* Lists the items of ended leases, except of leases whose number is already in `known`. The numbers of the listed
 * leases are added to `known`. With max_count 0 it returns an upper limit of the number of items. */
uint64_t shmb_find_returned(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t now_ns, uint64_t *known, int64_t *slots,
                       int64_t *tickets, uint64_t max_count) {
    uint64_t count = 0, open = atomic_load_explicit(&book->consumer->open_leases, memory_order_relaxed), head = read_head(ring);
    uint64_t floor = atomic_load_explicit(&book->consumer->floor, memory_order_relaxed);
    for (uint32_t i = 0; open && i < SHMB_LEASES; i++) {
        const struct shmb_lease *lease = &book->leases[i];
        uint64_t id = atomic_load_explicit(&lease->id, memory_order_relaxed);
        if (id == 0) continue;
        open--;
        if (known[i] == id || !lease_has_ended(ring, lease, now_ns)) continue;
        if (max_count == 0) {
            count += lease->left;
            continue;
        }
        uint64_t left = lease->left, end = lease->end < head ? lease->end : head;
        if (left > max_count - count) continue; /* left for the next call */
        for (uint64_t place = lease->first > floor ? lease->first : floor; left && place < end; place++) {
            uint64_t slot = place % ring->capacity, word = read_word(ring, slot);
            if (classify_place(ring, book, place, word) != ITEM) continue;
            uint64_t bits = read_delivery(book, slot, SHMB_TICKET(word));
            if (!(bits & SHMB_LEASED_BIT) || SHMB_LEASE_OF(bits) != id) continue;
            slots[count] = (int64_t)slot;
            tickets[count++] = (int64_t)SHMB_TICKET(word);
            left--;
        }
        known[i] = id;
    }
    return count;
}

/* Chooses the items of ended leases, oldest first, and then items that were never delivered, in the order of their
 * places. Nothing changes. If `slots` is NULL, the items are only counted. `*next` is the value of `next` after the
 * chosen items are delivered. */
uint64_t shmb_choose_items(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t count, uint64_t now_ns, int64_t *slots,
                           int64_t *tickets, uint64_t *next) {
    uint64_t chosen = choose_returned(ring, book, count, now_ns, slots, tickets), head = read_head(ring);
    uint64_t place = find_oldest_place(ring, book, atomic_load_explicit(&book->consumer->next, memory_order_relaxed));
    for (uint64_t slot = place % ring->capacity; chosen < count && place < head; place++) {
        uint64_t word = read_word(ring, slot);
        enum place_state state = classify_place(ring, book, place, word);
        if (state == BEING_WRITTEN) break;
        uint64_t bits = state == ITEM ? read_delivery(book, slot, SHMB_TICKET(word)) : 0;
        if (state == ITEM && !(bits & SHMB_LEASED_BIT) && !is_done(book, bits)) {
            if (slots) slots[chosen] = (int64_t)slot;
            if (slots) tickets[chosen] = (int64_t)SHMB_TICKET(word);
            chosen++;
        }
        slot = slot + 1 < ring->capacity ? slot + 1 : 0;
    }
    *next = place;
    return chosen;
}

static struct shmb_lease *find_unused_lease(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t *id) {
    *id = atomic_load_explicit(&ring->ledger->next_lease, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_LEASES; i++, ++*id) {
        struct shmb_lease *lease = &book->leases[*id % SHMB_LEASES];
        if (*id && atomic_load_explicit(&lease->id, memory_order_relaxed) == 0) return lease;
    }
    return NULL;
}

/* Stores a lease of ours with no items yet; NULL: all leases are in use. */
struct shmb_lease *shmb_begin_lease(struct shmb_ring *ring, const struct shmb_book *book, const int64_t *tickets, uint64_t count,
                                    uint64_t deadline_ns) {
    uint64_t id = 0, first = UINT64_MAX, end = 0;
    struct shmb_lease *lease = find_unused_lease(ring, book, &id);
    if (lease == NULL) {
        recount_leases(ring, book);
        lease = find_unused_lease(ring, book, &id);
    }
    if (lease == NULL || id >> SHMB_LEASE_BITS) return NULL;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t place = place_in(ring, book, (uint64_t)tickets[i]);
        if (place < first) first = place;
        if (place >= end) end = place + 1;
    }
    atomic_store_explicit(&ring->ledger->next_lease, id + 1, memory_order_relaxed);
    CP(consume_numbered);
    lease->entry = (uint32_t)(ring->me - ring->entries);
    CP(consume_noted);
    lease->incarnation = ring->incarnation;
    CP(consume_noted);
    lease->deadline_ns = deadline_ns;
    CP(consume_noted);
    lease->first = first;
    CP(consume_noted);
    lease->end = end;
    CP(consume_noted);
    lease->left = 0;
    CP(consume_noted);
    lease->taken_ns = shmb_boot_ns();
    CP(consume_noted);
    atomic_store_explicit(&lease->id, id, memory_order_relaxed);
    CP(consume_lent);
    atomic_fetch_add_explicit(&book->consumer->open_leases, 1, memory_order_relaxed);
    CP(consume_lent);
    return lease;
}

/* Frees a lease that got no items. */
void shmb_free_empty_lease(const struct shmb_book *book, struct shmb_lease *lease) {
    if (lease->left == 0) free_lease(book, lease);
}

/* True if the item may be delivered to us. `was_delivered`: it was delivered before. */
bool shmb_is_deliverable(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t ticket, uint64_t now_ns,
                       bool *was_delivered) {
    uint64_t bits = read_delivery(book, slot, ticket);
    *was_delivered = (bits & SHMB_LEASED_BIT) != 0;
    if (place_in(ring, book, ticket) < atomic_load_explicit(&book->consumer->floor, memory_order_relaxed)) return false;
    return read_word(ring, slot) == SHMB_WORD(ticket, SHMB_COMMITTED) && !is_done(book, bits) && !is_leased_to_another(ring, book, bits, now_ns);
}

/* Puts a deliverable item under a lease; if `lease` is NULL, completes it. */
void shmb_deliver_item(const struct shmb_book *book, uint64_t slot, uint64_t ticket, struct shmb_lease *lease) {
    struct shmb_delivery *delivery = &book->deliveries[slot];
    uint64_t before = read_delivery(book, slot, ticket), retained = before & ~SHMB_LEASED_BIT & ~SHMB_LEASE_OF(~(uint64_t)0);
    uint64_t after = lease ? SHMB_LEASED_BIT | retained | atomic_load_explicit(&lease->id, memory_order_relaxed)
                           : (uint64_t)book->consumer->times << SHMB_LEASE_BITS;
    atomic_store_explicit(&delivery->bits, after, memory_order_relaxed);
    CP(consume_given);
    if (!is_recorded(book, slot, ticket)) atomic_store_explicit(&delivery->ticket, ticket + 1, memory_order_relaxed);
    CP(consume_ticket);
    if (lease) lease->left++;
    CP(consume_left);
    if (before & SHMB_LEASED_BIT) release_item(book, SHMB_LEASE_OF(before));
}

void shmb_advance_next(const struct shmb_book *book, uint64_t next) {
    if (atomic_load_explicit(&book->consumer->next, memory_order_relaxed) < next) store_next(book, next);
}

/* Returns 1 if the item is now acknowledged, 0 if it was before under that lease, -1 if it is not under that lease
 * any more. */
int shmb_acknowledge(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t ticket, uint64_t id) {
    struct shmb_delivery *delivery = &book->deliveries[slot];
    uint64_t bits = read_delivery(book, slot, ticket);
    bool state = read_word(ring, slot) == SHMB_WORD(ticket, SHMB_COMMITTED);
    if (id == 0 || SHMB_LEASE_OF(bits) != id || !(state || !(bits & SHMB_LEASED_BIT))) return -1;
    if (!(bits & SHMB_LEASED_BIT)) return 0;
    uint64_t after = (bits & ~SHMB_LEASED_BIT) + ((uint64_t)1 << SHMB_LEASE_BITS);
    atomic_store_explicit(&delivery->bits, after, memory_order_relaxed);
    CP(consume_acked);
    release_item(book, id);
    uint64_t place = place_in(ring, book, ticket);
    if (!is_done(book, after) && place < atomic_load_explicit(&book->consumer->next, memory_order_relaxed)) store_next(book, place);
    return 1;
}

/* Ends a lease, so that its items can be delivered to others at once. */
void shmb_end_lease(const struct shmb_book *book, uint64_t id) {
    struct shmb_lease *lease = lease_at(book, id);
    if (lease) lease->deadline_ns = 0;
    CP(consume_ended);
}

/* State of a slot's item for a consumer and for the client of this handle, which holds nothing under a lease that it
 * returned. `*note` is its lease and the number of acknowledgements. */
enum shmb_item_state shmb_read_item_state(const struct shmb_ring *ring, const struct shmb_book *book, uint64_t slot, uint64_t now_ns,
                                    uint64_t *ticket, uint64_t *note) {
    uint64_t word = read_word(ring, slot), bits = read_delivery(book, slot, SHMB_TICKET(word));
    uint64_t floor = atomic_load_explicit(&book->consumer->floor, memory_order_relaxed);
    *ticket = SHMB_TICKET(word);
    *note = bits & ~SHMB_LEASED_BIT;
    if (SHMB_STATE(word) != SHMB_COMMITTED) return SHMB_NO_ITEM;
    if (bits & SHMB_LEASED_BIT) {
        const struct shmb_lease *lease = lease_at(book, SHMB_LEASE_OF(bits));
        bool ours = lease && lease->deadline_ns && &ring->entries[lease->entry % SHMB_ENTRIES] == ring->me && lease->incarnation == ring->incarnation;
        return ours ? SHMB_LEASED_HERE : is_leased_to_another(ring, book, bits, now_ns) ? SHMB_LEASED_ELSEWHERE : SHMB_DELIVERABLE;
    }
    return is_done(book, bits) || place_in(ring, book, SHMB_TICKET(word)) < floor ? SHMB_COMPLETE : SHMB_DELIVERABLE;
}

/* Number of faults of one consumer: leases with fewer items than are under them, and items under a lease that does
 * not exist. */
static uint64_t count_lease_faults(const struct shmb_ring *ring, const struct shmb_book *book) {
    uint64_t left[SHMB_LEASES] = {0}, wrong = 0, open = 0;
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
        uint64_t word = read_word(ring, slot), bits = read_delivery(book, slot, SHMB_TICKET(word));
        if (SHMB_STATE(word) != SHMB_COMMITTED || !(bits & SHMB_LEASED_BIT)) continue;
        left[SHMB_LEASE_OF(bits) % SHMB_LEASES]++;
        wrong += lease_at(book, SHMB_LEASE_OF(bits)) == NULL;
    }
    for (uint32_t i = 0; i < SHMB_LEASES; i++) {
        uint64_t id = atomic_load_explicit(&book->leases[i].id, memory_order_relaxed);
        open += id != 0;
        wrong += id != 0 && (id % SHMB_LEASES != i || book->leases[i].left < left[i]);
    }
    return wrong + (open != atomic_load_explicit(&book->consumer->open_leases, memory_order_relaxed));
}

/* Number of faults in the ledger. A lease may count more items than it has, because items may be gone. */
uint64_t shmb_count_ledger_faults(const struct shmb_ring *ring) {
    uint64_t wrong = 0, head = read_head(ring);
    uint32_t open = 0;
    for (uint32_t which = 0; which < SHMB_CONSUMERS; which++) {
        struct shmb_book book;
        if (!shmb_consumer_at(ring, which, &book)) continue;
        open++;
        uint64_t next = atomic_load_explicit(&book.consumer->next, memory_order_relaxed);
        uint64_t floor = atomic_load_explicit(&book.consumer->floor, memory_order_relaxed);
        wrong += (floor > next || next > head || book.consumer->since > head) + count_lease_faults(ring, &book);
    }
    return wrong + (open != atomic_load_explicit(&ring->runtime->consumers, memory_order_relaxed));
}
