/* The gate of a handle. A registry entry holds one claim, so only one thread at a time may be between claim and
 * commit.
 *
 *     free ──enter──▶ in a call ──pause──▶ open ──resume──▶ in a call ──leave──▶ free
 *
 * The state `open` exists for claims in two calls: Python moves the payload, and then commits or aborts in the same
 * thread. If it never did so, for example because of an exception, the same thread may enter again, and any thread
 * may enter after it has ended. A thread that enters and finds `ring->claimed` set rolls that claim back. The gate
 * is private to the process. It is never used in the child of a fork, because a thread of the parent may have been
 * inside. */
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/ring.h"

#define SLICE_NS (50 * 1000 * 1000L) /* between two checks of signals, the deadline, and the thread inside */

static pid_t this_thread(void) {
    static _Thread_local struct {
        uint64_t process_token;
        pid_t number;
    } me; /* cached, because the system call costs more than the rest of the gate */
    if (__builtin_expect(me.number == 0 || me.process_token != shmb_process_token(), 0)) {
        me.number = (pid_t)syscall(SYS_gettid);
        me.process_token = shmb_process_token();
    }
    return me.number;
}

static bool has_ended(pid_t thread) { return syscall(SYS_tgkill, getpid(), thread, 0) < 0 && errno == ESRCH; }

void shmb_gate_init(struct shmb_gate *gate) {
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_condattr_t monotonic; /* pthread_cond_clockwait would not need this attribute, but requires glibc 2.30 */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&gate->freed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* A waiting thread increments `waiting` before it tries the gate again, and a leaving thread reads `waiting` after
 * it has freed the gate. So either the first finds the gate free, or the second wakes it. */
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
        if (!woken && has_ended(inside)) continue; /* enter in its place, unless another thread has done so */
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
    if (shmb_process_token() != ring->process_token) return SHMB_FORKED;
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
    if (shmb_process_token() != ring->process_token) return SHMB_FORKED;
    if (atomic_load(&gate->thread) != this_thread() || gate->in_call) return SHMB_NO_CLAIM;
    gate->in_call = true;
    return SHMB_OK;
}

void shmb_gate_leave(struct shmb_ring *ring) {
    struct shmb_gate *gate = &ring->gate;
    gate->in_call = false;
    atomic_store(&gate->thread, 0);
    if (__builtin_expect(atomic_load(&gate->waiting) == 0, 1)) return;
    pthread_mutex_lock(&gate->mutex); /* waits until a thread that is about to sleep does sleep */
    pthread_cond_signal(&gate->freed);
    pthread_mutex_unlock(&gate->mutex);
}
