/* How long a robust mutex is held, noted from outside: the dynamic linker loads this before all others (LD_PRELOAD),
 * so that the core that is measured is the one that is delivered. The core has one robust mutex and takes it with
 * trylock, once it looks free: so how long it waits cannot be seen from here. Python has no robust mutex.
 *
 * A look at the clock lies on each side of a locked section, so it seems to take some 25 ns longer than it does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define VISIBLE __attribute__((visibility("default")))
#define ROBUST 16 /* in glibc's __kind */

static int64_t *_Atomic notes; /* NULL: nobody wants to know */
static size_t room;
static _Atomic size_t used;
static _Thread_local int64_t locked_at;

static int (*try_next)(pthread_mutex_t *);
static int (*unlock_next)(pthread_mutex_t *);

__attribute__((constructor)) static void find_next(void) {
    try_next = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    unlock_next = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool noted(const pthread_mutex_t *mutex) {
    return (mutex->__data.__kind & ROBUST) && atomic_load_explicit(&notes, memory_order_relaxed);
}

VISIBLE int pthread_mutex_trylock(pthread_mutex_t *mutex) {
    if (!try_next) find_next();
    int error = try_next(mutex);
    if ((error == 0 || error == EOWNERDEAD) && noted(mutex)) locked_at = now_ns();
    return error;
}

VISIBLE int pthread_mutex_unlock(pthread_mutex_t *mutex) {
    if (!unlock_next) find_next();
    if (noted(mutex) && locked_at) {
        int64_t held = now_ns() - locked_at;
        locked_at = 0;
        size_t at = atomic_fetch_add(&used, 1);
        if (at < room) atomic_load(&notes)[at] = held;
    }
    return unlock_next(mutex);
}

/* Note the nanoseconds of this process's sections in `into`, in their order, until there are `count` of them. */
VISIBLE void holds_begin(int64_t *into, size_t count) {
    room = count;
    atomic_store(&used, 0);
    atomic_store(&notes, into);
}

/* Note no more; how many there were, also beyond those that had room. */
VISIBLE size_t holds_end(void) {
    atomic_store(&notes, NULL);
    return atomic_load(&used);
}
