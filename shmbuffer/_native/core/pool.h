/* Threads of this process that take their share of a large batch: see pool.c. */
#ifndef SHMB_POOL_H
#define SHMB_POOL_H

#include <stdint.h>

#define SHMB_MOST_THREADS 16

/* Rows [first, end) of a batch. It may run in several threads at a time, and knows nobody's thread-local. */
typedef void shmb_part(void *what, uint64_t first, uint64_t end);

#define SHMB_SHARED_BYTES (2u << 20) /* some 200 microseconds; of less, waking a thread takes more than it gives */

#define SHMB_POWER_BYTES 256 /* a power takes as long as to copy so many */

/* Of `count` rows, the work of each like a copy of so many bytes. The caller does all that nobody else has begun, and waits
 * for what they have: when it returns, every row is done, and nobody looks at `what` any more. */
void shmb_share_out(shmb_part *part, void *what, uint64_t count, uint64_t bytes);
static inline void shmb_divide(shmb_part *part, void *what, uint64_t count, uint64_t bytes) {
    if (__builtin_expect(count * bytes >= SHMB_SHARED_BYTES, 0))
        shmb_share_out(part, what, count, bytes);
    else
        part(what, 0, count);
}

unsigned shmb_threads(void); /* the caller among them */
void shmb_set_threads(unsigned threads); /* 0: as many as this process may have processors, up to 4 */

/* While another processor does something. */
static inline void shmb_pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
