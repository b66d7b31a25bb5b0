/* The gate of a handle: its registry entry holds one claim, so one thread at a time is between claim and commit.
 *
 *     free ──enter──▶ in a call ──pause──▶ open ──resume──▶ in a call ──leave──▶ free
 *
 * Open is the split form: Python moves the payload, then commits or aborts, in the same thread. A thread that
 * never did (an exception came in between) is let in again, and so is anybody after the thread has ended: a thread that
 * enters and finds `ring->claimed` rolls that claim back. Private to the process, and never asked in the child of
 * a fork, whose parent may have had a thread inside. */
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/ring.h"

#define SLICE_NS (50 * 1000 * 1000L) /* between two looks at signals, the deadline, and the thread inside */

static pid_t this_thread(void) {
    static _Thread_local struct {
        uint64_t life;
        pid_t number;
    } me; /* a system call costs more than the rest of the gate */
    if (__builtin_expect(me.number == 0 || me.life != shmb_life(), 0)) {
        me.number = (pid_t)syscall(SYS_gettid);
        me.life = shmb_life();
    }
    return me.number;
}

static bool has_ended(pid_t thread) { return syscall(SYS_tgkill, getpid(), thread, 0) < 0 && errno == ESRCH; }

void shmb_gate_init(struct shmb_gate *gate) {
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_condattr_t monotonic; /* pthread_cond_clockwait takes the clock by itself, from glibc 2.30 on */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&gate->freed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* A thread that waits says so before it looks once more, and one that leaves looks at that last: either the first finds nobody
 * inside, or the second wakes it. */
static int wait_to_enter(struct shmb_gate *gate, struct shmb_call *call, pid_t me, int64_t timeout_ns) {
    int64_t deadline = timeout_ns == SHMB_FOR_EVER ? SHMB_FOR_EVER : shmb_now_ns() + timeout_ns;
    int status = SHMB_OK;
    call->may_block(call);
    atomic_fetch_add(&gate->waiting, 1);
    pthread_mutex_lock(&gate->mutex);
    for (pid_t inside = 0; status == SHMB_OK && !atomic_compare_exchange_strong(&gate->thread, &inside, me);) {
        int64_t until = shmb_now_ns() + SLICE_NS;
        struct timespec slice = {until / 1000000000, until % 1000000000};
        bool woken = pthread_cond_timedwait(&gate->freed, &gate->mutex, &slice) == 0;
        if (!woken && has_ended(inside)) continue; /* unless another thread is inside by now, it is let in */
        inside = 0;
        if (woken) continue;
        pthread_mutex_unlock(&gate->mutex);
        if (call->interrupted(call))
            status = SHMB_INTERRUPTED;
        else if (shmb_now_ns() >= deadline)
            status = SHMB_LOCK_TIMEOUT;
        pthread_mutex_lock(&gate->mutex);
    }
    pthread_mutex_unlock(&gate->mutex);
    atomic_fetch_sub(&gate->waiting, 1);
    return status;
}

int shmb_gate_enter(struct shmb_ring *ring, struct shmb_call *call, int64_t timeout_ns) {
    struct shmb_gate *gate = &ring->gate;
    if (shmb_life() != ring->life) return SHMB_FORKED;
    pid_t me = this_thread(), inside = 0;
    if (!atomic_compare_exchange_strong(&gate->thread, &inside, me)) {
        if (inside == me && gate->in_call) return SHMB_REENTERED;
        int status = inside == me ? SHMB_OK : wait_to_enter(gate, call, me, timeout_ns);
        if (status != SHMB_OK) return status;
    }
    atomic_store_explicit(&gate->last, me, memory_order_relaxed);
    gate->in_call = true;
    return SHMB_OK;
}

void shmb_gate_pause(struct shmb_ring *ring) { ring->gate.in_call = false; }

int shmb_gate_resume(struct shmb_ring *ring) {
    struct shmb_gate *gate = &ring->gate;
    if (shmb_life() != ring->life) return SHMB_FORKED;
    if (atomic_load(&gate->thread) != this_thread() || gate->in_call) return SHMB_NO_CLAIM;
    gate->in_call = true;
    return SHMB_OK;
}

void shmb_gate_leave(struct shmb_ring *ring) {
    struct shmb_gate *gate = &ring->gate;
    gate->in_call = false;
    atomic_store(&gate->thread, 0);
    if (__builtin_expect(atomic_load(&gate->waiting) == 0, 1)) return;
    pthread_mutex_lock(&gate->mutex); /* a thread that is about to sleep holds it until it does */
    pthread_cond_signal(&gate->freed);
    pthread_mutex_unlock(&gate->mutex);
}
