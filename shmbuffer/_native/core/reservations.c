/* Reservations of slots and bytes for later items. They are records in the ledger, and guarded by the mutex.
 *
 *                          ┌────────claim aborted────────┐
 *                          ▼                             │
 *     UNRESERVED ──reserve──▶ OPEN ──claim──▶ CLAIMED ──commit──▶ UNRESERVED, or DONE if it has pieces in a file
 *         ▲                    │                │                              │
 *         ├──cancelled, expired, or its holder left or died                    │
 *         └──────────────────────────────────the file was removed──────────────┘
 *
 * OPEN reservations are counted in `reserved` and `reserved_bytes` of the runtime page, which other claims respect.
 * A claim that uses a reservation subtracts it in the section in which its own elements become pending, so what it
 * does not need is free from then on. A CLAIMED reservation belongs to the open claim of its holder. If the holder
 * dies, committing its claim spends the reservation, and rolling it back ends the reservation. */
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

/* False if the ledger file is too short for reservations, because none was ever made. */
bool shmb_has_reservations(const struct shmb_ring *ring) {
    return ring->ledger && atomic_load_explicit(&ring->ledger->bytes, memory_order_relaxed) >= ring->parts.consumers;
}

/* True if the reservation still belongs to this handle, and no claim uses it. */
bool shmb_holds(const struct shmb_ring *ring, const struct shmb_reservation *held, uint64_t id) {
    return held->id == id && shmb_read_reservation_state(held) == SHMB_OPEN && held->incarnation == ring->incarnation && is_of(ring, held, ring->me);
}

/* Finds the reservation of the claim that begins, and checks that it is large enough. */
int shmb_check_hold(struct shmb_ring *ring, uint64_t rows, uint64_t bytes) {
    ring->claim_held = NULL;
    if (__builtin_expect(shmb_hold.ring != ring, 1)) return SHMB_OK;
    struct shmb_reservation *held = &ring->reservations[shmb_hold.place];
    shmb_expire(ring);
    if (!shmb_has_reservations(ring) || !shmb_holds(ring, held, shmb_hold.id)) return SHMB_NO_RESERVATION;
    bool of_rows = rows > held->rows;
    if (of_rows || (held->bytes && bytes > held->bytes)) {
        shmb_refusal.why = of_rows ? SHMB_SLOT_IS_TAKEN : SHMB_FULL; /* too few rows, or too few bytes */
        shmb_refusal.bad_at = of_rows ? rows : bytes;
        shmb_refusal.needed = of_rows ? held->rows : held->bytes;
        return SHMB_OVER_RESERVED;
    }
    ring->claim_held = held;
    return SHMB_OK;
}

/* True if no item of the claim will be too old at its place. Otherwise `young` tells which items would not be, once
 * the others are removed. One version for all items is compared with the last place, and so are all versions if
 * their number differs from that of the items. */
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

/* Its items are committed. DONE prevents that another process finds the pieces in the file and commits them again. */
void shmb_spend_credit(struct shmb_reservation *held) {
    atomic_store_explicit(&held->state, held->flags & SHMB_PARTIAL ? SHMB_DONE : SHMB_UNRESERVED, memory_order_release);
    CP(reserve_spent);
}

/* The same for the claim of a dead client that is rolled forward. */
void shmb_spend_for(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        if (shmb_read_reservation_state(held) == SHMB_CLAIMED && is_of(ring, held, entry)) shmb_spend_credit(held);
    }
}

/* `held` is an unused record of the table. */
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

/* Ends all reservations of a client that leaves and has no claim any more. DONE ones stay until their files are
 * removed. */
void shmb_end_reservations(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; was_ever_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *held = &ring->reservations[i];
        bool lives = shmb_read_reservation_state(held) == SHMB_OPEN || shmb_read_reservation_state(held) == SHMB_CLAIMED;
        if (lives && is_of(ring, held, entry)) shmb_end_reservation(ring, held);
    }
}

/* Ends reservations that have expired, before another client has to wait for them. */
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

/* True if the holder is alive, and the numbers are possible. */
static bool is_anybodys(const struct shmb_ring *ring, const struct shmb_reservation *held) {
    if (held->entry >= SHMB_ENTRIES || held->rows > ring->capacity || held->bytes > ring->max_bytes) return false;
    const struct shmb_entry *entry = &ring->entries[held->entry];
    return is_of(ring, held, entry) && atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
}

static bool is_being_claimed(const struct shmb_ring *ring, const struct shmb_reservation *held) {
    return atomic_load_explicit(&ring->entries[held->entry].phase, memory_order_relaxed) != SHMB_IDLE;
}

/* Recounts the reservations after the death of an owner of the mutex, whose numbers are not trusted. No claim is in
 * a locked phase any more. */
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

/* For a check: number of wrong counts and wrong records. */
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
