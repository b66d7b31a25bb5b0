/* Included before every source (-include) when branches are counted. It writes the counters of a process that kills
 * itself at a crash point, or that ends without the functions of atexit. It defines _GNU_SOURCE, because some sources
 * define it before their first include, and this file comes before them. */
#define _GNU_SOURCE
#include <signal.h>

void __gcov_dump(void);
void __gcov_reset(void);

__attribute__((weak, visibility("default"))) void shmb_flush_counters(void) {
    __gcov_dump();
    __gcov_reset();
}

static inline int flush_and_kill(pid_t process, int signal) {
    shmb_flush_counters();
    return kill(process, signal);
}
#define kill flush_and_kill
