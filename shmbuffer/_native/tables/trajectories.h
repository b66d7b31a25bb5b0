/* Items that follow one another: see trajectories.c. */
#ifndef SHMB_TRAJECTORIES_H
#define SHMB_TRAJECTORIES_H

#include "tables/marks.h"

#define SHMB_MAX_ELEMENTS ((uint64_t)UINT32_MAX - 1)

/* A trajectory: items without a missing step. */
struct shmb_run {
    uint32_t *items;       /* ring buffer of elements: index i is items[i & mask]. NULL: the run is unused */
    uint32_t mask;         /* capacity - 1; the capacity is a power of two */
    /* indices, modulo 2^32; in an unused run, `front` links to the next unused run */
    uint32_t front, back;
    uint32_t owner;
    uint32_t marked;       /* element of this run in `marks`; SHMB_NO_ELEMENT: none */
    int64_t step;          /* of the first item */
    uint32_t cut;          /* index at which its next window begins; see windows.c */
};
#define SHMB_NO_ELEMENT UINT32_MAX

/* A sequence of runs: those of one source in one lane, and, for items in any order, of one id. */
struct shmb_owner {
    uint64_t source;
    int64_t id;
    uint32_t lane;
    uint32_t *runs; /* by the step of their first item, from `begin` on; NULL: the owner is unused */
    uint32_t begin, count, capacity;
    /* number of the present call, and the last slot of the owner in that call */
    uint32_t call, last;
};

struct shmb_trajectories {
    /* number of elements; `elements` is 0 after an allocation failed */
    uint64_t wanted, elements;
    uint32_t width;            /* elements per slot */
    struct shmb_run_place {
        uint32_t run, index; /* run: 1 + its number; 0: the element has no item */
    } *where;                /* for each element */
    struct shmb_run *runs;
    /* free_runs: 1 + the first unused run */
    uint32_t n_runs, runs_capacity, free_runs;
    struct shmb_owner *owners;
    uint32_t n_owners, owners_capacity, free_owners;
    /* hash table of 1 + owner, at most half full */
    uint32_t *table, shift;
    /* 1 + the owner of the last lookup, which is usually also the next one */
    uint32_t last_owner;
    struct shmb_marks marks; /* first items of trajectories with at least `least` items */
    uint32_t least;          /* 0: not requested yet */
    struct shmb_marks item_marks;  /* all elements with an item; allocated at the first use */
    uint32_t calls;
    uint64_t count, items; /* number of trajectories, and of items in them */
    uint64_t moved;        /* runs that were moved in the list of their owner */
    struct shmb_windows *windows; /* NULL: no windows */
    bool failed;           /* out of memory: the contents are invalid until they are cleared */
};

bool shmb_trajectories_make(struct shmb_trajectories *all, uint64_t elements, uint32_t width);
void shmb_trajectories_free(struct shmb_trajectories *all);
bool shmb_trajectories_clear(struct shmb_trajectories *all);

/* The slot in lane 0 of the last item of a source, including items of the present call; -1: none. `slot` becomes the
 * last. */
int64_t shmb_trajectory_find_predecessor(struct shmb_trajectories *all, uint64_t source, uint32_t slot);
void shmb_trajectory_append(struct shmb_trajectories *all, uint64_t source, uint32_t lane, uint32_t element, bool cut,
                            bool settled);
/* Appends `count` items, in consecutive slots of one element, after the item in `slot`. The first `settled` may
 * complete windows. */
void shmb_trajectories_extend(struct shmb_trajectories *all, uint32_t slot, uint32_t count, uint32_t settled);
/* False: another item has that step; its element is stored in `existing`. */
bool shmb_trajectory_insert(struct shmb_trajectories *all, uint64_t source, uint32_t lane, int64_t id, int64_t step,
                            uint32_t element, uint32_t *existing);
void shmb_trajectory_drop(struct shmb_trajectories *all, uint32_t element);
/* elements from `element` to `end` */
void shmb_trajectories_drop(struct shmb_trajectories *all, uint64_t element, uint64_t end);
/* The previous or next element of the same owner; SHMB_NO_ELEMENT: none. */
uint32_t shmb_trajectory_neighbour(const struct shmb_trajectories *all, uint32_t element, bool after);
/* starts a trajectory at it, or joins it to the previous one */
void shmb_trajectory_cut(struct shmb_trajectories *all, uint32_t element, bool cut);

void shmb_trajectories_mark(struct shmb_trajectories *all, uint32_t least);
void shmb_trajectories_count(struct shmb_trajectories *all);

/* A row is run << 32 | position of the item in the run. */
static inline int64_t shmb_find_row(const struct shmb_trajectories *all, uint64_t element) {
    if (element >= all->elements || all->where[element].run == 0) return -1;
    uint32_t run = all->where[element].run - 1;
    return (int64_t)run << 32 | (uint32_t)(all->where[element].index - all->runs[run].front);
}

static inline uint32_t shmb_run_length(const struct shmb_trajectories *all, uint64_t run) {
    return run < all->n_runs && all->runs[run].items ? all->runs[run].back - all->runs[run].front : 0;
}

static inline int64_t shmb_find_element(const struct shmb_trajectories *all, int64_t row) {
    uint64_t run = (uint64_t)row >> 32;
    if (row < 0 || (uint32_t)row >= shmb_run_length(all, run)) return -1;
    return all->runs[run].items[(all->runs[run].front + (uint32_t)row) & all->runs[run].mask];
}

#endif
