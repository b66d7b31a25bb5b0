/* Included before every source of the core (-include) in the stress programs. Each crash point then calls
 * `stress_point`, which yields the processor, spins, or ends the thread.
 *
 * ThreadSanitizer does not support fences, and in terms of C an optimistic copy is a data race with any fences. It
 * therefore ignores the copies that SHMB_OPTIMISTIC marks, and checks everything else. A run in which no slot is
 * written twice has no such race. In that run the copies are checked too, and with them the order of commit and read. */
#ifndef STRESS_POINTS_H
#define STRESS_POINTS_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "core/crashpoint.h"

#undef CP
#undef SHMB_ARMED
#define CP(symbol) stress_point(SHMB_CP_##symbol)
#define SHMB_ARMED true

void stress_point(int point);

#if defined(__SANITIZE_THREAD__)
/* The ThreadSanitizer of gcc 12 does not support pthread_mutex_clocklock. */
#define pthread_mutex_clocklock stress_mutex_clocklock
int stress_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until);

void stress_look_away(void);
void stress_look_again(void);
#define SHMB_OPTIMISTIC(copy)                                                                                \
    do {                                                                                                     \
        stress_look_away();                                                                                  \
        copy;                                                                                                \
        stress_look_again();                                                                                 \
    } while (0)
#endif

#endif
