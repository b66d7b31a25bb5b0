/* Follower and Trajectories for Python. Addresses are passed as integers, as in arguments.c, and point to int64
 * unless stated otherwise. Only one thread at a time may use an object. The caller holds a lock, because long calls
 * release the interpreter lock. */
#include "python/slicing.h"

#include "core/ring.h"
#include "python/module.h"
#include "tables/windows.h"

#define LARGE_CALL 16384u /* items; for more, the interpreter lock is released */

static void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *allocate_object(PyTypeObject *type) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

/* Follower. */

static PyObject *follower_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *ring;
    if (!PyArg_ParseTuple(args, "O!:Follower", shmb_ring_type, &ring)) return NULL;
    PyObject *self = allocate_object(type);
    if (self == NULL) return NULL;
    ((struct follower_object *)self)->ring = Py_NewRef(ring);
    if (shmb_follower_make(shmb_follower_in(self), shmb_binding_ring(ring))) return self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void follower_dealloc(PyObject *self) {
    shmb_follower_free(shmb_follower_in(self));
    Py_XDECREF(((struct follower_object *)self)->ring);
    free_object(self);
}

static PyObject *follower_poll(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct shmb_follower *f = shmb_follower_in(self);
    bool restarted, any;
    uint64_t head = atomic_load_explicit(&f->ring->runtime->head, memory_order_relaxed);
    if (f->started && head - f->seen < LARGE_CALL) {
        any = shmb_follower_poll(f, &restarted);
    } else {
        Py_BEGIN_ALLOW_THREADS
        any = shmb_follower_poll(f, &restarted);
        Py_END_ALLOW_THREADS
    }
    if (f->failed) return PyErr_NoMemory();
    if (!any) Py_RETURN_NONE;
    return shmb_build_changes(f, restarted);
}

static PyObject *follower_next(PyObject *self, PyObject *args) {
    unsigned long long slots, reach, max_count;
    struct shmb_follower *f = shmb_follower_in(self);
    if (!PyArg_ParseTuple(args, "KKK:next", &slots, &reach, &max_count)) return NULL;
    if (!f->started) return PyErr_Format(PyExc_ValueError, "Follower.next() was called before poll(). Call poll() first.");
    uint64_t count;
    Py_BEGIN_ALLOW_THREADS
    count = shmb_follower_next(f, (int64_t *)(uintptr_t)slots, (int64_t *)(uintptr_t)reach, max_count);
    Py_END_ALLOW_THREADS
    return f->failed ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(count);
}

static PyObject *follower_reach(PyObject *self, PyObject *args) {
    unsigned long long slots, count, reach;
    const struct shmb_follower *f = shmb_follower_in(self);
    if (!PyArg_ParseTuple(args, "KKK:read_reach", &slots, &count, &reach)) return NULL;
    for (uint64_t i = 0; i < count; i++)
        ((int64_t *)(uintptr_t)reach)[i] = (int64_t)shmb_follower_read_reach(f, ((const uint64_t *)(uintptr_t)slots)[i]);
    Py_RETURN_NONE;
}

static PyObject *follower_forget(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    shmb_follower_forget(shmb_follower_in(self));
    Py_RETURN_NONE;
}

static PyObject *follower_seen(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_follower_in(self)->seen);
}

static PyObject *follower_settled(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_follower_in(self)->settled);
}

static PyObject *follower_overwritten(PyObject *self, void *Py_UNUSED(closure)) {
    const struct shmb_follower *f = shmb_follower_in(self);
    uint64_t count = 0;
    for (uint64_t i = 0; i < f->n_overwritten; i++) count += f->removed.at[f->removed.begin + i].second;
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *follower_pending(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_follower_in(self)->pending.count);
}

static PyObject *follower_report_in_order(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    shmb_follower_in(self)->reports_in_order = true;
    Py_RETURN_NONE;
}

static PyMethodDef follower_methods[] = {
    {"poll", follower_poll, METH_NOARGS,
     "poll(): returns (restarted, slots whose items are gone, slots with a new item in the same place); None: nothing changed."},
    {"next", follower_next, METH_VARARGS,
     "next(slots, reach, room): stores the next new items, oldest first, and returns their number. reach gets the number of\n"
     "places before each item without a hole. 0: there are no more."},
    {"read_flags", shmb_follower_read_flags, METH_VARARGS,
     "read_flags(elements, count, steps, shown, n_shown, tickets): stores flags of slices, see slicing.c. False: an item is gone."},
    {"read_reach", follower_reach, METH_VARARGS,
     "read_reach(slots, count, reach): stores the number of places before each slot without a hole; the slots hold items."},
    {"forget", follower_forget, METH_NOARGS, "forget(): makes the next poll report every item."},
    {"report_in_order", follower_report_in_order, METH_NOARGS,
     "report_in_order(): reports items behind an unfinished write again when that write ends."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef follower_properties[] = {
    {"seen", follower_seen, NULL, "Lower tickets were processed.", NULL},
    {"settled", follower_settled, NULL, "Items of the last next() before the first unfinished write.", NULL},
    {"overwritten", follower_overwritten, NULL, "How many of the slots whose items are gone, the first ones, were overwritten before the last poll().", NULL},
    {"pending", follower_pending, NULL, "Number of unfinished writes.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot follower_slots[] = {
    {Py_tp_doc, "Follower(ring): reports the items that were added and removed since the last poll."},
    {Py_tp_new, follower_new},
    {Py_tp_dealloc, follower_dealloc},
    {Py_tp_methods, follower_methods},
    {Py_tp_getset, follower_properties},
    {0, NULL},
};
PyType_Spec shmb_follower_spec = {.name = "shmbuffer._native._core.Follower",
                                  .basicsize = sizeof(struct follower_object),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = follower_slots};

/* Trajectories. */

static PyObject *trajectories_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    unsigned long long slots, width;
    if (!PyArg_ParseTuple(args, "KK:Trajectories", &slots, &width)) return NULL;
    if (slots == 0 || width == 0 || slots > SHMB_MAX_ELEMENTS / width)
        return PyErr_Format(PyExc_ValueError, "Trajectories: at most %llu elements are supported, but %llu slots of %llu elements were requested.",
                            (unsigned long long)SHMB_MAX_ELEMENTS, slots, width);
    PyObject *self = allocate_object(type);
    if (self == NULL) return NULL;
    if (shmb_trajectories_make(shmb_trajectories_in(self), slots * width, (uint32_t)width)) return self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void trajectories_dealloc(PyObject *self) {
    shmb_trajectories_free(shmb_trajectories_in(self));
    Py_XDECREF(((struct trajectories_object *)self)->windows);
    free_object(self);
}

/* Parses up to six numbers or addresses. False: the exception is set; also after an allocation failed, which makes
 * the contents invalid. */
static bool parse_arguments(PyObject *self, PyObject *args, const char *format, unsigned long long *at) {
    if (!PyArg_ParseTuple(args, format, &at[0], &at[1], &at[2], &at[3], &at[4], &at[5])) return false;
    if (shmb_trajectories_in(self)->failed) return PyErr_NoMemory(), false;
    return true;
}

static PyObject *finish_call(PyObject *self) {
    const struct shmb_trajectories *all = shmb_trajectories_in(self);
    if (all->failed || (all->windows && all->windows->failed)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define IN(type, n) ((const type *)(uintptr_t)at[n])
#define OUT(n) ((int64_t *)(uintptr_t)at[n])

static PyObject *trajectories_clear(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Py_BEGIN_ALLOW_THREADS
    shmb_trajectories_clear(shmb_trajectories_in(self));
    Py_END_ALLOW_THREADS
    return finish_call(self);
}

static PyObject *trajectories_drop(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KK:drop", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < at[1]; i++)
        for (uint64_t e = IN(uint64_t, 0)[i] * all->width, end = e + all->width; e < end && end <= all->elements; e++)
            shmb_trajectory_drop(all, (uint32_t)e);
    Py_END_ALLOW_THREADS
    return finish_call(self);
}

static PyObject *trajectories_find_predecessors(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKKKK:find_predecessors", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    all->calls++;
    for (uint64_t i = 0; i < at[3] && !all->failed; i++) {
        uint64_t slot = IN(uint64_t, 0)[i];
        OUT(4)[i] = shmb_accept_predecessor(all->elements / all->width, shmb_trajectory_find_predecessor(all, IN(uint64_t, 1)[i], (uint32_t)slot), slot, IN(uint64_t, 2)[i]);
    }
    Py_END_ALLOW_THREADS
    return finish_call(self);
}

static PyObject *trajectories_append(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKKKK:append", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < at[3] && !all->failed; i++)
        for (uint32_t lane = 0; lane < all->width && !all->failed; lane++) {
            uint64_t element = IN(uint64_t, 0)[i] * all->width + lane;
            if (element < all->elements && all->where[element].run == 0)
                shmb_trajectory_append(all, IN(uint64_t, 1)[i], lane, (uint32_t)element,
                                       IN(unsigned char, 2)[i * all->width + lane] != 0, i < at[4]);
        }
    Py_END_ALLOW_THREADS
    return finish_call(self);
}

static PyObject *trajectories_insert(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    uint32_t existing = 0;
    uint64_t i = 0;
    bool inserted = true;
    if (!parse_arguments(self, args, "KKKKK:insert", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (; i < at[4] && inserted && !all->failed; i++) {
        uint64_t element = IN(uint64_t, 0)[i];
        if (element < all->elements && all->where[element].run == 0)
            inserted = shmb_trajectory_insert(all, IN(uint64_t, 1)[i], (uint32_t)(element % all->width), IN(int64_t, 2)[i],
                                              IN(int64_t, 3)[i], (uint32_t)element, &existing);
    }
    Py_END_ALLOW_THREADS
    if (inserted) return finish_call(self);
    return Py_BuildValue("(KK)", (unsigned long long)(i - 1), (unsigned long long)existing);
}

static PyObject *trajectories_list_neighbours(PyObject *self, PyObject *args) {
    const struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKKKK:list_neighbours", at)) return NULL;
    uint64_t count = 0;
    for (uint64_t i = 0; i < at[2]; i++) {
        uint64_t element = IN(uint64_t, 0)[i] * all->width;
        if (element >= all->elements || all->where[element].run == 0) Py_RETURN_NONE;
        if (all->owners[all->runs[all->where[element].run - 1].owner].source != IN(uint64_t, 1)[i]) Py_RETURN_NONE;
        uint32_t before = shmb_trajectory_neighbour(all, (uint32_t)element, false);
        uint32_t successor = shmb_trajectory_neighbour(all, (uint32_t)element, true);
        if (before != SHMB_NO_ELEMENT) {
            OUT(3)[count] = (int64_t)IN(uint64_t, 0)[i];
            OUT(4)[count++] = before / all->width;
        }
        if (successor != SHMB_NO_ELEMENT) {
            OUT(3)[count] = successor / all->width;
            OUT(4)[count++] = (int64_t)IN(uint64_t, 0)[i];
        }
    }
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *trajectories_cut(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKK:cut", at)) return NULL;
    for (uint64_t i = 0; i < at[2]; i++)
        for (uint32_t lane = 0; lane < all->width && !all->failed; lane++) {
            uint64_t element = IN(uint64_t, 0)[i] * all->width + lane;
            if (element < all->elements && all->where[element].run)
                shmb_trajectory_cut(all, (uint32_t)element, IN(unsigned char, 1)[i * all->width + lane] != 0);
        }
    return finish_call(self);
}

static PyObject *trajectories_count_long(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_arguments(self, args, "K:count_long", at)) return NULL;
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    uint32_t least = at[0] > UINT32_MAX ? UINT32_MAX : (uint32_t)at[0];
    if (all->least != least) {
        Py_BEGIN_ALLOW_THREADS
        shmb_trajectories_mark(all, least);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromUnsignedLongLong(all->marks.total);
}

/* Selects elements by their number in a set. The numbering starts at the element at[3]. */
static PyObject *find_by_number(PyObject *self, PyObject *args, const char *format, const struct shmb_marks *marks) {
    unsigned long long at[6];
    if (!parse_arguments(self, args, format, at)) return NULL;
    if (at[3] >= shmb_trajectories_in(self)->elements) return PyErr_Format(PyExc_IndexError, "Trajectories: there is no element %llu. Pass a number below the number of elements.", at[3]);
    Py_BEGIN_ALLOW_THREADS
    uint64_t before = shmb_marks_below(marks, at[3]);
    for (uint64_t i = 0; i < at[1]; i++) {
        uint64_t k = IN(uint64_t, 0)[i];
        OUT(2)[i] = k < marks->total ? (int64_t)shmb_marks_at(marks, (k + before) % marks->total) : -1;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *trajectories_list_firsts(PyObject *self, PyObject *args) {
    return find_by_number(self, args, "KKKK:list_firsts", &shmb_trajectories_in(self)->marks);
}

static PyObject *trajectories_list_items(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    if (!all->failed) shmb_trajectories_count(all);
    return find_by_number(self, args, "KKKK:list_items", &all->item_marks);
}

/* Maps numbers one by one. */
static PyObject *map_numbers(PyObject *self, PyObject *args, const char *format,
                      int64_t (*answer)(const struct shmb_trajectories *all, int64_t number)) {
    const struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, format, at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < at[1]; i++) OUT(2)[i] = answer(all, IN(int64_t, 0)[i]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static int64_t row_of(const struct shmb_trajectories *all, int64_t element) { return shmb_find_row(all, (uint64_t)element); }

static int64_t steps_of(const struct shmb_trajectories *all, int64_t run) { return shmb_run_length(all, (uint64_t)run); }

static PyObject *trajectories_find_rows(PyObject *self, PyObject *args) { return map_numbers(self, args, "KKK:find_rows", row_of); }

static PyObject *trajectories_find_elements(PyObject *self, PyObject *args) {
    return map_numbers(self, args, "KKK:find_elements", shmb_find_element);
}

static PyObject *trajectories_read_lengths(PyObject *self, PyObject *args) { return map_numbers(self, args, "KKK:read_lengths", steps_of); }

static PyObject *trajectories_cut_by(PyObject *self, PyObject *windows) {
    struct trajectories_object *object = (struct trajectories_object *)self;
    struct shmb_windows *w = shmb_windows_in(windows);
    if (w == NULL) return NULL;
    if (w->elements != object->all.elements || object->all.items || object->windows)
        return PyErr_Format(PyExc_ValueError, "Trajectories.cut_by() needs Windows of the same elements, once, before the first item is added.");
    object->windows = Py_NewRef(windows);
    object->all.windows = w;
    Py_RETURN_NONE;
}

static PyObject *trajectories_claim_windows(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    uint64_t count;
    if (!parse_arguments(self, args, "KKK:claim_windows", at)) return NULL;
    if (all->windows == NULL) return PyErr_Format(PyExc_ValueError, "Trajectories.claim_windows() needs windows. Call cut_by() first.");
    Py_BEGIN_ALLOW_THREADS
    count = shmb_windows_claim(all, at[0], at[1], OUT(2));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *trajectories_list_used(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KK:list_used", at)) return NULL;
    if (all->windows == NULL) return PyErr_Format(PyExc_ValueError, "Trajectories.list_used() needs windows. Call cut_by() first.");
    Py_BEGIN_ALLOW_THREADS
    shmb_windows_list_used(all, OUT(0), at[1] != 0);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#define COUNT(name, expression)                                                                              \
    static PyObject *get_##name(PyObject *self, void *Py_UNUSED(closure)) {                                  \
        const struct shmb_trajectories *all = shmb_trajectories_in(self);                                         \
        return PyLong_FromUnsignedLongLong(expression);                                                      \
    }
static uint64_t longest_of(const struct shmb_trajectories *all) {
    uint32_t longest = 0;
    for (uint32_t i = 0; i < all->n_runs; i++)
        if (shmb_run_length(all, i) > longest) longest = shmb_run_length(all, i);
    return longest;
}
COUNT(count, all->count)
COUNT(items, all->items)
COUNT(moved, all->moved)
COUNT(longest, longest_of(all))

static PyMethodDef trajectories_methods[] = {
    {"clear", trajectories_clear, METH_NOARGS, "clear(): removes all items."},
    {"drop", trajectories_drop, METH_VARARGS, "drop(slots, count): removes the items of these slots."},
    {"find_predecessors", trajectories_find_predecessors, METH_VARARGS,
     "find_predecessors(slots, sources, reach, count, out): stores the slot that each slot follows in its source; -1: none,\n"
     "or there is a hole between them."},
    {"append", trajectories_append, METH_VARARGS,
     "append(slots, sources, cuts, count, settled): appends items to their sources. cuts: bytes [count, width], nonzero starts a\n"
     "trajectory. The first `settled` items may complete windows."},
    {"insert", trajectories_insert, METH_VARARGS,
     "insert(elements, sources, ids, steps, count): inserts items by their steps. Returns (number, element) if a step exists twice."},
    {"list_neighbours", trajectories_list_neighbours, METH_VARARGS,
     "list_neighbours(slots, sources, count, items, before): stores the pairs of successive items that contain these slots, and\n"
     "returns their number. None: a slot has another source."},
    {"cut", trajectories_cut, METH_VARARGS, "cut(slots, cuts, count): sets whether a trajectory begins at each element; bytes [count, width]."},
    {"count_long", trajectories_count_long, METH_VARARGS, "count_long(least): returns the number of trajectories with at least `least` items."},
    {"list_firsts", trajectories_list_firsts, METH_VARARGS,
     "list_firsts(numbers, count, out, from): stores the first elements of those, numbered from an element on; -1: no such number."},
    {"list_items", trajectories_list_items, METH_VARARGS, "list_items(numbers, count, out, from): stores elements with an item, numbered in the same way."},
    {"find_rows", trajectories_find_rows, METH_VARARGS, "find_rows(elements, count, out): stores trajectory << 32 | step; -1: no item."},
    {"find_elements", trajectories_find_elements, METH_VARARGS, "find_elements(rows, count, out): stores the elements of rows; -1: none."},
    {"read_lengths", trajectories_read_lengths, METH_VARARGS, "read_lengths(trajectories, count, out): stores the number of items of each."},
    {"cut_by", trajectories_cut_by, METH_O, "cut_by(windows): cuts all later items into windows."},
    {"follow", shmb_trajectories_follow, METH_VARARGS,
     "follow(follower, cuts, n_cuts): polls, and appends new items. Returns the head, or changes that must be handled first, or\n"
     "None: see slicing.c."},
    {"read_windows", shmb_trajectories_read_windows, METH_VARARGS, "read_windows(count, newest, out): like claim_windows(), but stores all elements of each."},
    {"draw_slices", shmb_trajectories_draw_slices, METH_VARARGS,
     "draw_slices(which, begins, count, steps, from, out): stores the elements of slices, which two numbers each select. False: no\n"
     "trajectory is long enough."},
    {"read_histories", shmb_trajectories_read_histories, METH_VARARGS,
     "read_histories(follower or None, elements, drawn, count, steps, out, tickets): stores the steps up to each element, see\n"
     "slicing.c."},
    {"claim_windows", trajectories_claim_windows, METH_VARARGS, "claim_windows(count, newest, firsts): delivers the next complete windows that begin in the `newest` newest slots. Stores their\n"
     "first elements, and returns their number."},
    {"list_used", trajectories_list_used, METH_VARARGS, "list_used(tickets, waiting): stores the ticket of each item that needs no window, or is in one; -1."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef trajectories_properties[] = {
    {"count", get_count, NULL, "Number of trajectories.", NULL},
    {"items", get_items, NULL, "Number of items.", NULL},
    {"moved", get_moved, NULL, "Number of trajectories moved in lists since the last clear().", NULL},
    {"longest", get_longest, NULL, "Number of items of the longest trajectory; O(trajectories).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot trajectories_slots[] = {
    {Py_tp_doc, "Trajectories(slots, width): a table of successive items."},
    {Py_tp_new, trajectories_new},
    {Py_tp_dealloc, trajectories_dealloc},
    {Py_tp_methods, trajectories_methods},
    {Py_tp_getset, trajectories_properties},
    {0, NULL},
};
PyType_Spec shmb_trajectories_spec = {.name = "shmbuffer._native._core.Trajectories",
                                      .basicsize = sizeof(struct trajectories_object),
                                      .flags = Py_TPFLAGS_DEFAULT,
                                      .slots = trajectories_slots};
