#define _GNU_SOURCE /* MADV_WIPEONFORK */
/* What belongs to this process and its threads: whether it is the one that made a handle, its clocks, and why a thread's
 * last call was refused, and what its last draw was from. */
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core/ring.h"

_Thread_local struct shmb_refusal shmb_refusal;
_Thread_local struct shmb_totals shmb_drawn_from;

/* A page that the kernel wipes in the child of a fork, so that a handle notices even where no hook ran. */
static _Atomic uint64_t *life_page;

void shmb_life_begin(void) {
    if (life_page == NULL) {
        void *page = mmap(NULL, SHMB_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return;
        madvise(page, SHMB_PAGE, MADV_WIPEONFORK);
        life_page = page;
    }
    if (atomic_load(life_page) == 0)
        atomic_store(life_page, ((uint64_t)shmb_now_ns() << 22) | ((uint64_t)getpid() & 0x3FFFFF));
}

uint64_t shmb_life(void) { return life_page ? atomic_load_explicit(life_page, memory_order_relaxed) : 0; }

int64_t shmb_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t shmb_now_ns(void) { return shmb_clock_ns(CLOCK_MONOTONIC); }

static _Atomic int64_t boot_offset_ns; /* by which the time namespace of this process shifts CLOCK_BOOTTIME */

void shmb_set_boot_offset(int64_t offset_ns) { atomic_store_explicit(&boot_offset_ns, offset_ns, memory_order_relaxed); }

/* The clock by which leases and reservations end. It goes on while the machine sleeps, and processes in all time namespaces read the
 * same from it. */
uint64_t shmb_boot_ns(void) {
    return (uint64_t)(shmb_clock_ns(CLOCK_BOOTTIME) - atomic_load_explicit(&boot_offset_ns, memory_order_relaxed));
}

/* Dates what was stored by a call that is no write, sample or update. */
void shmb_touch(struct shmb_runtime *runtime) {
    atomic_store_explicit(&runtime->touched_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
    CP(count_added);
}
