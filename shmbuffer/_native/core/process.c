#define _GNU_SOURCE /* MADV_WIPEONFORK */
/* State of this process and its threads: the identity of the process that made a handle, its clocks, and details of
 * a thread's last refused call and last draw. */
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/ring.h"

_Thread_local struct shmb_refusal shmb_refusal;
_Thread_local struct shmb_totals shmb_last_draw_totals;

/* The kernel clears this page in the child of a fork, so a handle notices the fork even if no fork hook ran. */
static _Atomic uint64_t *token_page;

void shmb_init_process_token(void) {
    if (token_page == NULL) {
        void *page = mmap(NULL, SHMB_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return;
        madvise(page, SHMB_PAGE, MADV_WIPEONFORK);
        token_page = page;
    }
    if (atomic_load(token_page) == 0)
        atomic_store(token_page, ((uint64_t)shmb_now_ns() << 22) | ((uint64_t)getpid() & 0x3FFFFF));
}

uint64_t shmb_process_token(void) { return token_page ? atomic_load_explicit(token_page, memory_order_relaxed) : 0; }

int64_t shmb_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t shmb_now_ns(void) { return shmb_clock_ns(CLOCK_MONOTONIC); }

static _Atomic int64_t boot_offset_ns; /* offset of CLOCK_BOOTTIME in the time namespace of this process */

void shmb_set_boot_offset(int64_t offset_ns) { atomic_store_explicit(&boot_offset_ns, offset_ns, memory_order_relaxed); }

/* The clock for the ends of leases and reservations. It continues while the machine sleeps, and is the same in all
 * time namespaces. */
uint64_t shmb_boot_ns(void) {
    return (uint64_t)(shmb_clock_ns(CLOCK_BOOTTIME) - atomic_load_explicit(&boot_offset_ns, memory_order_relaxed));
}

/* Stores the time of a change by a call other than a write, sample or update. */
void shmb_store_touch_time(struct shmb_runtime *runtime) {
    atomic_store_explicit(&runtime->touched_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
    CP(count_added);
}
