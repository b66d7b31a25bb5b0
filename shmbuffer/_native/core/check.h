/* What a check of a whole ring finds. */
#ifndef SHMB_CHECK_H
#define SHMB_CHECK_H

#include "core/ring.h"

/* All zero if the ring is whole. */
struct shmb_check {
    uint64_t wrong_nodes;  /* not what their children say */
    uint64_t wrong_leaves; /* mass without an item, or not the mass of the raw priority */
    uint64_t wrong_length; /* |length - number of COMMITTED slots| */
    uint64_t wrong_words;  /* ticket not of this slot, or from the future */
    uint64_t wrong_extents; /* a record that is not between tail and head of the byte ring */
    uint64_t wrong_nexts;   /* a next observation that is not where its slot says */
    uint64_t wrong_reserved; /* what is reserved is not what the reservations say; damaged ones */
    uint64_t wrong_ledger;   /* what consumers were given is not what the leases say */
    uint64_t orphans;      /* WRITING, and no claim covers it */
};

int shmb_check(struct shmb_ring *ring, struct shmb_call *call, bool alive, uint64_t slots, struct shmb_check *found);

#endif
