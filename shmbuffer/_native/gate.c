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

#include "ring.h"

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

int shmb_gate_enter(struct shmb_ring *ring, struct shmb_call *call, int64_t timeout_ns) {
    struct shmb_gate *gate = &ring->gate;
    int64_t deadline = 0;
    int status = SHMB_OK;
    if (shmb_life() != ring->life) return SHMB_FORKED;
    pid_t me = this_thread();
    pthread_mutex_lock(&gate->mutex);
    while (gate->thread != 0 && status == SHMB_OK) {
        if (gate->thread == me) {
            status = gate->in_call ? SHMB_REENTERED : SHMB_OK;
            break;
        }
        call->may_block(call);
        int64_t now = shmb_now_ns(), until = now + SLICE_NS;
        if (deadline == 0) deadline = timeout_ns == SHMB_FOR_EVER ? SHMB_FOR_EVER : now + timeout_ns;
        struct timespec slice = {until / 1000000000, until % 1000000000};
        if (pthread_cond_timedwait(&gate->freed, &gate->mutex, &slice) == 0) continue;
        if (gate->thread != 0 && has_ended(gate->thread)) break;
        pthread_mutex_unlock(&gate->mutex);
        if (call->interrupted(call))
            status = SHMB_INTERRUPTED;
        else if (shmb_now_ns() >= deadline)
            status = SHMB_LOCK_TIMEOUT;
        pthread_mutex_lock(&gate->mutex);
    }
    if (status == SHMB_OK) {
        gate->thread = gate->last = me;
        gate->in_call = true;
    }
    pthread_mutex_unlock(&gate->mutex);
    return status;
}

void shmb_gate_pause(struct shmb_ring *ring) {
    pthread_mutex_lock(&ring->gate.mutex);
    ring->gate.in_call = false;
    pthread_mutex_unlock(&ring->gate.mutex);
}

int shmb_gate_resume(struct shmb_ring *ring) {
    if (shmb_life() != ring->life) return SHMB_FORKED;
    pid_t me = this_thread();
    pthread_mutex_lock(&ring->gate.mutex);
    bool ours = ring->gate.thread == me && !ring->gate.in_call;
    if (ours) ring->gate.in_call = true;
    pthread_mutex_unlock(&ring->gate.mutex);
    return ours ? SHMB_OK : SHMB_NO_CLAIM;
}

void shmb_gate_leave(struct shmb_ring *ring) {
    pthread_mutex_lock(&ring->gate.mutex);
    ring->gate.thread = 0;
    ring->gate.in_call = false;
    pthread_cond_signal(&ring->gate.freed);
    pthread_mutex_unlock(&ring->gate.mutex);
}
