/* A locked section of a ring: the mutex is taken through a handle, and repaired first where its owner died. */
#include <time.h>

#include "core/ring.h"

static int lock(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_mutex_acquire(ring->runtime, ring->mutex_kind, call);
    if (__builtin_expect(status == SHMB_OWNER_DIED, 0)) {
        shmb_repair(ring);
        status = shmb_mutex_mended(ring->runtime);
    }
    return status;
}

/* A process that takes the mutex has an entry in the registry, from before it locks until after it has unlocked: else
 * a process that finds no client alive would replace the mutex while it is in use. See shmb_leave. */
int shmb_lock(struct shmb_ring *ring, struct shmb_call *call) {
    if (__builtin_expect(shmb_life() != ring->life, 0)) return SHMB_FORKED;
    atomic_fetch_add(&ring->inside, 1);
    int status = atomic_load(&ring->left) ? SHMB_LEFT : lock(ring, call);
    CP(mutex_locked);
    if (status != SHMB_OK) atomic_fetch_sub(&ring->inside, 1);
    return status;
}

void shmb_unlock(struct shmb_ring *ring) {
    pthread_mutex_unlock(&ring->runtime->mutex);
    CP(mutex_unlocked);
    atomic_fetch_sub(&ring->inside, 1);
}

/* From here on nobody takes the mutex through this handle; returns whether those who did have let go. One of
 * them may be the caller's own thread, waiting below a signal handler, so it is not waited for without end. */
bool shmb_lock_no_more(struct shmb_ring *ring, struct shmb_call *call) {
    int64_t deadline = shmb_now_ns() + call->timeout_ns;
    atomic_store(&ring->left, 1);
    while (atomic_load(&ring->inside) > 0) {
        struct timespec a_little = {0, 100 * 1000};
        if (shmb_now_ns() >= deadline) return false;
        call->may_block(call);
        nanosleep(&a_little, NULL);
    }
    return true;
}
