/* The calls that reserve slots and bytes for later items. They take the mutex. */
#ifndef SHMB_RESERVE_H
#define SHMB_RESERVE_H

#include "core/reservations.h"

int shmb_reserve(struct shmb_ring *ring, struct shmb_call *call, struct shmb_request request, uint32_t *place, uint64_t *id);
int shmb_cancel_reservation(struct shmb_ring *ring, struct shmb_call *call, uint32_t place, uint64_t id);
int shmb_note_partial(struct shmb_ring *ring, struct shmb_call *call, uint32_t place, uint64_t id);
int shmb_partial_is_done(struct shmb_ring *ring, struct shmb_call *call, uint64_t id, bool forget, bool *done);

#endif
