/* The calls that reserve slots and bytes for later items. A reservation is admitted by the same rules as a write.
 * Its commit waits only for a writer that is filling its slots. The files have space for it before it is admitted,
 * and every other claim leaves that much free. reservations.c describes the table. */
#include "core/reserve.h"

#include "core/flow.h"

/* NULL: the table is full. Each handle starts the search behind its last reservation. */
static struct shmb_reservation *find_free_reservation(struct shmb_ring *ring) {
    for (uint32_t i = 0; i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[(ring->next_place + i) % SHMB_RESERVATIONS];
        if (shmb_read_reservation_state(reservation) == SHMB_UNRESERVED) return reservation;
    }
    return NULL;
}

static struct shmb_reservation *find_reservation(struct shmb_ring *ring, uint64_t id) {
    for (uint32_t i = 0; i < SHMB_RESERVATIONS; i++) {
        struct shmb_reservation *reservation = &ring->reservations[i];
        if (reservation->id == id && shmb_read_reservation_state(reservation) != SHMB_UNRESERVED) return reservation;
    }
    return NULL;
}

static int check_request(struct shmb_ring *ring, struct shmb_request *request) {
    if (atomic_load(&ring->runtime->state) >= (uint32_t)SHMB_CLOSING) return SHMB_CLOSED;
    if (!shmb_is_ours(ring)) return SHMB_FENCED;
    if (request->bytes > ring->max_bytes) {
        shmb_refusal.needed = request->bytes;
        return SHMB_TOO_LARGE;
    }
    /* it is committed, or another process continues it */
    if (request->id && find_reservation(ring, request->id)) return SHMB_NO_RESERVATION;
    uint64_t slot = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed) % ring->capacity;
    if (shmb_is_unallocated(ring, slot + shmb_read_reserved(ring) + request->rows)) return SHMB_UNALLOCATED;
    bool passes = false;
    int status = shmb_is_limited(ring) || shmb_is_consumed(ring) ? shmb_admit_insert(ring, request, &passes) : SHMB_OK;
    if (passes) request->flags |= SHMB_PASSED;
    return status;
}

/* Reserves rows, or continues a partial of a dead client: `request` then has the id of the partial, and
 * SHMB_PARTIAL. */
int shmb_reserve(struct shmb_ring *ring, struct shmb_call *call, struct shmb_request request, uint32_t *place, uint64_t *id) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    shmb_expire_reservations(ring);
    struct shmb_reservation *reservation = shmb_has_reservations(ring) ? find_free_reservation(ring) : NULL;
    status = reservation ? check_request(ring, &request) : SHMB_ALL_RESERVED;
    if (status == SHMB_OK) {
        uint64_t last = atomic_load_explicit(&runtime->next_reservation, memory_order_relaxed);
        if (request.id == 0) request.id = last + 1;
        if (request.id > last) atomic_store_explicit(&runtime->next_reservation, request.id, memory_order_relaxed);
        CP(reserve_numbered);
        shmb_open_reservation(ring, reservation, &request);
        *place = (uint32_t)(reservation - ring->reservations);
        *id = request.id;
        ring->next_place = *place + 1;
    }
    shmb_unlock(ring);
    return status;
}

/* Cancels a reservation. SHMB_NO_RESERVATION: it had ended before. */
int shmb_cancel_reservation(struct shmb_ring *ring, struct shmb_call *call, uint32_t place, uint64_t id) {
    struct shmb_reservation *reservation = &ring->reservations[place];
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    bool ours = shmb_has_reservations(ring) && shmb_owns_reservation(ring, reservation, id);
    if (ours) shmb_end_reservation(ring, reservation);
    shmb_unlock(ring);
    if (ours) shmb_wake_waiters(ring->runtime);
    return ours ? SHMB_OK : SHMB_NO_RESERVATION;
}

/* Records that the reservation has pieces in a file. */
int shmb_note_partial(struct shmb_ring *ring, struct shmb_call *call, uint32_t place, uint64_t id) {
    struct shmb_reservation *reservation = &ring->reservations[place];
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    shmb_expire_reservations(ring);
    bool ours = shmb_has_reservations(ring) && shmb_owns_reservation(ring, reservation, id);
    if (ours) reservation->flags |= SHMB_PARTIAL;
    CP(reserve_partial);
    shmb_unlock(ring);
    return ours ? SHMB_OK : SHMB_NO_RESERVATION;
}

/* True if the partial of that id is committed. `forget`: its file was removed. */
int shmb_partial_is_done(struct shmb_ring *ring, struct shmb_call *call, uint64_t id, bool forget, bool *done) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    struct shmb_reservation *reservation = shmb_has_reservations(ring) ? find_reservation(ring, id) : NULL;
    *done = reservation && shmb_read_reservation_state(reservation) == SHMB_DONE;
    if (*done && forget) atomic_store_explicit(&reservation->state, SHMB_UNRESERVED, memory_order_release);
    CP(reserve_forgotten);
    shmb_unlock(ring);
    return SHMB_OK;
}
