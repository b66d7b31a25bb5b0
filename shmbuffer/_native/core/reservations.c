/* Room that is reserved for items to come, in the ledger: one record each, under the mutex.
 *
 *                          ┌────────claim aborted────────┐
 *                          ▼                             │
 *     UNRESERVED ──reserve──▶ OPEN ──claim──▶ CLAIMED ──commit──▶ UNRESERVED, or DONE where it has pieces in a file
 *         ▲                    │                │                              │
 *         ├──given back, expired, its holder left or died                      │
 *         └────────────────────────────────────the file is gone────────────────┘
 *
 * What is OPEN counts in `reserved` and `reserved_bytes` of the runtime page, by which others are admitted. A claim that is
 * made from a reservation takes its share of them over, in the section in which its own elements become pending; what it
 * does not need is free from then on. A CLAIMED one belongs to the open claim of its holder: a claim that is finished for
 * the dead spends it, one that is rolled back ends it with its holder. */
#include "core/reservations.h"

_Thread_local struct shmb_hold shmb_hold;

static inline bool was_ever_used(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->runtime->next_reservation, memory_order_relaxed) != 0 && shmb_has_reservations(ring);
}

static void add_reserved(struct shmb_runtime *runtime, uint64_t rows, uint64_t bytes) {
    atomic_store_explicit(&runtime->reserved, atomic_load_explicit(&runtime->reserved, memory_order_relaxed) + rows,
                          memory_order_relaxed);
    CP(reserve_counted);
    atomic_store_explicit(&runtime->reserved_bytes,
                          atomic_load_explicit(&runtime->reserved_bytes, memory_order_relaxed) + bytes, memory_order_relaxed);
    CP(reserve_counted);
}

static bool is_of(const struct shmb_ring *ring, const struct shmb_reservation *held, const struct shmb_entry *entry) {
    return held->entry < SHMB_ENTRIES && &ring->entries[held->entry] == entry &&
           held->incarnation == atomic_load_explicit(&entry->incarnation, memory_order_relaxed);
}

/* Whether the ledger reaches so far yet; behind its end nobody looks. */
bool shmb_has_reservations(const struct shmb_ring *ring) {
    return ring->ledger && atomic_load_explicit(&ring->ledger->bytes, memory_order_relaxed) >= ring->parts.consumers;
}

/* Whether it is this handle's still, and no claim is made from it. */
bool shmb_holds(const struct shmb_ring *ring, const struct shmb_reservation *held, uint64_t id) {
    return held->id == id && shmb_read_reservation_state(held) == SHMB_OPEN && held->incarnation == ring->incarnation && is_of(ring, held, ring->me);
}

/* What the claim that begins is made from; it has to be enough for it. */
int shmb_check_hold(struct shmb_ring *ring, uint64_t rows, uint64_t bytes) {
    ring->claim_held = NULL;
    if (__builtin_expect(shmb_hold.ring != ring, 1)) return SHMB_OK;
    struct shmb_reservation *held = &ring->reservations[shmb_hold.place];
    shmb_expire(ring);
    if (!shmb_has_reservations(ring) || !shmb_holds(ring, held, shmb_hold.id)) return SHMB_NO_RESERVATION;
    bool of_rows = rows > held->rows;
    if (of_rows || (held->bytes && bytes > held->bytes)) {
        shmb_refusal.why = of_rows ? SHMB_SLOT_IS_TAKEN : SHMB_FULL; /* of rows, of bytes */
        shmb_refusal.bad_at = of_rows ? rows : bytes;
        shmb_refusal.needed = of_rows ? held->rows : held->bytes;
        return SHMB_OVER_RESERVED;
    }
    ring->claim_held = held;
    return SHMB_OK;
}

/* Whether no item of the claim will be too old at its turn, as it stands in line now; else `young` says which will not be once
 * the others are left out. One version for all items of a claim is of them as a whole, and so is any of a claim that has
 * more or fewer than were told of: the last place counts. */
bool shmb_are_young(const struct shmb_ring *ring) {
    uint64_t elements = ring->claim_written, young = 0;
    if (ring->claim_held == NULL || shmb_hold.versions == NULL) return true;
    uint64_t each = elements == shmb_hold.items * ring->lanes ? ring->lanes : 0;
    for (uint64_t i = 0; i < shmb_hold.items; i++) {
        uint64_t last = ring->claim_place + (each ? (young + 1) * each : elements) - 1;
        shmb_hold.young[i] = !shmb_is_too_old(ring, shmb_hold.versions[i], last);
        young += shmb_hold.young[i];
    }
    return young == shmb_hold.items;
}

void shmb_claim_credit(struct shmb_ring *ring, struct shmb_reservation *held) {
    atomic_store_explicit(&held->state, SHMB_CLAIMED, memory_order_release);
    CP(reserve_claimed);
    add_reserved(ring->runtime, -held->rows, -held->bytes);
}

void shmb_return_credit(struct shmb_ring *ring, struct shmb_reservation *held) {
    atomic_store_explicit(&held->state, SHMB_OPEN, memory_order_release);
    CP(reserve_returned);
    add_reserved(ring->runtime, held->rows, held->bytes);
}

/* Its items are committed. The pieces that lie in a file are not to be committed once more by a process that finds them. */
void shmb_spend_credit(struct shmb_reservation *held) {
    atomic_store_explicit(&held->state, held->flags & SHMB_PARTIAL ? SHMB_DONE : SHMB_UNRESERVED, memory_order_release);
    CP(reserve_spent);
}

/* The same for the dead owner of a claim that is committed for it. */
void shmb_spend_for(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        if (shmb_read_reservation_state(held) == SHMB_CLAIMED && is_of(ring, held, entry)) shmb_spend_credit(held);
    }
}

/* In a place that is free. */
void shmb_open_reservation(struct shmb_ring *ring, struct shmb_reservation *held, const struct shmb_request *request) {
    struct shmb_runtime *runtime = ring->runtime;
    held->id = request->id;
    CP(reserve_noted);
    held->incarnation = ring->incarnation;
    CP(reserve_noted);
    held->entry = (uint32_t)(ring->me - ring->entries);
    CP(reserve_noted);
    held->rows = request->rows;
    CP(reserve_noted);
    held->bytes = request->bytes;
    CP(reserve_noted);
    held->expires_ns = request->expires_ns;
    CP(reserve_noted);
    held->since_ns = shmb_boot_ns();
    CP(reserve_noted);
    held->flags = request->flags;
    CP(reserve_noted);
    atomic_store_explicit(&held->state, SHMB_OPEN, memory_order_release);
    CP(reserve_open);
    add_reserved(runtime, held->rows, held->bytes);
    uint64_t next = atomic_load_explicit(&runtime->next_expiry, memory_order_relaxed);
    if (held->expires_ns != UINT64_MAX && (next == 0 || held->expires_ns < next))
        atomic_store_explicit(&runtime->next_expiry, held->expires_ns, memory_order_relaxed);
    CP(reserve_expiry);
}

void shmb_end_reservation(struct shmb_ring *ring, struct shmb_reservation *held) {
    bool counts = shmb_read_reservation_state(held) == SHMB_OPEN;
    atomic_store_explicit(&held->state, SHMB_UNRESERVED, memory_order_release);
    CP(reserve_ended);
    if (counts) add_reserved(ring->runtime, -held->rows, -held->bytes);
}

/* All of a client that goes, and has no claim any more. What is DONE stays until its file is gone. */
void shmb_end_reservations(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        bool lives = shmb_read_reservation_state(held) == SHMB_OPEN || shmb_read_reservation_state(held) == SHMB_CLAIMED;
        if (lives && is_of(ring, held, entry)) shmb_end_reservation(ring, held);
    }
}

/* Those whose time is over end now, before somebody waits for what they hold. */
void shmb_expire(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t next = atomic_load_explicit(&runtime->next_expiry, memory_order_relaxed), now;
    if (__builtin_expect(next == 0, 1) || (now = shmb_boot_ns()) < next || !was_ever_used(ring)) return;
    next = 0;
    for (uint32_t i = 0; i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        uint32_t state = shmb_read_reservation_state(held);
        if (state == SHMB_OPEN && held->expires_ns <= now)
            shmb_end_reservation(ring, held);
        else if ((state == SHMB_OPEN || state == SHMB_CLAIMED) && held->expires_ns != UINT64_MAX)
            next = next == 0 || held->expires_ns < next ? held->expires_ns : next;
    }
    atomic_store_explicit(&runtime->next_expiry, next, memory_order_relaxed);
    CP(reserve_expiry);
}

/* Whether its holder is there, and what it holds is its own. */
static bool is_anybodys(const struct shmb_ring *ring, const struct shmb_reservation *held) {
    if (held->entry >= SHMB_ENTRIES || held->rows > ring->capacity || held->bytes > ring->max_bytes) return false;
    const struct shmb_entry *entry = &ring->entries[held->entry];
    return is_of(ring, held, entry) && atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
}

static bool is_being_claimed(const struct shmb_ring *ring, const struct shmb_reservation *held) {
    return atomic_load_explicit(&ring->entries[held->entry].phase, memory_order_relaxed) != SHMB_IDLE;
}

/* What a dead owner of the mutex left is not trusted: the records and the registry say what is reserved. No claim is half
 * finished any more. */
void shmb_count_reserved(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t rows = 0, bytes = 0, next = 0;
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        uint32_t state = shmb_read_reservation_state(held);
        if (state == SHMB_UNRESERVED || state == SHMB_DONE) continue;
        bool known = state <= SHMB_DONE && is_anybodys(ring, held), claimed = known && is_being_claimed(ring, held);
        if (!known || (state == SHMB_CLAIMED && !claimed))
            atomic_store_explicit(&held->state, known ? SHMB_OPEN : SHMB_UNRESERVED, memory_order_release);
        CP(reserve_mended);
        if (shmb_read_reservation_state(held) == SHMB_OPEN) {
            rows += held->rows;
            bytes += held->bytes;
        }
        if (known && held->expires_ns != UINT64_MAX) next = next == 0 || held->expires_ns < next ? held->expires_ns : next;
    }
    atomic_store_explicit(&runtime->reserved, rows, memory_order_relaxed);
    CP(reserve_counted);
    atomic_store_explicit(&runtime->reserved_bytes, bytes, memory_order_relaxed);
    CP(reserve_counted);
    atomic_store_explicit(&runtime->next_expiry, next, memory_order_relaxed);
    CP(reserve_expiry);
}

/* For a check: by how many slots or bytes the runtime page is off. */
uint64_t shmb_wrong_reserved(const struct shmb_ring *ring) {
    uint64_t rows = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed);
    uint64_t bytes = atomic_load_explicit(&ring->runtime->reserved_bytes, memory_order_relaxed), wrong = 0;
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        const struct shmb_reservation *held = &ring->reservations[i];
        if (shmb_read_reservation_state(held) == SHMB_OPEN) rows -= held->rows, bytes -= held->bytes;
        wrong += shmb_read_reservation_state(held) > SHMB_DONE || (shmb_read_reservation_state(held) == SHMB_CLAIMED && !is_anybodys(ring, held));
    }
    return wrong + (rows != 0) + (bytes != 0);
}
