/* A ring in memory for the threads of one program. Each thread has its own handle, or all use the same one.
 *
 * The bytes of an item are computed from its ticket, so a reader can check every byte of an item that it got with a
 * ticket. Torn, invented and mistaken items therefore show. */
#ifndef STRESS_WORLD_H
#define STRESS_WORLD_H

#include "core/ring.h"

#define LEAVES 9
#define MAX_CAPACITY 16384u
#define MOST_TICKETS (1u << 16) /* if items are consumed */

/* Options of the command line. */
struct options {
    uint64_t seed, capacity, lanes, record_bytes, threads, rounds;
    bool mortal;  /* some threads die at random points */
    bool shared;  /* all threads use one handle */
    bool once;    /* no slot is written twice */
    bool upkeep;  /* the buffer is emptied, and counts are restored */
    bool limited; /* there is a limiter, which changes between a ratio, a queue and none */
    bool consumed; /* there are two consumers, for which writers wait */
    bool weights; /* weights are published and read, and the ring is not used */
};

/* Counters of the operations of all threads. */
#define COUNTS(X)                                                                                            \
    X(writes) X(items) X(aborts) X(samples) X(checked) X(missing) X(updates) X(empties) X(alphas) X(checks)  \
    X(copies) X(blocked) X(deaths) X(reaped) X(no_room) X(limited) X(admitted) X(taken) X(limiters)  \
    X(lapped) X(tracked) X(reserved) X(given_back) X(refused) X(delivered) X(acked) X(late)

struct world {
    struct options options;
    struct shmb_runtime *runtime;
    struct shmb_entry *entries;
    unsigned char *slots, *bytes, *ledger;
    struct shmb_ledger_parts parts;
    struct shmb_leaf leaves[LEAVES];
    struct shmb_sections sections;
    pthread_mutex_t init_lock;
    _Atomic uint64_t dead[SHMB_ENTRIES];      /* incarnation in each entry that is proven dead */
    _Atomic uint64_t acknowledged[MAX_CAPACITY]; /* of each slot: last ticket whose commit returned, plus one */
    _Atomic unsigned char committed[MOST_TICKETS]; /* for each consumed ticket: its commit returned */
    _Atomic uint64_t acknowledged_elements, offered_elements;
    _Atomic uint64_t unfinished; /* threads that have not done enough yet */
    void (*at_point)(int point); /* called instead of the random delays, unless it is NULL */
#define X(name) _Atomic uint64_t name;
    struct {
        COUNTS(X)
    } counts;
#undef X
};

extern struct world world;

#define COUNT(name, n) atomic_fetch_add_explicit(&world.counts.name, (n), memory_order_relaxed)

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void expect(int status, const char *what); /* SHMB_OK, or the program ends */

void world_begin(const struct options *options);
void handle_open(struct shmb_ring *ring);
void handle_free(struct shmb_ring *ring); /* frees the handle of a thread that has left or is dead */

/* Random numbers of this thread. */
void random_begin(uint64_t seed);
uint64_t random_below(uint64_t bound);

/* Writes the bytes of an item; for a record this includes the header. */
void item_fill(unsigned char *to, unsigned leaf, uint64_t ticket, uint64_t lane, uint64_t bytes);
void item_check(const unsigned char *const *leaves, uint64_t ticket, uint64_t lane, const char *who);
void record_fill(unsigned char *body, uint64_t ticket, uint64_t from, uint64_t bytes);
void record_check(const unsigned char *record, uint64_t bytes, uint64_t ticket, const char *who);

/* Lets this thread die after a number of crash points, or never if it is 0. */
void fuse_set(uint64_t points);

#endif
