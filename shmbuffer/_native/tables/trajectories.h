/* Which items follow each other: see trajectories.c. */
#ifndef SHMB_TRAJECTORIES_H
#define SHMB_TRAJECTORIES_H

#include "tables/marks.h"

#define SHMB_MOST_ELEMENTS ((uint64_t)UINT32_MAX - 1)

/* One trajectory: items without a step that is missing. */
struct shmb_run {
    uint32_t *items;       /* elements; of index i: items[i & mask]. NULL: the run is free */
    uint32_t mask;         /* of a circle of a power of two */
    uint32_t front, back;  /* indices, modulo 2^32; of a run that is free `front` is the next free one */
    uint32_t owner;
    uint32_t marked;       /* element by which it is in the marks; SHMB_NO_ELEMENT: it is not */
    int64_t step;          /* of the first item */
    uint32_t cut;          /* index from which its next window begins; see windows.c */
};
#define SHMB_NO_ELEMENT UINT32_MAX

/* Whose trajectories follow each other: of one source, in one lane, and where items lie anywhere of one id. */
struct shmb_owner {
    uint64_t source;
    int64_t id;
    uint32_t lane;
    uint32_t *runs; /* by the step of their first item: those of `begin` on; NULL: the owner is free */
    uint32_t begin, count, room;
    uint32_t look, last; /* of the call under way: its number, and the slot that comes last in it */
};

struct shmb_trajectories {
    uint64_t wanted, elements; /* 0 of those that are wanted: there was no memory */
    uint32_t width;            /* elements of a slot */
    struct shmb_where {
        uint32_t run, index; /* run: 1 + its number, 0: no item is there */
    } *where;                /* of each element */
    struct shmb_run *runs;
    uint32_t n_runs, room_runs, free_runs; /* free_runs: 1 + the first of them */
    struct shmb_owner *owners;
    uint32_t n_owners, room_owners, free_owners;
    uint32_t *table, shift; /* 1 + owner, at most half full */
    uint32_t last_owner;    /* 1 + the one that was asked for last: as a rule also the next one */
    struct shmb_marks marks; /* first items of trajectories of at least `least` items */
    uint32_t least;          /* 0: nobody has asked */
    struct shmb_marks held;  /* all elements with an item; not made before somebody asks */
    uint32_t looks;
    uint64_t count, items; /* trajectories; items in them */
    uint64_t moved;        /* runs, to make room for others of their owner */
    struct shmb_windows *windows; /* NULL: runs are not cut into windows */
    bool failed;           /* there was no memory: what is here is worth nothing until it is cleared */
};

bool shmb_trajectories_make(struct shmb_trajectories *all, uint64_t elements, uint32_t width);
void shmb_trajectories_free(struct shmb_trajectories *all);
bool shmb_trajectories_clear(struct shmb_trajectories *all);

/* The last item of a source, by slot of lane 0; of the call under way too: -1, or the slot that `slot` follows. */
int64_t shmb_trajectory_before(struct shmb_trajectories *all, uint64_t source, uint32_t slot);
void shmb_trajectory_append(struct shmb_trajectories *all, uint64_t source, uint32_t lane, uint32_t element, bool cut,
                            bool settled);
/* So many slots behind one whose item was appended, of one element each, follow it too; of those the first `settled`. */
void shmb_trajectories_extend(struct shmb_trajectories *all, uint32_t slot, uint32_t count, uint32_t settled);
/* False: that step is there already. */
bool shmb_trajectory_insert(struct shmb_trajectories *all, uint64_t source, uint32_t lane, int64_t id, int64_t step,
                            uint32_t element, uint32_t *there);
void shmb_trajectory_drop(struct shmb_trajectories *all, uint32_t element);
void shmb_trajectories_drop(struct shmb_trajectories *all, uint64_t element, uint64_t end); /* from one to another */
/* The item that an element follows, and the one that follows it, of the same owner; SHMB_NO_ELEMENT: none. */
uint32_t shmb_trajectory_neighbour(const struct shmb_trajectories *all, uint32_t element, bool after);
void shmb_trajectory_cut(struct shmb_trajectories *all, uint32_t element, bool cut); /* before it */

void shmb_trajectories_mark(struct shmb_trajectories *all, uint32_t least);
void shmb_trajectories_count(struct shmb_trajectories *all);

/* Rows: run << 32 | number of the item in it. */
static inline int64_t shmb_row_of(const struct shmb_trajectories *all, uint64_t element) {
    if (element >= all->elements || all->where[element].run == 0) return -1;
    uint32_t run = all->where[element].run - 1;
    return (int64_t)run << 32 | (uint32_t)(all->where[element].index - all->runs[run].front);
}

static inline uint32_t shmb_length_of(const struct shmb_trajectories *all, uint64_t run) {
    return run < all->n_runs && all->runs[run].items ? all->runs[run].back - all->runs[run].front : 0;
}

static inline int64_t shmb_element_of(const struct shmb_trajectories *all, int64_t row) {
    uint64_t run = (uint64_t)row >> 32;
    if (row < 0 || (uint32_t)row >= shmb_length_of(all, run)) return -1;
    return all->runs[run].items[(all->runs[run].front + (uint32_t)row) & all->runs[run].mask];
}

#endif
