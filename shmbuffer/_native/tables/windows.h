/* Runs cut into windows of equal length, each given once: see windows.c. */
#ifndef SHMB_WINDOWS_H
#define SHMB_WINDOWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct shmb_run;
struct shmb_trajectories;

struct shmb_window {
    uint64_t word; /* of the first item */
    uint32_t first; /* element */
};

struct shmb_windows {
    const _Atomic uint64_t *words; /* of the ring */
    uint64_t elements, seen;       /* tickets from `seen` on are looked at later */
    uint32_t width, steps;         /* elements of a slot; items of a window */
    uint64_t *used;                /* of each element: the word of an item that needs no window any more; 0: none */
    struct shmb_window *at;        /* a queue; those before `next` were taken, and are kept for who takes them back */
    uint64_t begin, count, room;
    uint64_t number, next; /* of the window at `begin`, and of the next one to be taken */
    uint64_t lost;         /* windows with an item that was written over before they were taken */
    bool failed;           /* there was no memory */
};

bool shmb_windows_make(struct shmb_windows *w, const _Atomic uint64_t *words, uint64_t elements, uint32_t width, uint32_t steps);
void shmb_windows_free(struct shmb_windows *w);

/* Of a run: an item has come behind the others; items have gone at the front; it is another one than before. */
void shmb_windows_longer(struct shmb_trajectories *all, struct shmb_run *run);
void shmb_windows_shorter(struct shmb_trajectories *all, struct shmb_run *run);
void shmb_windows_again(struct shmb_trajectories *all, struct shmb_run *run);

/* The next windows that are whole, and in one of so many slots, the newest ones: their first elements. How many there were, up to
 * `count`. Others are lost. */
uint64_t shmb_windows_claim(struct shmb_trajectories *all, uint64_t count, uint64_t newest, int64_t *firsts);
uint64_t shmb_windows_waiting(const struct shmb_windows *w);
void shmb_windows_back(struct shmb_windows *w, uint64_t next, uint64_t lost);
void shmb_windows_use(struct shmb_windows *w, const int64_t *elements, uint64_t count, uint64_t below);
void shmb_windows_used(const struct shmb_trajectories *all, int64_t *tickets, bool waiting);

#endif
