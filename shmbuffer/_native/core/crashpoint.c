#include "core/crashpoint.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

_Atomic int shmb_armed = SHMB_CP_NONE;

static struct {
    char name[64]; /* of a point in Python code */
    enum shmb_crash_action action;
    _Atomic long left; /* how many more times the point is passed without an action */
    int notify_fd, wait_fd;
} armed;

static const char *const names[] = {
    "",
#define X(symbol, name) name,
    SHMB_CRASH_POINTS(X)
#undef X
};

const char *shmb_crash_point_name(int point) {
    return point > SHMB_CP_NONE && point < SHMB_CP_NATIVE_END ? names[point] : NULL;
}

int shmb_crash_arm(const char *name, enum shmb_crash_action action, long after, int notify_fd, int wait_fd) {
    int point = strcmp(name, "*") == 0 ? SHMB_CP_EVERY : SHMB_CP_PYTHON;
    if (point == SHMB_CP_EVERY && action != SHMB_PAUSE) return -1;
    if (strlen(name) >= sizeof armed.name) return -1;
    for (int i = 1; i < SHMB_CP_NATIVE_END; i++)
        if (strcmp(names[i], name) == 0) point = i;
    strcpy(armed.name, name);
    armed.action = action;
    armed.notify_fd = notify_fd;
    armed.wait_fd = wait_fd;
    atomic_store(&armed.left, after);
    atomic_store(&shmb_armed, point);
    return point;
}

void shmb_crash_disarm(void) { atomic_store(&shmb_armed, SHMB_CP_NONE); }

static void tell_and_wait(const char *text, size_t bytes) {
    char byte;
    if (write(armed.notify_fd, text, bytes) != (ssize_t)bytes) return; /* no reader: continue */
    while (read(armed.wait_fd, &byte, 1) < 0) {                        /* interrupted: read again */
    }
}

static void tell_name(const char *name) {
    char line[sizeof armed.name + 1];
    size_t bytes = strnlen(name, sizeof armed.name);
    memcpy(line, name, bytes);
    line[bytes] = '\n';
    tell_and_wait(line, bytes + 1);
}

void shmb_crash_point_named(const char *name) {
    int point = atomic_load_explicit(&shmb_armed, memory_order_relaxed);
    if (point == SHMB_CP_EVERY)
        tell_name(name);
    else if (point == SHMB_CP_PYTHON && strcmp(armed.name, name) == 0)
        shmb_crash_point_reached(SHMB_CP_PYTHON);
}

void shmb_crash_point_reached(int point) {
    if (atomic_load(&shmb_armed) == SHMB_CP_EVERY) {
        tell_name(shmb_crash_point_name(point));
        return;
    }
    if (atomic_load(&shmb_armed) != point || atomic_fetch_sub(&armed.left, 1) > 0) return;
    shmb_crash_disarm();
    switch (armed.action) {
    case SHMB_KILL: kill(getpid(), SIGKILL); break;
    case SHMB_STOP: kill(getpid(), SIGSTOP); break;
    case SHMB_TERM: kill(getpid(), SIGTERM); break;
    case SHMB_INT: kill(getpid(), SIGINT); break;
    case SHMB_EXEC: {
        char *const program[] = {"/bin/true", NULL}, *const environment[] = {NULL};
        execve(program[0], program, environment);
        break;
    }
    case SHMB_PAUSE: tell_and_wait("\1", 1); break;
    }
}
