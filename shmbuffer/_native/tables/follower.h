/* What has come and gone in a ring since a process looked last: see follower.c. */
#ifndef SHMB_FOLLOWER_H
#define SHMB_FOLLOWER_H

#include <stdbool.h>
#include <stdint.h>

struct shmb_ring;

struct shmb_pair {
    uint64_t first, second;
};

/* A queue of pairs in the order of the first number. */
struct shmb_pairs {
    struct shmb_pair *at;
    uint64_t begin, count, room;
};

struct shmb_follower {
    const struct shmb_ring *ring;
    bool started;
    bool failed;              /* there was no memory: the next poll starts over */
    bool in_order;            /* tickets grow from place to place */
    bool in_turn;             /* what lies behind a write that is under way is told again, however that ends */
    uint64_t settled;         /* of the items told of last: those before the first write that is under way */
    uint64_t seen;            /* tickets below it were looked at */
    uint64_t front, at, end;  /* places */
    uint64_t ticket;          /* of the last item that was told of */
    uint64_t tail;            /* of the byte ring */
    uint64_t *held;           /* a bit a slot: its item was told of */
    uint64_t over;             /* so many pairs of `gone` are of items that were written over */
    struct shmb_pairs gone;    /* slots that follow each other: the first, and how many */
    struct shmb_pairs changed; /* slots, and their places */
    struct shmb_pairs pending; /* places that are being written, and their words */
    struct shmb_pairs holes;   /* first and last place of each */
};

bool shmb_follower_make(struct shmb_follower *f, const struct shmb_ring *ring);
void shmb_follower_free(struct shmb_follower *f);
void shmb_follower_forget(struct shmb_follower *f); /* the next poll starts over */
bool shmb_follower_poll(struct shmb_follower *f, bool *restarted);
uint64_t shmb_follower_next(struct shmb_follower *f, int64_t *slots, int64_t *reach, uint64_t room);
uint64_t shmb_follower_reach(const struct shmb_follower *f, uint64_t slot);

#endif
