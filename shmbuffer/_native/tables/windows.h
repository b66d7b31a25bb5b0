/* Runs that are cut into windows of equal length, each delivered once: see windows.c. */
#ifndef SHMB_WINDOWS_H
#define SHMB_WINDOWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct shmb_run;
struct shmb_trajectories;

struct shmb_window {
    uint64_t word; /* slot word of the first item */
    uint32_t first; /* element of the first item */
};

struct shmb_windows {
    const _Atomic uint64_t *words; /* of the ring */
    uint64_t elements, seen;       /* tickets from `seen` on are processed later */
    uint32_t width, steps;         /* elements per slot; items per window */
    /* for each element: the word of an item that needs no window any more; 0: none */
    uint64_t *used;
    /* a queue; windows before `next` were delivered, and are kept so that they can be taken back */
    struct shmb_window *at;
    uint64_t begin, count, capacity;
    uint64_t number, next; /* numbers of the window at `begin`, and of the next window to deliver */
    uint64_t lost;         /* windows with an item that was overwritten before their delivery */
    bool failed;           /* out of memory */
};

bool shmb_windows_make(struct shmb_windows *w, const _Atomic uint64_t *words, uint64_t elements, uint32_t width, uint32_t steps);
void shmb_windows_free(struct shmb_windows *w);

/* Update the windows of a run after an item was appended, after items were removed at its front, or after the run
 * was split or joined. */
void shmb_windows_extend(struct shmb_trajectories *all, struct shmb_run *run);
void shmb_windows_shrink(struct shmb_trajectories *all, struct shmb_run *run);
void shmb_windows_realign(struct shmb_trajectories *all, struct shmb_run *run);

/* Delivers the next complete windows that begin in the newest `newest` slots: stores their first elements, and
 * returns their number, up to `count`. Other windows are dropped and counted as lost. */
uint64_t shmb_windows_claim(struct shmb_trajectories *all, uint64_t count, uint64_t newest, int64_t *firsts);
uint64_t shmb_windows_count_waiting(const struct shmb_windows *w);
void shmb_windows_take_back(struct shmb_windows *w, uint64_t next, uint64_t lost);
void shmb_windows_mark_used(struct shmb_windows *w, const int64_t *elements, uint64_t count, uint64_t below);
void shmb_windows_list_used(const struct shmb_trajectories *all, int64_t *tickets, bool waiting);

#endif
