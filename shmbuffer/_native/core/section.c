/* A locked section of a ring: takes the mutex through a handle. If the mutex's last owner died, the ring is repaired
 * first. */
#include <time.h>

#include "core/ring.h"

static int lock(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_mutex_acquire(ring->runtime, ring->mutex_kind, call);
    if (__builtin_expect(status == SHMB_OWNER_DIED, 0)) {
        shmb_repair(ring);
        status = shmb_mutex_mark_consistent(ring->runtime);
    }
    return status;
}

/* A process that takes the mutex has a registry entry from before it locks until after it has unlocked. Otherwise a
 * process that finds no live client would replace the mutex while it is in use. See shmb_leave. */
int shmb_lock(struct shmb_ring *ring, struct shmb_call *call) {
    if (__builtin_expect(shmb_process_token() != ring->process_token, 0)) return SHMB_FORKED;
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

/* Prevents this handle from taking the mutex again. Returns true after all of its threads have left. One of them may
 * be the caller's own thread, interrupted by a signal handler, so the wait has a deadline. */
bool shmb_disable_lock(struct shmb_ring *ring, struct shmb_call *call) {
    int64_t deadline = shmb_now_ns() + call->timeout_ns;
    atomic_store(&ring->left, 1);
    while (atomic_load(&ring->inside) > 0) {
        struct timespec pause = {0, 100 * 1000};
        if (shmb_now_ns() >= deadline) return false;
        call->may_block(call);
        nanosleep(&pause, NULL);
    }
    return true;
}
