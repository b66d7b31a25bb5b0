/* Read before every source of the core (-include), in programs that shake it: each crash point then calls
 * `stress_point`, which gives the processor away, dawdles, or ends the thread there.
 *
 * ThreadSanitizer does not know fences, and in terms of C an optimistic copy is a data race whatever the fences say:
 * it does not look at the copies that SHMB_OPTIMISTIC names, and at everything else it does. A run in which no slot
 * is written twice has no such race; there it looks at the copies too, and so at the order of commit and read. */
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
/* Which the ThreadSanitizer of gcc 12 does not know. */
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
