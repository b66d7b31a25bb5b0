/* Where memory is published without the mutex. Each order has a name, and the name stands at both ends: RELEASE where what
 * came before is published, ACQUIRE where it is looked at. In Python a comment marks an end: "SYNC name, release".
 * docs/design/concurrency.md, "Sync points", says where the ends are and what they order; tests/native/test_sync.py compares. */
#ifndef SHMB_SYNC_H
#define SHMB_SYNC_H

#include <stdatomic.h>

/* Words say WRITING, or EMPTY, before a byte of what was there changes: a reader whose copy has a byte of the new payload
 * sees in its second look that the word changed. */
#define SYNC_SLOT_CLAIM_RELEASE memory_order_release
#define SYNC_SLOT_CLAIM_ACQUIRE memory_order_acquire

/* The payload is there before the word says COMMITTED: a reader that saw it sees the payload. */
#define SYNC_SLOT_COMMIT_RELEASE memory_order_release
#define SYNC_SLOT_COMMIT_ACQUIRE memory_order_acquire

/* What a slot's next observation has moved to is there before the slot says so, and nothing is written over where it was
 * before that: a reader whose copy has a byte of something else sees in its second look that the slot says another place. */
#define SYNC_SLOT_NEXT_RELEASE memory_order_release
#define SYNC_SLOT_NEXT_ACQUIRE memory_order_acquire

/* A limiter is stored before the version that names it, in the block that does not count... */
#define SYNC_LIMITER_SET_RELEASE memory_order_release
#define SYNC_LIMITER_SET_ACQUIRE memory_order_acquire

/* ...and a block is written over only after the version names the other one: a reader whose copy is of two settings sees
 * in its second look that the version changed. */
#define SYNC_LIMITER_REUSE_RELEASE memory_order_release
#define SYNC_LIMITER_REUSE_ACQUIRE memory_order_acquire

/* A copy of the weights is whole before its version is the newest... */
#define SYNC_WEIGHTS_SET_RELEASE memory_order_release
#define SYNC_WEIGHTS_SET_ACQUIRE memory_order_acquire

/* ...and it is written over only after another one is the newest, and its stamp says so: a reader whose copy has a byte of
 * what comes next sees in its second look that the stamp changed. */
#define SYNC_WEIGHTS_REUSE_RELEASE memory_order_release
#define SYNC_WEIGHTS_REUSE_ACQUIRE memory_order_acquire

/* The files have the space of the slots before `allocated` names them: a writer that saw it stores to pages that the disk has
 * room for. Only Python raises it. */
#define SYNC_ALLOCATE_ACQUIRE memory_order_acquire

#endif
