#define _GNU_SOURCE /* CPU_COUNT */
/* Threads of this process that share the work of a large batch. Pieces are taken from one counter, so a thread that
 * comes late just takes fewer of them.
 *
 *     caller    call ──▶ pieces ──▶ pieces ──▶ no further thread enters ──▶ wait for threads inside ──▶ done
 *     thread    asleep ──▶ inside: pieces ──▶ asleep
 *
 * Always true
 *   1. A thread is inside only during a call with work. Otherwise it accesses nothing of the ring, the batch or Python, so that
 *      maps may be unmapped and the process may end without asking it.
 *   2. One call has the threads at a time. Another call works alone meanwhile, and so do small calls.
 *   3. Threads commit nothing: a piece is a copy, a checksum or a power, and the call continues when all pieces are done.
 *   4. On busy processors a thread may come too late, or may be preempted while it has a piece, for which the call must sleep.
 *      After such a call the next ones work alone: first one, then three, seven, up to 63.
 * If the process dies, its threads die with it. Of the shared memory they have filled only slots whose words say
 * WRITING. The child of a fork has none of the threads. It makes its own pool when it has work, and never takes a
 * lock of the parent's pool. */
#include "core/pool.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "core/ring.h"

#define PIECE_BYTES (64u << 10)
#define ROWS_PER_STEP 4u /* a piece has a multiple of so many rows, whose checksums are computed together */
#define DEFAULT_MAX 4u
#define STACK_BYTES (256u << 10)

struct pool {
    uint64_t process_token; /* identifies the process that has these threads */
    pthread_mutex_t mutex;
    pthread_cond_t called, left;
    shmb_part *part; /* NULL: no call has the threads */
    void *context;
    uint64_t count, piece;
    _Atomic uint64_t next;
    unsigned started, wanted;
    _Atomic unsigned inside; /* changes under the mutex */
    /* calls that work alone: after the last useless call, and still to come */
    unsigned solo_length, solo_calls;
};

#define MAX_REST 63u
#define MAX_CHECKS 2000 /* checks for the end of a piece; together they take about as long as a piece */

static _Atomic(struct pool *) current;
static _Atomic unsigned chosen; /* 0: not set */

static unsigned processors(void) {
    cpu_set_t may_use;
    return sched_getaffinity(0, sizeof may_use, &may_use) == 0 ? (unsigned)CPU_COUNT(&may_use) : 1;
}

void shmb_set_threads(unsigned threads) {
    atomic_store(&chosen, threads < SHMB_MAX_THREADS ? threads : SHMB_MAX_THREADS);
}

unsigned shmb_threads(void) {
    unsigned threads = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (threads) return threads;
    threads = processors();
    return threads < DEFAULT_MAX ? threads : DEFAULT_MAX;
}

/* Returns the number of pieces that this thread processed. */
static uint64_t run_pieces(struct pool *pool, shmb_part *part, void *context, uint64_t count, uint64_t piece) {
    uint64_t first, processed = 0;
    for (; (first = atomic_fetch_add_explicit(&pool->next, piece, memory_order_relaxed)) < count; processed++)
        part(context, first, count - first < piece ? count : first + piece);
    return processed;
}

static void *run_helper(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (pool->wanted == 0) pthread_cond_wait(&pool->called, &pool->mutex);
        pool->wanted--;
        pool->inside++;
        shmb_part *part = pool->part;
        void *context = pool->context;
        uint64_t count = pool->count, piece = pool->piece;
        pthread_mutex_unlock(&pool->mutex);
        run_pieces(pool, part, context, count, piece);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->inside == 0) pthread_cond_signal(&pool->left);
    }
    return NULL;
}

static struct pool *pool_of_this_process(void) {
    struct pool *pool = atomic_load(&current), *seen = pool;
    if (pool != NULL && pool->process_token == shmb_process_token()) return pool;
    pool = calloc(1, sizeof *pool);
    if (pool == NULL) return NULL;
    pool->process_token = shmb_process_token();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->called, NULL);
    pthread_cond_init(&pool->left, NULL);
    /* a parent's pool is not freed, because its state is unknown here */
    if (atomic_compare_exchange_strong(&current, &seen, pool)) return pool;
    free(pool);
    return seen;
}

/* The mutex is held. The threads are detached and block all signals. If fewer can be started, the caller does the
 * rest. */
static void start_threads(struct pool *pool, unsigned helpers) {
    if (pool->started >= helpers) return;
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES > PTHREAD_STACK_MIN ? STACK_BYTES : PTHREAD_STACK_MIN);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool->started < helpers && pthread_create(&thread, &attributes, run_helper, pool) == 0) pool->started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static bool start_call(struct pool *pool, shmb_part *part, void *context, uint64_t count, uint64_t piece, unsigned helpers) {
    pthread_mutex_lock(&pool->mutex);
    bool ours = pool->part == NULL && pool->solo_calls == 0;
    if (pool->solo_calls) pool->solo_calls--;
    if (ours) {
        start_threads(pool, helpers);
        pool->part = part, pool->context = context, pool->count = count, pool->piece = piece;
        atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
        pool->wanted = pool->started < helpers ? pool->started : helpers;
        for (unsigned i = 0; i < pool->wanted; i++) pthread_cond_signal(&pool->called);
    }
    pthread_mutex_unlock(&pool->mutex);
    return ours;
}

void shmb_divide_among_threads(shmb_part *part, void *context, uint64_t count, uint64_t bytes) {
    uint64_t piece = (PIECE_BYTES / bytes + 1 + ROWS_PER_STEP - 1) / ROWS_PER_STEP * ROWS_PER_STEP, pieces = (count + piece - 1) / piece;
    unsigned threads = shmb_threads();
    if (threads > pieces) threads = (unsigned)pieces;
    struct pool *pool = threads > 1 ? pool_of_this_process() : NULL;
    if (pool == NULL || !start_call(pool, part, context, count, piece, threads - 1)) {
        part(context, 0, count);
        return;
    }
    bool helped = run_pieces(pool, part, context, count, piece) < pieces;
    for (int i = 0; i < MAX_CHECKS && atomic_load_explicit(&pool->inside, memory_order_relaxed) > 0; i++) shmb_relax_processor();
    pthread_mutex_lock(&pool->mutex);
    for (pool->wanted = 0; pool->inside > 0; helped = false) pthread_cond_wait(&pool->left, &pool->mutex);
    pool->solo_length = helped ? 0 : pool->solo_length < MAX_REST ? 2 * pool->solo_length + 1 : MAX_REST;
    pool->solo_calls = pool->solo_length;
    pool->part = NULL;
    pthread_mutex_unlock(&pool->mutex);
}
