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

_Thread_local struct shmb_selected_reservation shmb_selected_reservation;

static inline bool has_been_used(const struct shmb_ring *ring) {
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

static bool belongs_to(const struct shmb_ring *ring, const struct shmb_reservation *reservation, const struct shmb_entry *entry) {
    return reservation->entry < SHMB_ENTRIES && &ring->entries[reservation->entry] == entry &&
           reservation->incarnation == atomic_load_explicit(&entry->incarnation, memory_order_relaxed);
}

/* False if the ledger file is too short for reservations, because none was ever made. */
bool shmb_has_reservations(const struct shmb_ring *ring) {
    return ring->ledger && atomic_load_explicit(&ring->ledger->bytes, memory_order_relaxed) >= ring->parts.consumers;
}

/* True if the reservation still belongs to this handle, and no claim uses it. */
bool shmb_owns_reservation(const struct shmb_ring *ring, const struct shmb_reservation *reservation, uint64_t id) {
    return reservation->id == id && shmb_read_reservation_state(reservation) == SHMB_OPEN && reservation->incarnation == ring->incarnation && belongs_to(ring, reservation, ring->me);
}

/* Finds the reservation of the claim that begins, and checks that it is large enough. */
int shmb_check_reservation(struct shmb_ring *ring, uint64_t rows, uint64_t bytes) {
    ring->claim_reservation = NULL;
    if (__builtin_expect(shmb_selected_reservation.ring != ring, 1)) return SHMB_OK;
    struct shmb_reservation *reservation = &ring->reservations[shmb_selected_reservation.place];
    shmb_expire_reservations(ring);
    if (!shmb_has_reservations(ring) || !shmb_owns_reservation(ring, reservation, shmb_selected_reservation.id)) return SHMB_NO_RESERVATION;
    bool of_rows = rows > reservation->rows;
    if (of_rows || (reservation->bytes && bytes > reservation->bytes)) {
        shmb_refusal.why = of_rows ? SHMB_SLOT_IS_TAKEN : SHMB_FULL; /* too few rows, or too few bytes */
        shmb_refusal.bad_at = of_rows ? rows : bytes;
        shmb_refusal.needed = of_rows ? reservation->rows : reservation->bytes;
        return SHMB_OVER_RESERVED;
    }
    ring->claim_reservation = reservation;
    return SHMB_OK;
}

/* True if no item of the claim will be too old at its place. Otherwise `young` tells which items would not be, once
 * the others are removed. One version for all items is compared with the last place, and so are all versions if
 * their number differs from that of the items. */
bool shmb_is_claim_fresh(const struct shmb_ring *ring) {
    uint64_t elements = ring->claim_written, young = 0;
    if (ring->claim_reservation == NULL || shmb_selected_reservation.versions == NULL) return true;
    uint64_t each = elements == shmb_selected_reservation.items * ring->lanes ? ring->lanes : 0;
    for (uint64_t i = 0; i < shmb_selected_reservation.items; i++) {
        uint64_t last = ring->claim_place + (each ? (young + 1) * each : elements) - 1;
        shmb_selected_reservation.young[i] = !shmb_is_too_old(ring, shmb_selected_reservation.versions[i], last);
        young += shmb_selected_reservation.young[i];
    }
    return young == shmb_selected_reservation.items;
}

void shmb_claim_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation) {
    atomic_store_explicit(&reservation->state, SHMB_CLAIMED, memory_order_release);
    CP(reserve_claimed);
    add_reserved(ring->runtime, -reservation->rows, -reservation->bytes);
}

void shmb_reopen_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation) {
    atomic_store_explicit(&reservation->state, SHMB_OPEN, memory_order_release);
    CP(reserve_returned);
    add_reserved(ring->runtime, reservation->rows, reservation->bytes);
}

/* Its items are committed. DONE prevents that another process finds the pieces in the file and commits them again. */
void shmb_spend_reservation(struct shmb_reservation *reservation) {
    atomic_store_explicit(&reservation->state, reservation->flags & SHMB_PARTIAL ? SHMB_DONE : SHMB_UNRESERVED, memory_order_release);
    CP(reserve_spent);
}

/* The same for the claim of a dead client that is rolled forward. */
void shmb_spend_client_reservations(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; has_been_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[i];
        if (shmb_read_reservation_state(reservation) == SHMB_CLAIMED && belongs_to(ring, reservation, entry)) shmb_spend_reservation(reservation);
    }
}

/* `reservation` is an unused record of the table. */
void shmb_open_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation, const struct shmb_request *request) {
    struct shmb_runtime *runtime = ring->runtime;
    reservation->id = request->id;
    CP(reserve_noted);
    reservation->incarnation = ring->incarnation;
    CP(reserve_noted);
    reservation->entry = (uint32_t)(ring->me - ring->entries);
    CP(reserve_noted);
    reservation->rows = request->rows;
    CP(reserve_noted);
    reservation->bytes = request->bytes;
    CP(reserve_noted);
    reservation->expires_ns = request->expires_ns;
    CP(reserve_noted);
    reservation->since_ns = shmb_boot_ns();
    CP(reserve_noted);
    reservation->flags = request->flags;
    CP(reserve_noted);
    atomic_store_explicit(&reservation->state, SHMB_OPEN, memory_order_release);
    CP(reserve_open);
    add_reserved(runtime, reservation->rows, reservation->bytes);
    uint64_t next = atomic_load_explicit(&runtime->next_expiry, memory_order_relaxed);
    if (reservation->expires_ns != UINT64_MAX && (next == 0 || reservation->expires_ns < next))
        atomic_store_explicit(&runtime->next_expiry, reservation->expires_ns, memory_order_relaxed);
    CP(reserve_expiry);
}

void shmb_end_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation) {
    bool counts = shmb_read_reservation_state(reservation) == SHMB_OPEN;
    atomic_store_explicit(&reservation->state, SHMB_UNRESERVED, memory_order_release);
    CP(reserve_ended);
    if (counts) add_reserved(ring->runtime, -reservation->rows, -reservation->bytes);
}

/* Ends all reservations of a client that leaves and has no claim any more. DONE ones stay until their files are
 * removed. */
void shmb_end_reservations(struct shmb_ring *ring, const struct shmb_entry *entry) {
    for (uint32_t i = 0; has_been_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[i];
        bool is_active = shmb_read_reservation_state(reservation) == SHMB_OPEN || shmb_read_reservation_state(reservation) == SHMB_CLAIMED;
        if (is_active && belongs_to(ring, reservation, entry)) shmb_end_reservation(ring, reservation);
    }
}

/* Ends reservations that have expired, before another client has to wait for them. */
void shmb_expire_reservations(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t next = atomic_load_explicit(&runtime->next_expiry, memory_order_relaxed), now;
    if (__builtin_expect(next == 0, 1) || (now = shmb_boot_ns()) < next || !has_been_used(ring)) return;
    next = 0;
    for (uint32_t i = 0; i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[i];
        uint32_t state = shmb_read_reservation_state(reservation);
        if (state == SHMB_OPEN && reservation->expires_ns <= now)
            shmb_end_reservation(ring, reservation);
        else if ((state == SHMB_OPEN || state == SHMB_CLAIMED) && reservation->expires_ns != UINT64_MAX)
            next = next == 0 || reservation->expires_ns < next ? reservation->expires_ns : next;
    }
    atomic_store_explicit(&runtime->next_expiry, next, memory_order_relaxed);
    CP(reserve_expiry);
}

/* True if the holder is alive, and the numbers are possible. */
static bool has_valid_holder(const struct shmb_ring *ring, const struct shmb_reservation *reservation) {
    if (reservation->entry >= SHMB_ENTRIES || reservation->rows > ring->capacity || reservation->bytes > ring->max_bytes) return false;
    const struct shmb_entry *entry = &ring->entries[reservation->entry];
    return belongs_to(ring, reservation, entry) && atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE;
}

static bool is_being_claimed(const struct shmb_ring *ring, const struct shmb_reservation *reservation) {
    return atomic_load_explicit(&ring->entries[reservation->entry].phase, memory_order_relaxed) != SHMB_IDLE;
}

/* Recounts the reservations after the death of an owner of the mutex, whose numbers are not trusted. No claim is in
 * a locked phase any more. */
void shmb_recount_reserved(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t rows = 0, bytes = 0, next = 0;
    for (uint32_t i = 0; has_been_used(ring) && i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[i];
        uint32_t state = shmb_read_reservation_state(reservation);
        if (state == SHMB_UNRESERVED || state == SHMB_DONE) continue;
        bool known = state <= SHMB_DONE && has_valid_holder(ring, reservation), claimed = known && is_being_claimed(ring, reservation);
        if (!known || (state == SHMB_CLAIMED && !claimed))
            atomic_store_explicit(&reservation->state, known ? SHMB_OPEN : SHMB_UNRESERVED, memory_order_release);
        CP(reserve_repaired);
        if (shmb_read_reservation_state(reservation) == SHMB_OPEN) {
            rows += reservation->rows;
            bytes += reservation->bytes;
        }
        if (known && reservation->expires_ns != UINT64_MAX) next = next == 0 || reservation->expires_ns < next ? reservation->expires_ns : next;
    }
    atomic_store_explicit(&runtime->reserved, rows, memory_order_relaxed);
    CP(reserve_counted);
    atomic_store_explicit(&runtime->reserved_bytes, bytes, memory_order_relaxed);
    CP(reserve_counted);
    atomic_store_explicit(&runtime->next_expiry, next, memory_order_relaxed);
    CP(reserve_expiry);
}

/* For a check: number of wrong counts and wrong records. */
uint64_t shmb_count_reservation_faults(const struct shmb_ring *ring) {
    uint64_t rows = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed);
    uint64_t bytes = atomic_load_explicit(&ring->runtime->reserved_bytes, memory_order_relaxed), wrong = 0;
    for (uint32_t i = 0; has_been_used(ring) && i < SHMB_RESERVATIONS; i++) {
        const struct shmb_reservation *reservation = &ring->reservations[i];
        if (shmb_read_reservation_state(reservation) == SHMB_OPEN) rows -= reservation->rows, bytes -= reservation->bytes;
        wrong += shmb_read_reservation_state(reservation) > SHMB_DONE || (shmb_read_reservation_state(reservation) == SHMB_CLAIMED && !has_valid_holder(ring, reservation));
    }
    return wrong + (rows != 0) + (bytes != 0);
}
