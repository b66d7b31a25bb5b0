/* Orders of memory publications that do not use the mutex. Each order has a name, which appears at both ends:
 * RELEASE after the stores that it publishes, ACQUIRE before the loads that depend on them. In Python a comment
 * marks an end: "SYNC name, release". docs/design/concurrency.md, "Sync points", lists the ends and what they order;
 * tests/native/test_sync.py compares that table with the code. */
#ifndef SHMB_SYNC_H
#define SHMB_SYNC_H

#include <stdatomic.h>

/* Words say WRITING or EMPTY before any byte of the old payload changes. A reader whose copy contains a byte of the
 * new payload sees in its second look that the word changed. */
#define SYNC_SLOT_CLAIM_RELEASE memory_order_release
#define SYNC_SLOT_CLAIM_ACQUIRE memory_order_acquire

/* The payload is stored before the word says COMMITTED. A reader that saw COMMITTED sees the payload. */
#define SYNC_SLOT_COMMIT_RELEASE memory_order_release
#define SYNC_SLOT_COMMIT_ACQUIRE memory_order_acquire

/* The new location of a slot's next observation is filled before the link names it, and the old location is
 * overwritten only after that. A reader whose copy contains other bytes sees in its second look that the link
 * changed. */
#define SYNC_SLOT_NEXT_RELEASE memory_order_release
#define SYNC_SLOT_NEXT_ACQUIRE memory_order_acquire

/* The block of a limiter that is not in force is filled before the version selects it... */
#define SYNC_LIMITER_SET_RELEASE memory_order_release
#define SYNC_LIMITER_SET_ACQUIRE memory_order_acquire

/* ...and a block is overwritten only after the version selects the other one. A reader whose copy mixes two settings
 * sees in its second look that the version changed. */
#define SYNC_LIMITER_REUSE_RELEASE memory_order_release
#define SYNC_LIMITER_REUSE_ACQUIRE memory_order_acquire

/* A copy of the weights is complete before `newest` names its version... */
#define SYNC_WEIGHTS_SET_RELEASE memory_order_release
#define SYNC_WEIGHTS_SET_ACQUIRE memory_order_acquire

/* ...and a copy is overwritten only after the other one is the newest and its own stamp is cleared. A reader whose
 * copy contains bytes of the next version sees in its second look that the stamp changed. */
#define SYNC_WEIGHTS_REUSE_RELEASE memory_order_release
#define SYNC_WEIGHTS_REUSE_ACQUIRE memory_order_acquire

/* The files have space for the slots before `allocated` includes them. A writer that read the number stores only to
 * pages with disk space. Only Python increases it. */
#define SYNC_ALLOCATE_ACQUIRE memory_order_acquire

#endif
