/* Items that were added to and removed from a ring since a process last polled it: see follower.c. */
#ifndef SHMB_FOLLOWER_H
#define SHMB_FOLLOWER_H

#include <stdbool.h>
#include <stdint.h>

struct shmb_ring;

struct shmb_pair {
    uint64_t first, second;
};

/* A queue of pairs, sorted by the first number. */
struct shmb_pairs {
    struct shmb_pair *at;
    uint64_t begin, count, capacity;
};

struct shmb_follower {
    const struct shmb_ring *ring;
    bool started;
    bool failed;              /* out of memory: the next poll starts over */
    bool in_order;            /* tickets increase from place to place */
    bool reports_in_order;             /* items behind an unfinished write are reported again when that write ends */
    /* of the items reported last: those before the first unfinished write */
    uint64_t settled;
    uint64_t seen;            /* lower tickets were processed */
    uint64_t front, at, end;  /* places */
    uint64_t ticket;          /* of the last reported item */
    uint64_t tail;            /* of the byte ring */
    uint64_t *reported;           /* one bit per slot: its item was reported */
    uint64_t n_overwritten;             /* the first pairs of `removed` are items that were overwritten; their number */
    struct shmb_pairs removed;    /* consecutive slots: the first one, and their number */
    struct shmb_pairs changed; /* slots and their places */
    struct shmb_pairs pending; /* places of unfinished writes, and their words */
    struct shmb_pairs holes;   /* first and last place of each hole */
};

bool shmb_follower_make(struct shmb_follower *f, const struct shmb_ring *ring);
void shmb_follower_free(struct shmb_follower *f);
void shmb_follower_forget(struct shmb_follower *f); /* the next poll starts over */
bool shmb_follower_poll(struct shmb_follower *f, bool *restarted);
uint64_t shmb_follower_next(struct shmb_follower *f, int64_t *slots, int64_t *reach, uint64_t max_count);
uint64_t shmb_follower_read_reach(const struct shmb_follower *f, uint64_t slot);

#endif
