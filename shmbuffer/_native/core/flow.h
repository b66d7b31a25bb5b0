/* Flow control: whether a claim or a draw may begin, and when the items of a consumer make writers wait. See flow.c. */
#ifndef SHMB_FLOW_H
#define SHMB_FLOW_H

#include "core/ledger.h"
#include "core/reservations.h"

/* Whether the ratio counts this thread's calls. SHMB_PASSES: the thread is loading a buffer. */
extern _Thread_local enum shmb_bypass { SHMB_COUNTS, SHMB_PASSES_ONCE, SHMB_PASSES } shmb_bypass;

/* Under the mutex. */
int shmb_admit_insert(struct shmb_ring *ring, const struct shmb_request *request, bool *passes);
int shmb_register_waiting(struct shmb_ring *ring, enum shmb_side side, uint64_t wanted, enum shmb_reason why);
void shmb_restart_version_count(struct shmb_ring *ring, uint64_t left);
bool shmb_is_stuck(struct shmb_ring *ring, const struct shmb_book *book, uint64_t missing, uint64_t now_ns);
bool shmb_blocks_writers(struct shmb_ring *ring, const struct shmb_book *book, uint64_t place);

/* The functions below take the mutex. */
int shmb_admit_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t min_size, bool chosen,
                      uint64_t *counted);
int shmb_cancel_draw(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint32_t version);
int shmb_dequeue(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, int64_t *index, int64_t *tickets);
int shmb_release(struct shmb_ring *ring, struct shmb_call *call);
int shmb_find_queue_reason(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_entry *entry, uint32_t side,
                        enum shmb_reason *why);
int shmb_limit(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_limiter *wanted, const struct shmb_ages *ages);
int shmb_stop_waiting(struct shmb_ring *ring, struct shmb_call *call, uint32_t sides);

#endif
