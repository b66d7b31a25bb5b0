/* The ring's mutex: robust (the kernel marks it when its owner dies), process-shared, type NORMAL (ERRORCHECK
 * compares thread ids across pid namespaces and reports false deadlocks). It is never destroyed.
 *
 * When a thread ends, the kernel walks the list of mutexes that it holds, by their addresses in this process. It
 * also examines the mutex that the thread was about to take or release (`list_op_pending`, which glibc sets and
 * clears within its calls). So the page may be unmapped whenever no thread of the process is between shmb_lock and
 * the end of shmb_unlock. Both happen within one call of the binding, which refers to the map. In the child of a
 * fork the list is empty. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/pool.h"
#include "core/ring.h"

#define SPIN_NS (30 * 1000L)         /* of attempts before a sleep: about as long as sleeping and waking up takes */
#define MAX_PAUSES 16                    /* at most, between two attempts: frequent attempts slow the owner down */
#define SLICE_NS (10 * 1000 * 1000L) /* longest sleep without a wake-up */
#define CHECK_NS (50 * 1000 * 1000L)  /* between two checks of signals and the deadline */

int shmb_mutex_format(struct shmb_runtime *runtime) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_NORMAL);
    memset(runtime->mutex_bytes, 0, sizeof runtime->mutex_bytes);
    CP(mutex_cleared);
    int error = pthread_mutex_init(&runtime->mutex, &attributes);
    CP(mutex_initialised);
    pthread_mutexattr_destroy(&attributes);
    return error;
}

/* The kind that glibc derived from the attributes. If it were damaged, glibc would lock the mutex in another way,
 * and end the process if that fails. */
static int kind_of(const struct shmb_runtime *runtime) {
    return *(const volatile int *)&runtime->mutex.__data.__kind;
}

int shmb_mutex_kind(void) {
    struct shmb_runtime fresh;
    shmb_mutex_format(&fresh);
    return kind_of(&fresh);
}

/* The thread that holds the mutex, or 0: the low 30 bits of the futex word, which the kernel itself reads (futex(2),
 * robust futexes). For messages only. */
uint32_t shmb_mutex_owner(const struct shmb_runtime *runtime) {
    return atomic_load_explicit(&runtime->mutex_word, memory_order_relaxed) & FUTEX_TID_MASK;
}

static bool looks_free(struct shmb_runtime *runtime) {
    return (atomic_load_explicit(&runtime->mutex_word, memory_order_relaxed) & FUTEX_TID_MASK) == 0;
}

/* Calls pthread only if the mutex looks free. During a pthread call the kernel considers the mutex as possibly held
 * by this thread. If the thread dies then, the kernel releases the mutex if the word contains the thread's number,
 * which in another pid namespace may be that of a living thread. So waiting happens in the next two functions,
 * outside pthread. */
static int try_once(struct shmb_runtime *runtime) {
    return looks_free(runtime) ? pthread_mutex_trylock(&runtime->mutex) : EBUSY;
}

/* A process that sleeps immediately waits for a wake-up that takes longer than most locked sections, while the mutex
 * is free. */
static int spin(struct shmb_runtime *runtime) {
    int error = EBUSY;
    for (int64_t pauses = 1, end = shmb_now_ns() + SPIN_NS; error == EBUSY && shmb_now_ns() < end;) {
        for (int64_t i = 0; i < pauses; i++) shmb_relax_processor();
        if (pauses < MAX_PAUSES) pauses *= 2;
        error = try_once(runtime);
    }
    return error;
}

/* Sleeps until the owner unlocks or dies, at most for one slice. The wake-up goes to one waiter only, which may have
 * died. */
static void sleep_for(struct shmb_runtime *runtime) {
    uint32_t seen = atomic_load_explicit(&runtime->mutex_word, memory_order_relaxed);
    if ((seen & FUTEX_TID_MASK) == 0) return;
    if (!(seen & FUTEX_WAITERS)) {
        bool marked = atomic_compare_exchange_strong(&runtime->mutex_word, &seen, seen | FUTEX_WAITERS);
        CP(mutex_waiting);
        if (!marked) return;
    }
    struct timespec slice = {0, SLICE_NS};
    syscall(SYS_futex, &runtime->mutex_word, FUTEX_WAIT, seen | FUTEX_WAITERS, &slice, NULL, 0);
}

/* SHMB_OWNER_DIED: the mutex is ours, and the data that it guards may be inconsistent. `kind` is from
 * shmb_mutex_kind. */
int shmb_mutex_acquire(struct shmb_runtime *runtime, int kind, struct shmb_call *call) {
    if (__builtin_expect(kind_of(runtime) != kind, 0)) return SHMB_UNRECOVERABLE;
    int error = try_once(runtime);
    if (error == EBUSY) error = spin(runtime);
    if (error == EBUSY) {
        int64_t deadline = shmb_now_ns() + call->timeout_ns, next_check = shmb_now_ns() + CHECK_NS;
        atomic_fetch_add_explicit(&runtime->lock_waits, 1, memory_order_relaxed);
        CP(count_added);
        call->may_block(call);
        while ((error = try_once(runtime)) == EBUSY) {
            sleep_for(runtime);
            int64_t now = shmb_now_ns();
            if (now >= next_check && call->interrupted(call)) return SHMB_INTERRUPTED;
            if (now >= next_check) next_check = now + CHECK_NS;
            if (now >= deadline) return SHMB_LOCK_TIMEOUT;
        }
        if (error == 0 || error == EOWNERDEAD) { /* other processes may be sleeping: our unlock must wake one of them */
            atomic_fetch_or(&runtime->mutex_word, FUTEX_WAITERS);
            CP(mutex_waiting);
        }
    }
    if (__builtin_expect(error == EOWNERDEAD, 0)) return SHMB_OWNER_DIED;
    return error == 0 ? SHMB_OK : SHMB_UNRECOVERABLE;
}

/* Call this after a dead owner's work was repaired. Without it, unlocking makes the mutex unusable for all
 * processes. */
int shmb_mutex_mark_consistent(struct shmb_runtime *runtime) {
    int error = pthread_mutex_consistent(&runtime->mutex);
    CP(repair_consistent);
    return error == 0 ? SHMB_OK : SHMB_UNRECOVERABLE;
}
