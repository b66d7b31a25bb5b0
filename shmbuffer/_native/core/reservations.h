/* The table of reservations, which reserve slots and bytes for later items. Under the mutex. See reservations.c. */
#ifndef SHMB_RESERVATIONS_H
#define SHMB_RESERVATIONS_H

#include "core/ring.h"

/* The reservation that this thread's next claim of a ring uses. The commit of the claim ends it. */
struct shmb_selected_reservation {
    const struct shmb_ring *ring; /* NULL: none */
    uint32_t place;
    uint64_t id;
    const uint64_t *versions; /* one for each item, or one for all; NULL: not given */
    unsigned char *young;     /* after a refused claim: for each item, whether it is not too old */
    uint64_t items;           /* number of versions */
};
extern _Thread_local struct shmb_selected_reservation shmb_selected_reservation;

/* A write, or the reservation for one. */
struct shmb_request {
    uint64_t rows; /* rows at the head of the ring; 0: a write to named slots */
    uint64_t elements, bytes;
    const struct shmb_reservation *reservation; /* the reservation that the write uses, or NULL */
    uint64_t id, expires_ns; /* for a reservation: 0, or the id of the partial that it continues */
    uint32_t flags;          /* enum shmb_reservation_flag */
};

/* Reads a value of enum shmb_reservation_state. */
static inline uint32_t shmb_read_reservation_state(const struct shmb_reservation *reservation) {
    return atomic_load_explicit(&reservation->state, memory_order_relaxed);
}

bool shmb_has_reservations(const struct shmb_ring *ring);
bool shmb_owns_reservation(const struct shmb_ring *ring, const struct shmb_reservation *reservation, uint64_t id);
int shmb_check_reservation(struct shmb_ring *ring, uint64_t rows, uint64_t bytes);
bool shmb_is_claim_fresh(const struct shmb_ring *ring);
void shmb_claim_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation);
void shmb_reopen_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation);
void shmb_spend_reservation(struct shmb_reservation *reservation);
void shmb_spend_client_reservations(struct shmb_ring *ring, const struct shmb_entry *entry);
void shmb_open_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation, const struct shmb_request *request);
void shmb_end_reservation(struct shmb_ring *ring, struct shmb_reservation *reservation);
void shmb_end_reservations(struct shmb_ring *ring, const struct shmb_entry *entry);
void shmb_expire_reservations(struct shmb_ring *ring);
void shmb_recount_reserved(struct shmb_ring *ring);
uint64_t shmb_count_reservation_faults(const struct shmb_ring *ring);

#endif
