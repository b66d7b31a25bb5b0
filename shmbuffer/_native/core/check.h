/* Results of a check of the whole ring. */
#ifndef SHMB_CHECK_H
#define SHMB_CHECK_H

#include "core/ring.h"

/* All counts are zero if the ring is consistent. */
struct shmb_check {
    uint64_t wrong_nodes;  /* they differ from their children */
    /* a mass without an item, or not the mass of the raw priority */
    uint64_t wrong_leaves;
    uint64_t wrong_length; /* |length - number of COMMITTED slots| */
    uint64_t wrong_words;  /* the ticket belongs to another slot, or is not assigned yet */
    uint64_t wrong_extents; /* records that are not between tail and head of the byte ring */
    uint64_t wrong_nexts;   /* next observations that are not where their slots say */
    /* counts of reserved slots or bytes that differ from the reservations; damaged reservations */
    uint64_t wrong_reserved;
    uint64_t wrong_ledger;   /* deliveries that disagree with the leases */
    uint64_t orphans;      /* WRITING slots that no claim covers */
};

int shmb_check(struct shmb_ring *ring, struct shmb_call *call, bool alive, uint64_t slots, struct shmb_check *faults);

#endif
