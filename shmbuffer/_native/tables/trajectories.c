/* Trajectories as runs of items whose steps are consecutive.
 *
 *     owner   source, lane (and id)     runs   0..4   5..7   9..12
 *     run     elements, a ring buffer   items can be added and removed at both ends in constant time
 *     where   for each element          its run, and index in it
 *     marks   first elements            of runs that are long enough: counts them, and selects the k-th
 *
 * If the items are stored in order, a step is the number of the item of its owner, and the caller marks the ends of
 * trajectories. If they are stored in any order, the caller gives the steps, and a run ends at a missing step. */
#include "tables/trajectories.h"

#include <stdlib.h>
#include <string.h>

#include "tables/windows.h"

#define FIRST_CAPACITY 4u /* initial capacity of a run, and of an owner's list */

static inline uint32_t length(const struct shmb_run *run) { return run->back - run->front; }

static inline uint32_t *item(const struct shmb_run *run, uint32_t index) { return &run->items[index & run->mask]; }

static inline int64_t add_steps(int64_t step, uint32_t steps) { return (int64_t)((uint64_t)step + steps); }

static inline int64_t end_of(const struct shmb_run *run) { return add_steps(run->step, length(run)); }

/* Owners, and their hash table. */

static inline uint32_t place_of(const struct shmb_trajectories *all, uint64_t source, int64_t id, uint32_t lane) {
    uint64_t mixed = (source ^ (uint64_t)id * 0xC2B2AE3D27D4EB4Fu) + lane * 0x165667B19E3779F9u;
    return (uint32_t)((mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u >> all->shift);
}

static inline uint32_t next_place(const struct shmb_trajectories *all, uint32_t at) {
    return (at + 1) & (uint32_t)(((uint64_t)1 << (64 - all->shift)) - 1);
}

static uint32_t find_owner_slot(const struct shmb_trajectories *all, uint64_t source, int64_t id, uint32_t lane) {
    uint32_t at = place_of(all, source, id, lane);
    for (; all->table[at]; at = next_place(all, at)) {
        const struct shmb_owner *owner = &all->owners[all->table[at] - 1];
        if (owner->source == source && owner->id == id && owner->lane == lane) break;
    }
    return at;
}

static bool grow_owners(struct shmb_trajectories *all) {
    uint32_t capacity = all->owners_capacity ? 2 * all->owners_capacity : 64;
    struct shmb_owner *owners = realloc(all->owners, capacity * sizeof *owners);
    if (owners) all->owners = owners;
    uint32_t *table = calloc((size_t)2 * capacity, sizeof *table);
    if (owners == NULL || table == NULL) return free(table), false;
    free(all->table);
    all->table = table;
    all->owners_capacity = capacity;
    all->shift = 63u - (uint32_t)__builtin_ctz(capacity);
    for (uint32_t i = 0; i < all->n_owners; i++)
        if (owners[i].runs) table[find_owner_slot(all, owners[i].source, owners[i].id, owners[i].lane)] = i + 1;
    return true;
}

/* NULL: out of memory. */
static struct shmb_owner *find_or_add_owner(struct shmb_trajectories *all, uint64_t source, int64_t id, uint32_t lane) {
    uint32_t at = find_owner_slot(all, source, id, lane);
    if (all->table[at]) return &all->owners[(all->last_owner = all->table[at]) - 1];
    uint32_t *runs = malloc(FIRST_CAPACITY * sizeof *runs);
    if (runs == NULL) return NULL;
    uint32_t number = all->free_owners;
    if (number) {
        all->free_owners = all->owners[number - 1].count;
    } else {
        if (all->n_owners == all->owners_capacity) {
            if (!grow_owners(all)) return free(runs), NULL;
            at = find_owner_slot(all, source, id, lane);
        }
        number = ++all->n_owners;
    }
    all->table[at] = number;
    struct shmb_owner *owner = &all->owners[number - 1];
    *owner = (struct shmb_owner){.source = source, .id = id, .lane = lane, .runs = runs, .capacity = FIRST_CAPACITY};
    return owner;
}

static inline struct shmb_owner *owner_of(struct shmb_trajectories *all, uint64_t source, int64_t id, uint32_t lane) {
    struct shmb_owner *last = all->last_owner ? &all->owners[all->last_owner - 1] : NULL;
    if (last && last->runs && last->source == source && last->id == id && last->lane == lane) return last;
    return find_or_add_owner(all, source, id, lane);
}

/* Later entries of the same probe sequence move into the gap. */
static void remove_owner(struct shmb_trajectories *all, struct shmb_owner *owner) {
    uint32_t at = find_owner_slot(all, owner->source, owner->id, owner->lane), number = all->table[at];
    for (uint32_t gap = at;;) {
        all->table[gap] = 0;
        for (at = next_place(all, gap);; at = next_place(all, at)) {
            if (all->table[at] == 0) goto moved;
            const struct shmb_owner *other = &all->owners[all->table[at] - 1];
            uint32_t home = place_of(all, other->source, other->id, other->lane);
            bool between = gap < at ? gap < home && home <= at : gap < home || home <= at;
            if (!between) break;
        }
        all->table[gap] = all->table[at];
        gap = at;
    }
moved:
    free(owner->runs);
    *owner = (struct shmb_owner){.count = all->free_owners};
    all->free_owners = number;
}

static inline uint32_t *runs_of(const struct shmb_owner *owner) { return owner->runs + owner->begin; }

/* Number of runs of an owner that begin at that step or earlier. */
static uint32_t runs_until(const struct shmb_trajectories *all, const struct shmb_owner *owner, int64_t step) {
    uint32_t low = 0, high = owner->count;
    if (high && all->runs[runs_of(owner)[high - 1]].step <= step) return high; /* the usual case */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (all->runs[runs_of(owner)[middle]].step <= step)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static uint32_t place_among(const struct shmb_trajectories *all, uint32_t run) {
    const struct shmb_owner *owner = &all->owners[all->runs[run].owner];
    return runs_of(owner)[0] == run ? 0 : runs_until(all, owner, all->runs[run].step) - 1;
}

/* Runs. */

static void set_run_mark(struct shmb_trajectories *all, struct shmb_run *run, uint32_t first) {
    if (run->marked != SHMB_NO_ELEMENT) shmb_marks_set(&all->marks, run->marked, false);
    if (first != SHMB_NO_ELEMENT) shmb_marks_set(&all->marks, first, true);
    run->marked = first;
}

static inline void update_run_mark(struct shmb_trajectories *all, struct shmb_run *run) {
    bool is_long = all->least && length(run) >= all->least;
    uint32_t first = is_long ? *item(run, run->front) : SHMB_NO_ELEMENT;
    if (run->marked != first) set_run_mark(all, run, first);
}

/* Inserts an empty run at position `at` of its owner. SHMB_NO_ELEMENT: out of memory. */
static uint32_t add_run(struct shmb_trajectories *all, uint32_t owner_number, uint32_t at, int64_t step) {
    struct shmb_owner *owner = &all->owners[owner_number];
    if (owner->begin + owner->count == owner->capacity) {
        if (owner->begin > owner->count) { /* more than half of the list is unused */
            memmove(owner->runs, runs_of(owner), owner->count * sizeof *owner->runs);
            owner->begin = 0;
        } else {
            uint32_t *runs = realloc(owner->runs, (size_t)2 * owner->capacity * sizeof *runs);
            if (runs == NULL) return all->failed = true, SHMB_NO_ELEMENT;
            owner->runs = runs;
            owner->capacity *= 2;
        }
    }
    uint32_t *items = malloc(FIRST_CAPACITY * sizeof *items), number = all->free_runs;
    if (items == NULL) return all->failed = true, SHMB_NO_ELEMENT;
    if (number) {
        all->free_runs = all->runs[--number].front;
    } else {
        if (all->n_runs == all->runs_capacity) {
            uint32_t capacity = all->runs_capacity ? 2 * all->runs_capacity : 64;
            struct shmb_run *runs = realloc(all->runs, capacity * sizeof *runs);
            if (runs == NULL) return free(items), all->failed = true, SHMB_NO_ELEMENT;
            all->runs = runs;
            all->runs_capacity = capacity;
        }
        number = all->n_runs++;
    }
    all->runs[number] = (struct shmb_run){
        .items = items, .mask = FIRST_CAPACITY - 1, .owner = owner_number, .marked = SHMB_NO_ELEMENT, .step = step};
    memmove(&runs_of(owner)[at + 1], &runs_of(owner)[at], (owner->count - at) * sizeof *owner->runs);
    all->moved += owner->count - at;
    runs_of(owner)[at] = number;
    owner->count++;
    all->count++;
    return number;
}

/* Removes the run at position `at` of its owner. */
static void remove_run(struct shmb_trajectories *all, uint32_t owner_number, uint32_t at) {
    struct shmb_owner *owner = &all->owners[owner_number];
    uint32_t number = runs_of(owner)[at];
    struct shmb_run *run = &all->runs[number];
    if (run->marked != SHMB_NO_ELEMENT) shmb_marks_set(&all->marks, run->marked, false);
    if (at == 0)
        owner->begin++;
    else
        memmove(&runs_of(owner)[at], &runs_of(owner)[at + 1], (owner->count - at - 1) * sizeof *owner->runs);
    all->moved += at ? owner->count - at - 1 : 0;
    free(run->items);
    *run = (struct shmb_run){.front = all->free_runs};
    all->free_runs = number + 1;
    all->count--;
    if (--owner->count == 0) remove_owner(all, owner);
}

static bool widen_run(struct shmb_trajectories *all, struct shmb_run *run) {
    uint32_t mask = 2 * run->mask + 1, *items = malloc(((size_t)mask + 1) * sizeof *items);
    if (items == NULL) return all->failed = true, false;
    for (uint32_t i = run->front; i != run->back; i++) items[i & mask] = *item(run, i);
    free(run->items);
    run->items = items;
    run->mask = mask;
    return true;
}

static inline void append_item(struct shmb_trajectories *all, uint32_t number, uint32_t element) {
    struct shmb_run *run = &all->runs[number];
    if (length(run) > run->mask && !widen_run(all, run)) return;
    all->where[element] = (struct shmb_run_place){number + 1, run->back};
    *item(run, run->back++) = element;
}

static void prepend_item(struct shmb_trajectories *all, uint32_t number, uint32_t element) {
    struct shmb_run *run = &all->runs[number];
    if (length(run) > run->mask && !widen_run(all, run)) return;
    all->where[element] = (struct shmb_run_place){number + 1, --run->front};
    *item(run, run->front) = element;
    run->step--;
}

/* Joins the run at position `at` of an owner with the following one. The items of the shorter run are moved. */
static void join_runs(struct shmb_trajectories *all, uint32_t owner_number, uint32_t at) {
    uint32_t one = runs_of(&all->owners[owner_number])[at], other = runs_of(&all->owners[owner_number])[at + 1];
    struct shmb_run *first = &all->runs[one], *second = &all->runs[other];
    bool into_first = length(first) >= length(second);
    if (into_first)
        for (uint32_t i = second->front; i != second->back && !all->failed; i++) append_item(all, one, *item(second, i));
    else
        for (uint32_t i = first->back; i != first->front && !all->failed;) prepend_item(all, other, *item(first, --i));
    remove_run(all, owner_number, into_first ? at + 1 : at);
    update_run_mark(all, &all->runs[into_first ? one : other]);
    if (all->windows) shmb_windows_realign(all, &all->runs[into_first ? one : other]);
}

/* Splits a run before the item at `index`. */
static void split_run(struct shmb_trajectories *all, uint32_t number, uint32_t index) {
    uint32_t owner_number = all->runs[number].owner, at = place_among(all, number);
    uint32_t before = index - all->runs[number].front, next_run = all->runs[number].back - index;
    uint32_t new_run = add_run(all, owner_number, before < next_run ? at : at + 1, all->runs[number].step + (before < next_run ? 0 : before));
    if (new_run == SHMB_NO_ELEMENT) return;
    struct shmb_run *run = &all->runs[number];
    if (before < next_run) {
        for (uint32_t i = run->front; i != index && !all->failed; i++) append_item(all, new_run, *item(run, i));
        run->front = index;
        run->step += before;
    } else {
        for (uint32_t i = index; i != run->back && !all->failed; i++) append_item(all, new_run, *item(run, i));
        run->back = index;
    }
    update_run_mark(all, &all->runs[number]);
    update_run_mark(all, &all->runs[new_run]);
    if (all->windows) shmb_windows_realign(all, &all->runs[number]);
    if (all->windows) shmb_windows_realign(all, &all->runs[new_run]);
}

static void count_item(struct shmb_trajectories *all, uint32_t element, bool added) {
    all->items += added ? 1u : UINT64_MAX;
    if (all->item_marks.bits) shmb_marks_set(&all->item_marks, element, added);
}

/* The whole table. */

bool shmb_trajectories_make(struct shmb_trajectories *all, uint64_t elements, uint32_t width) {
    *all = (struct shmb_trajectories){.wanted = elements, .elements = elements, .width = width};
    all->where = calloc(elements, sizeof *all->where); /* pages that are never touched are not allocated */
    if (all->where != NULL && grow_owners(all) && shmb_marks_make(&all->marks, elements)) return true;
    shmb_trajectories_free(all);
    all->wanted = elements;
    all->width = width;
    all->failed = true;
    return false;
}

void shmb_trajectories_free(struct shmb_trajectories *all) {
    for (uint32_t i = 0; i < all->n_runs; i++) free(all->runs[i].items);
    for (uint32_t i = 0; i < all->n_owners; i++) free(all->owners[i].runs);
    free(all->runs);
    free(all->owners);
    free(all->table);
    free(all->where);
    shmb_marks_free(&all->marks);
    shmb_marks_free(&all->item_marks);
    *all = (struct shmb_trajectories){0};
}

bool shmb_trajectories_clear(struct shmb_trajectories *all) {
    uint32_t least = all->least, width = all->width;
    uint64_t elements = all->wanted;
    bool counted = all->item_marks.bits != NULL;
    struct shmb_windows *windows = all->windows;
    shmb_trajectories_free(all);
    bool new_run = shmb_trajectories_make(all, elements, width);
    all->least = least;
    all->windows = windows;
    if (counted) shmb_trajectories_count(all);
    return new_run;
}

int64_t shmb_trajectory_find_predecessor(struct shmb_trajectories *all, uint64_t source, uint32_t slot) {
    struct shmb_owner *owner = owner_of(all, source, 0, 0);
    if (owner == NULL) return all->failed = true, -1;
    int64_t before = -1;
    if (owner->call == all->calls) {
        before = owner->last;
    } else if (owner->count) {
        const struct shmb_run *run = &all->runs[runs_of(owner)[owner->count - 1]];
        before = *item(run, run->back - 1) / all->width;
    }
    owner->call = all->calls;
    owner->last = slot;
    return before;
}

void shmb_trajectory_append(struct shmb_trajectories *all, uint64_t source, uint32_t lane, uint32_t element, bool cut,
                            bool settled) {
    struct shmb_owner *owner = owner_of(all, source, 0, lane);
    if (owner == NULL) {
        all->failed = true;
        return;
    }
    uint32_t run = owner->count ? runs_of(owner)[owner->count - 1] : SHMB_NO_ELEMENT;
    int64_t step = owner->count ? end_of(&all->runs[run]) : 0;
    if (owner->count == 0 || cut) run = add_run(all, (uint32_t)(owner - all->owners), owner->count, step);
    if (all->failed) return;
    append_item(all, run, element);
    count_item(all, element, true);
    update_run_mark(all, &all->runs[run]);
    if (all->windows && settled) shmb_windows_extend(all, &all->runs[run]);
}

void shmb_trajectories_extend(struct shmb_trajectories *all, uint32_t slot, uint32_t count, uint32_t settled) {
    uint32_t number = all->where[slot].run - 1;
    all->owners[all->runs[number].owner].last = slot + count;
    for (uint32_t i = 1; i <= count && !all->failed; i++) {
        append_item(all, number, slot + i);
        count_item(all, slot + i, true);
        if (all->windows && i <= settled) shmb_windows_extend(all, &all->runs[number]);
    }
    update_run_mark(all, &all->runs[number]);
}

bool shmb_trajectory_insert(struct shmb_trajectories *all, uint64_t source, uint32_t lane, int64_t id, int64_t step,
                            uint32_t element, uint32_t *existing) {
    struct shmb_owner *owner = owner_of(all, source, id, lane);
    if (owner == NULL) return all->failed = true;
    uint32_t at = runs_until(all, owner, step), owner_number = (uint32_t)(owner - all->owners);
    uint32_t before = at ? runs_of(owner)[at - 1] : SHMB_NO_ELEMENT;
    uint32_t next_run = at < owner->count ? runs_of(owner)[at] : SHMB_NO_ELEMENT;
    if (at && step < end_of(&all->runs[before])) {
        const struct shmb_run *run = &all->runs[before];
        *existing = *item(run, run->front + (uint32_t)(step - run->step));
        return false;
    }
    bool follows = at && step == end_of(&all->runs[before]);
    bool leads = next_run != SHMB_NO_ELEMENT && all->runs[next_run].step == add_steps(step, 1);
    uint32_t run = follows ? before : leads ? next_run : add_run(all, owner_number, at, step);
    if (all->failed) return true;
    if (leads && !follows)
        prepend_item(all, run, element);
    else
        append_item(all, run, element);
    count_item(all, element, true);
    update_run_mark(all, &all->runs[run]);
    if (follows && leads) join_runs(all, owner_number, at - 1);
    return true;
}

void shmb_trajectory_drop(struct shmb_trajectories *all, uint32_t element) {
    if (all->where[element].run == 0) return;
    uint32_t number = all->where[element].run - 1, index = all->where[element].index;
    if (index != all->runs[number].front && index != all->runs[number].back - 1) {
        split_run(all, number, index);
        if (all->failed) return;
        number = all->where[element].run - 1;
        index = all->where[element].index;
        if (all->runs[number].cut == index) all->runs[number].cut++; /* windows begin behind the hole */
    }
    struct shmb_run *run = &all->runs[number];
    all->where[element].run = 0;
    count_item(all, element, false);
    if (length(run) == 1) {
        remove_run(all, run->owner, place_among(all, number));
        return;
    }
    if (index == run->front) {
        run->front++;
        run->step++;
        if (all->windows) shmb_windows_shrink(all, run);
    } else {
        run->back--;
        if ((int32_t)(run->cut - run->back) > 0) run->cut = run->back;
    }
    update_run_mark(all, run);
}

void shmb_trajectories_drop(struct shmb_trajectories *all, uint64_t element, uint64_t end) {
    while (element < end && !all->failed) {
        const uint32_t number = all->where[element].run, first = (uint32_t)element;
        struct shmb_run *run = number ? &all->runs[number - 1] : NULL;
        const uint32_t front = run ? run->front : 0;
        /* one item stays, because a run must not be empty */
        const uint64_t next_run = run ? element + length(run) - 1 : 0;
        for (; element < end && element < next_run; element++) { /* usually they are its first items, in order */
            struct shmb_run_place *where = &all->where[element];
            if (where->run != number || where->index != front + ((uint32_t)element - first)) break;
            where->run = 0;
            count_item(all, (uint32_t)element, false);
        }
        const uint32_t n_dropped = (uint32_t)element - first;
        if (n_dropped == 0) {
            shmb_trajectory_drop(all, (uint32_t)element++);
            continue;
        }
        run->front += n_dropped;
        run->step = add_steps(run->step, n_dropped);
        if (all->windows) shmb_windows_shrink(all, run);
        update_run_mark(all, run);
    }
}

uint32_t shmb_trajectory_neighbour(const struct shmb_trajectories *all, uint32_t element, bool after) {
    uint32_t number = all->where[element].run - 1, index = all->where[element].index;
    const struct shmb_run *run = &all->runs[number];
    if (after ? index + 1 != run->back : index != run->front) return *item(run, after ? index + 1 : index - 1);
    const struct shmb_owner *owner = &all->owners[run->owner];
    uint32_t at = place_among(all, number);
    if (after ? at + 1 == owner->count : at == 0) return SHMB_NO_ELEMENT;
    run = &all->runs[runs_of(owner)[after ? at + 1 : at - 1]];
    return *item(run, after ? run->front : run->back - 1);
}

void shmb_trajectory_cut(struct shmb_trajectories *all, uint32_t element, bool cut) {
    uint32_t number = all->where[element].run - 1, index = all->where[element].index;
    if (cut == (index == all->runs[number].front)) return;
    if (cut) {
        split_run(all, number, index);
        return;
    }
    uint32_t at = place_among(all, number);
    if (at) join_runs(all, all->runs[number].owner, at - 1);
}

void shmb_trajectories_mark(struct shmb_trajectories *all, uint32_t least) {
    if (all->least == least) return;
    all->least = least;
    shmb_marks_clear(&all->marks);
    for (uint32_t i = 0; i < all->n_runs; i++)
        if (all->runs[i].items) {
            all->runs[i].marked = SHMB_NO_ELEMENT;
            update_run_mark(all, &all->runs[i]);
        }
}

/* Starts to maintain the set of all items, from which the k-th can be selected. */
void shmb_trajectories_count(struct shmb_trajectories *all) {
    if (all->item_marks.bits || all->elements == 0) return;
    if (!shmb_marks_make(&all->item_marks, all->elements)) {
        all->failed = true;
        return;
    }
    for (uint64_t element = 0; element < all->elements && all->items; element++)
        if (all->where[element].run) shmb_marks_set(&all->item_marks, element, true);
}
