/* Draws slices in few calls, if the flags that end trajectories and the flags of the batch are in columns.
 *
 *     follow ──▶ windows, slices ──▶ flags, and a second look at the words
 *
 * Data that are read for an item may belong to its successor in the slot. Its ticket then differs, too. */
#include "python/slicing.h"

#include <stdlib.h>
#include <string.h>

#include "core/ring.h"
#include "python/module.h"
#include "tables/windows.h"

#define LARGE_CALL 16384u /* items; more are handled by following.c, which releases the interpreter lock */

/* The layout of Python's table, int64 each. */
struct cutting {
    /* address of a column; bytes of an element in it */
    uint64_t base, bytes;
    uint64_t role;
};
enum { ENDS, BEGINS, IDS }; /* flag of the previous item; flag of this item; id that differs between them */

struct showing {
    uint64_t base;  /* address of a column of bytes; 0: not stored, all false */
    uint64_t width; /* bytes per element */
    uint64_t out;   /* [elements, width] */
    uint64_t role;
};
enum { AS_STORED, AND_LAST, AND_FIRST }; /* and true on the last, or first, step of each slice */

/* `runs`: the second number of each pair is a number of consecutive slots. */
static PyObject *slots_of(const struct shmb_pairs *pairs, bool runs) {
    uint64_t count = runs ? 0 : pairs->count;
    for (uint64_t i = 0; runs && i < pairs->count; i++) count += pairs->at[pairs->begin + i].second;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(int64_t)));
    if (bytes == NULL) return NULL;
    int64_t *slots = (int64_t *)(void *)PyBytes_AsString(bytes);
    for (uint64_t i = 0; i < pairs->count; i++) {
        struct shmb_pair one = pairs->at[pairs->begin + i];
        for (uint64_t more = 0; more < (runs ? one.second : 1); more++) *slots++ = (int64_t)(one.first + more);
    }
    return bytes;
}

PyObject *shmb_build_changes(const struct shmb_follower *f, bool restarted) {
    PyObject *removed = slots_of(&f->removed, true), *changed = slots_of(&f->changed, false), *result = NULL;
    if (removed && changed) result = Py_BuildValue("(OOO)", restarted ? Py_True : Py_False, removed, changed);
    Py_XDECREF(removed);
    Py_XDECREF(changed);
    return result;
}

int64_t shmb_accept_predecessor(uint64_t capacity, int64_t before, uint64_t slot, uint64_t reach) {
    uint64_t back = slot < (uint64_t)before ? slot + capacity - (uint64_t)before : slot - (uint64_t)before;
    return before >= 0 && back <= reach ? before : -1;
}

static bool any_in(const unsigned char *bytes, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        if (bytes[i]) return true;
    return false;
}

/* True if a trajectory begins at the element, whose predecessor is `before`. */
static inline bool is_cut(const struct cutting *cuts, uint64_t count, uint64_t element, uint64_t before) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = cuts[i].bytes;
        const unsigned char *base = (const unsigned char *)(uintptr_t)cuts[i].base, *at = base + element * bytes;
        const unsigned char *from = base + before * bytes;
        if (cuts[i].role == IDS ? memcmp(at, from, bytes) != 0 : any_in(cuts[i].role == ENDS ? from : at, bytes)) return true;
    }
    return false;
}

static void append_slots(struct shmb_trajectories *all, const struct shmb_follower *f, const struct cutting *cuts, uint64_t n_cuts,
                         const int64_t *slots, const int64_t *reach, uint64_t count) {
    const uint64_t width = all->width, capacity = f->ring->capacity;
    all->calls++;
    for (uint64_t i = 0; i < count && !all->failed; i++) {
        uint64_t slot = (uint64_t)slots[i], source = f->ring->sources[slot];
        int64_t before = shmb_trajectory_find_predecessor(all, source, (uint32_t)slot);
        bool appended = false;
        before = shmb_accept_predecessor(capacity, before, slot, (uint64_t)reach[i]);
        for (uint64_t lane = 0; lane < width && !all->failed; lane++) {
            uint64_t element = slot * width + lane;
            if (element >= all->elements || all->where[element].run) continue;
            bool cut = before < 0 || is_cut(cuts, n_cuts, element, (uint64_t)before * width + lane);
            shmb_trajectory_append(all, source, (uint32_t)lane, (uint32_t)element, cut, i < f->settled);
            appended = true;
        }
        if (width > 1 || !appended || all->failed) continue;
        uint64_t more = 0; /* further consecutive slots, as is usual */
        for (uint64_t next = slot + 1; i + more + 1 < count && next < all->elements; next++, more++) {
            const uint64_t at = i + more + 1;
            if ((uint64_t)slots[at] != next || f->ring->sources[next] != source || reach[at] < 1 || all->where[next].run) break;
            if (is_cut(cuts, n_cuts, next, next - 1)) break;
        }
        if (more) shmb_trajectories_extend(all, (uint32_t)slot, (uint32_t)more, i < f->settled ? (uint32_t)(f->settled - i - 1) : 0);
        i += more;
    }
}

/* False: out of memory. */
static bool catch_up(struct shmb_trajectories *all, struct shmb_follower *f, const struct cutting *cuts, uint64_t n_cuts) {
    for (uint64_t i = 0; i < f->removed.count; i++) {
        struct shmb_pair removed = f->removed.at[f->removed.begin + i];
        uint64_t first = removed.first * all->width, end = first + removed.second * all->width;
        if (end <= all->elements) shmb_trajectories_drop(all, first, end);
    }
    if (all->windows) all->windows->seen = f->seen;
    uint64_t max_count = f->end - f->at, count;
    int64_t *slots = malloc((2 * max_count + 1) * sizeof *slots);
    if (slots == NULL) return false;
    while (!all->failed && (count = shmb_follower_next(f, slots, slots + max_count, max_count)) > 0)
        append_slots(all, f, cuts, n_cuts, slots, slots + max_count, count);
    free(slots);
    return !f->failed && !all->failed && !(all->windows && all->windows->failed);
}

/* -> the head that was seen; or the result of the poll, if more must be done than appending */
PyObject *shmb_trajectories_follow(PyObject *trajectories, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(trajectories);
    PyObject *follower;
    unsigned long long cuts, count;
    bool restarted = false;
    if (!PyArg_ParseTuple(args, "O!KK:follow", shmb_follower_type, &follower, &cuts, &count)) return NULL;
    struct shmb_follower *f = shmb_follower_in(follower);
    if (all->failed) return PyErr_NoMemory();
    uint64_t head = atomic_load_explicit(&f->ring->runtime->head, memory_order_relaxed);
    if (!f->started || head - f->seen >= LARGE_CALL) Py_RETURN_NONE;
    bool any = shmb_follower_poll(f, &restarted);
    if (any && !f->failed && (restarted || f->changed.count)) return shmb_build_changes(f, restarted);
    if (f->failed || (any && !catch_up(all, f, (const struct cutting *)(uintptr_t)cuts, count))) {
        shmb_follower_forget(f);
        return PyErr_NoMemory();
    }
    return PyLong_FromUnsignedLongLong(f->seen);
}


static uint32_t element_in(const struct shmb_run *run, uint32_t number) { return run->items[(run->front + number) & run->mask]; }

/* -> number of windows. Delivers the next windows, with all their elements. */
PyObject *shmb_trajectories_read_windows(PyObject *trajectories, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(trajectories);
    unsigned long long count, newest, out;
    if (!PyArg_ParseTuple(args, "KKK:read_windows", &count, &newest, &out)) return NULL;
    if (all->failed) return PyErr_NoMemory();
    if (all->windows == NULL) return PyErr_Format(PyExc_ValueError, "Trajectories.read_windows() needs windows. Call cut_by() first.");
    int64_t *elements = (int64_t *)(uintptr_t)out;
    uint32_t steps = all->windows->steps;
    uint64_t delivered = shmb_windows_claim(all, count, newest, elements);
    for (uint64_t i = delivered; i-- > 0;) { /* backwards, because the first elements are stored where the others go */
        const struct shmb_run_place *where = &all->where[elements[i]];
        const struct shmb_run *run = &all->runs[where->run - 1];
        for (uint32_t step = 0, from = where->index - run->front; step < steps; step++)
            elements[i * steps + step] = element_in(run, from + step);
    }
    return PyLong_FromUnsignedLongLong(delivered);
}

/* Stores the elements of slices of trajectories that are long enough. Two numbers select each slice. False: no
 * trajectory is. */
PyObject *shmb_trajectories_draw_slices(PyObject *trajectories, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(trajectories);
    unsigned long long which, begins, count, steps, from, out;
    if (!PyArg_ParseTuple(args, "KKKKKK:draw_slices", &which, &begins, &count, &steps, &from, &out)) return NULL;
    if (all->failed) return PyErr_NoMemory();
    if (steps == 0 || steps > UINT32_MAX || from >= all->elements) return PyErr_Format(PyExc_ValueError, "Trajectories.draw_slices(): slices of %llu steps are not supported, or `from` is not an element.", steps);
    shmb_trajectories_mark(all, (uint32_t)steps);
    const struct shmb_marks *marks = &all->marks;
    if (marks->total == 0) Py_RETURN_FALSE;
    uint64_t before = shmb_marks_below(marks, from);
    int64_t *elements = (int64_t *)(uintptr_t)out;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t k = ((const uint64_t *)(uintptr_t)which)[i] % marks->total;
        const struct shmb_run *run = &all->runs[all->where[shmb_marks_at(marks, (k + before) % marks->total)].run - 1];
        uint64_t places = run->back - run->front - steps + 1;
        uint32_t begin = (uint32_t)(((const uint64_t *)(uintptr_t)begins)[i] % places);
        for (uint32_t step = 0; step < steps; step++) *elements++ = element_in(run, begin + step);
    }
    Py_RETURN_TRUE;
}

/* Reads the tickets of items that the follower reported. False: an item is gone. */
static bool seen_tickets(const struct shmb_follower *f, const int64_t *elements, uint64_t count, int64_t *tickets) {
    bool present = true;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&f->ring->words[(uint64_t)elements[i] / f->ring->lanes], memory_order_relaxed);
        tickets[i] = (int64_t)SHMB_TICKET(word);
        present = present && SHMB_STATE(word) == SHMB_COMMITTED && SHMB_TICKET(word) < f->seen;
    }
    return present;
}

bool shmb_read_histories(const struct shmb_trajectories *all, const struct shmb_follower *f, const int64_t *at, const int64_t *drawn,
                    uint64_t count, uint64_t steps, int64_t *out, int64_t *tickets) {
    int64_t *elements = out;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t element = (uint64_t)at[i];
        if (element >= all->elements || all->where[element].run == 0) return false;
        const struct shmb_run *run = &all->runs[all->where[element].run - 1];
        uint32_t number = all->where[element].index - run->front;
        for (uint64_t back = steps; back-- > 0;) *elements++ = element_in(run, number > back ? number - (uint32_t)back : 0);
    }
    if (f == NULL) return true;
    if (!seen_tickets(f, out, count * steps, tickets)) return false;
    for (uint64_t i = 0; drawn && i < count; i++)
        if (tickets[(i + 1) * steps - 1] != drawn[i]) return false;
    return true;
}

PyObject *shmb_trajectories_read_histories(PyObject *trajectories, PyObject *args) {
    const struct shmb_trajectories *all = shmb_trajectories_in(trajectories);
    PyObject *follower;
    unsigned long long at, drawn, count, steps, out, tickets;
    if (!PyArg_ParseTuple(args, "OKKKKKK:read_histories", &follower, &at, &drawn, &count, &steps, &out, &tickets)) return NULL;
    if (all->failed) return PyErr_NoMemory();
    if (follower != Py_None && !PyObject_TypeCheck(follower, shmb_follower_type))
        return PyErr_Format(PyExc_TypeError, "Trajectories.read_histories() needs a Follower or None as the first argument.");
    return PyBool_FromLong(shmb_read_histories(all, follower == Py_None ? NULL : shmb_follower_in(follower),
                                          (const int64_t *)(uintptr_t)at, (const int64_t *)(uintptr_t)drawn, count, steps,
                                          (int64_t *)(uintptr_t)out, (int64_t *)(uintptr_t)tickets));
}

static void show(const struct showing *one, const int64_t *elements, uint64_t count, uint64_t steps) {
    const unsigned char *base = (const unsigned char *)(uintptr_t)one->base;
    unsigned char *out = (unsigned char *)(uintptr_t)one->out;
    for (uint64_t i = 0, step = 0; i < count; i++, step = step + 1 < steps ? step + 1 : 0) {
        bool always = (one->role == AND_LAST && step + 1 == steps) || (one->role == AND_FIRST && step == 0);
        for (uint64_t j = 0; j < one->width; j++)
            *out++ = always || (base && base[(uint64_t)elements[i] * one->width + j] != 0);
    }
}

/* Stores the flags of consecutive slices, and the tickets. False: an item is gone. */
PyObject *shmb_follower_read_flags(PyObject *follower, PyObject *args) {
    const struct shmb_follower *f = shmb_follower_in(follower);
    const struct shmb_ring *ring = f->ring;
    unsigned long long at, count, steps, shown, n_shown, out;
    if (!PyArg_ParseTuple(args, "KKKKKK:read_flags", &at, &count, &steps, &shown, &n_shown, &out)) return NULL;
    const int64_t *elements = (const int64_t *)(uintptr_t)at;
    int64_t *tickets = (int64_t *)(uintptr_t)out;
    for (uint64_t i = 0; i < count; i++)
        if ((uint64_t)elements[i] >= ring->elements) Py_RETURN_FALSE;
    for (uint64_t i = 0; i < n_shown; i++) show(&((const struct showing *)(uintptr_t)shown)[i], elements, count, steps);
    atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
    return PyBool_FromLong(seen_tickets(f, elements, count, tickets));
}
