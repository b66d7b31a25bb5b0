/* Threads of this process that share the work of a large batch: see pool.c. */
#ifndef SHMB_POOL_H
#define SHMB_POOL_H

#include <stdint.h>

#define SHMB_MAX_THREADS 16

/* Processes rows [first, end) of a batch. It may run in several threads at a time, and uses no thread-local
 * variable. */
typedef void shmb_part(void *context, uint64_t first, uint64_t end);

/* some 200 microseconds of work; for less, waking a thread costs more than it gains */
#define SHMB_SHARED_BYTES (2u << 20)

#define SHMB_POWER_BYTES 256 /* a power takes as long as copying so many bytes */

/* Processes `count` rows, each of which takes as long as copying `bytes`. The caller works on all pieces that no
 * thread has begun, and waits for the other pieces. When it returns, every row is done, and no thread accesses
 * `context`. */
void shmb_divide_among_threads(shmb_part *part, void *context, uint64_t count, uint64_t bytes);
static inline void shmb_divide(shmb_part *part, void *context, uint64_t count, uint64_t bytes) {
    if (__builtin_expect(count * bytes >= SHMB_SHARED_BYTES, 0))
        shmb_divide_among_threads(part, context, count, bytes);
    else
        part(context, 0, count);
}

unsigned shmb_threads(void); /* including the caller */
void shmb_set_threads(unsigned threads); /* 0: one per processor of this process, at most 4 */

/* Call this in a loop that waits for another processor. */
static inline void shmb_relax_processor(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
