/* Follower and Trajectories for Python. Addresses are passed as integers, as in arguments.c, and point to int64
 * unless stated otherwise. Only one thread at a time may use an object. The caller holds a lock, because long calls
 * release the interpreter lock. */
#include "python/slicing.h"

#include "core/ring.h"
#include "python/module.h"
#include "tables/windows.h"

#define MUCH 16384u /* items; for more, the interpreter lock is released */

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
    if (f->started && head - f->seen < MUCH) {
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
    unsigned long long slots, reach, room;
    struct shmb_follower *f = shmb_follower_in(self);
    if (!PyArg_ParseTuple(args, "KKK:next", &slots, &reach, &room)) return NULL;
    if (!f->started) return PyErr_Format(PyExc_ValueError, "next: poll first");
    uint64_t found;
    Py_BEGIN_ALLOW_THREADS
    found = shmb_follower_next(f, (int64_t *)(uintptr_t)slots, (int64_t *)(uintptr_t)reach, room);
    Py_END_ALLOW_THREADS
    return f->failed ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(found);
}

static PyObject *follower_reach(PyObject *self, PyObject *args) {
    unsigned long long slots, count, reach;
    const struct shmb_follower *f = shmb_follower_in(self);
    if (!PyArg_ParseTuple(args, "KKK:reach", &slots, &count, &reach)) return NULL;
    for (uint64_t i = 0; i < count; i++)
        ((int64_t *)(uintptr_t)reach)[i] = (int64_t)shmb_follower_reach(f, ((const uint64_t *)(uintptr_t)slots)[i]);
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

static PyObject *follower_over(PyObject *self, void *Py_UNUSED(closure)) {
    const struct shmb_follower *f = shmb_follower_in(self);
    uint64_t count = 0;
    for (uint64_t i = 0; i < f->over; i++) count += f->gone.at[f->gone.begin + i].second;
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *follower_pending(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_follower_in(self)->pending.count);
}

static PyObject *follower_in_turn(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    shmb_follower_in(self)->in_turn = true;
    Py_RETURN_NONE;
}

static PyMethodDef follower_methods[] = {
    {"poll", follower_poll, METH_NOARGS,
     "poll(): (restarted, slots that hold nothing of before, slots with another item in the same place); None: nothing has changed."},
    {"next", follower_next, METH_VARARGS,
     "next(slots, reach, room): how many new items, oldest first; reach: how many places before each are no hole. 0: no more."},
    {"flags", shmb_follower_flags, METH_VARARGS,
     "flags(elements, count, steps, shown, n_shown, tickets): flags of slices, see slicing.c; False: an item is gone."},
    {"reach", follower_reach, METH_VARARGS, "reach(slots, count, reach): the same of slots that hold an item."},
    {"forget", follower_forget, METH_NOARGS, "forget(): the next poll tells of every item."},
    {"in_turn", follower_in_turn, METH_NOARGS,
     "in_turn(): what lies behind a write that is under way is told again, however that ends."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef follower_properties[] = {
    {"seen", follower_seen, NULL, "Tickets below it were looked at.", NULL},
    {"settled", follower_settled, NULL, "Of the last next(): items before the first write that is under way.", NULL},
    {"over", follower_over, NULL, "Slots that hold nothing of before, of the last poll(): so many, the first, were written over.", NULL},
    {"pending", follower_pending, NULL, "Writes that are under way.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot follower_slots[] = {
    {Py_tp_doc, "Follower(ring): what has come and gone since the last poll."},
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
    if (slots == 0 || width == 0 || slots > SHMB_MOST_ELEMENTS / width)
        return PyErr_Format(PyExc_ValueError, "trajectories are followed in up to %llu items, not in %llu slots of %llu",
                            (unsigned long long)SHMB_MOST_ELEMENTS, slots, width);
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

static PyObject *trajectories_before(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKKKK:before", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    all->looks++;
    for (uint64_t i = 0; i < at[3] && !all->failed; i++) {
        uint64_t slot = IN(uint64_t, 0)[i];
        OUT(4)[i] = shmb_accept_predecessor(all->elements / all->width, shmb_trajectory_before(all, IN(uint64_t, 1)[i], (uint32_t)slot), slot, IN(uint64_t, 2)[i]);
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
    uint32_t there = 0;
    uint64_t i = 0;
    bool inserted = true;
    if (!parse_arguments(self, args, "KKKKK:insert", at)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (; i < at[4] && inserted && !all->failed; i++) {
        uint64_t element = IN(uint64_t, 0)[i];
        if (element < all->elements && all->where[element].run == 0)
            inserted = shmb_trajectory_insert(all, IN(uint64_t, 1)[i], (uint32_t)(element % all->width), IN(int64_t, 2)[i],
                                              IN(int64_t, 3)[i], (uint32_t)element, &there);
    }
    Py_END_ALLOW_THREADS
    if (inserted) return finish_call(self);
    return Py_BuildValue("(KK)", (unsigned long long)(i - 1), (unsigned long long)there);
}

static PyObject *trajectories_around(PyObject *self, PyObject *args) {
    const struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KKKKK:around", at)) return NULL;
    uint64_t found = 0;
    for (uint64_t i = 0; i < at[2]; i++) {
        uint64_t element = IN(uint64_t, 0)[i] * all->width;
        if (element >= all->elements || all->where[element].run == 0) Py_RETURN_NONE;
        if (all->owners[all->runs[all->where[element].run - 1].owner].source != IN(uint64_t, 1)[i]) Py_RETURN_NONE;
        uint32_t before = shmb_trajectory_neighbour(all, (uint32_t)element, false);
        uint32_t behind = shmb_trajectory_neighbour(all, (uint32_t)element, true);
        if (before != SHMB_NO_ELEMENT) {
            OUT(3)[found] = (int64_t)IN(uint64_t, 0)[i];
            OUT(4)[found++] = before / all->width;
        }
        if (behind != SHMB_NO_ELEMENT) {
            OUT(3)[found] = behind / all->width;
            OUT(4)[found++] = (int64_t)IN(uint64_t, 0)[i];
        }
    }
    return PyLong_FromUnsignedLongLong(found);
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

static PyObject *trajectories_long(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_arguments(self, args, "K:long", at)) return NULL;
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
    if (at[3] >= shmb_trajectories_in(self)->elements) return PyErr_Format(PyExc_IndexError, "there is no element %llu", at[3]);
    Py_BEGIN_ALLOW_THREADS
    uint64_t before = shmb_marks_below(marks, at[3]);
    for (uint64_t i = 0; i < at[1]; i++) {
        uint64_t k = IN(uint64_t, 0)[i];
        OUT(2)[i] = k < marks->total ? (int64_t)shmb_marks_at(marks, (k + before) % marks->total) : -1;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *trajectories_firsts(PyObject *self, PyObject *args) {
    return find_by_number(self, args, "KKKK:firsts", &shmb_trajectories_in(self)->marks);
}

static PyObject *trajectories_list_items(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    if (!all->failed) shmb_trajectories_count(all);
    return find_by_number(self, args, "KKKK:list_items", &all->held);
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

static int64_t row_of(const struct shmb_trajectories *all, int64_t element) { return shmb_row_of(all, (uint64_t)element); }

static int64_t steps_of(const struct shmb_trajectories *all, int64_t run) { return shmb_length_of(all, (uint64_t)run); }

static PyObject *trajectories_rows(PyObject *self, PyObject *args) { return map_numbers(self, args, "KKK:rows", row_of); }

static PyObject *trajectories_elements(PyObject *self, PyObject *args) {
    return map_numbers(self, args, "KKK:elements", shmb_element_of);
}

static PyObject *trajectories_lengths(PyObject *self, PyObject *args) { return map_numbers(self, args, "KKK:lengths", steps_of); }

static PyObject *trajectories_cut_by(PyObject *self, PyObject *windows) {
    struct trajectories_object *object = (struct trajectories_object *)self;
    struct shmb_windows *w = shmb_windows_in(windows);
    if (w == NULL) return NULL;
    if (w->elements != object->all.elements || object->all.items || object->windows)
        return PyErr_Format(PyExc_ValueError, "cut_by: windows of these elements, once, and before there is an item");
    object->windows = Py_NewRef(windows);
    object->all.windows = w;
    Py_RETURN_NONE;
}

static PyObject *trajectories_claim_windows(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    uint64_t found;
    if (!parse_arguments(self, args, "KKK:claim_windows", at)) return NULL;
    if (all->windows == NULL) return PyErr_Format(PyExc_ValueError, "claim_windows: cut_by() windows first");
    Py_BEGIN_ALLOW_THREADS
    found = shmb_windows_claim(all, at[0], at[1], OUT(2));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *trajectories_used(PyObject *self, PyObject *args) {
    struct shmb_trajectories *all = shmb_trajectories_in(self);
    unsigned long long at[6];
    if (!parse_arguments(self, args, "KK:used", at)) return NULL;
    if (all->windows == NULL) return PyErr_Format(PyExc_ValueError, "used: cut_by() windows first");
    Py_BEGIN_ALLOW_THREADS
    shmb_windows_used(all, OUT(0), at[1] != 0);
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
        if (shmb_length_of(all, i) > longest) longest = shmb_length_of(all, i);
    return longest;
}
COUNT(count, all->count)
COUNT(items, all->items)
COUNT(moved, all->moved)
COUNT(longest, longest_of(all))

static PyMethodDef trajectories_methods[] = {
    {"clear", trajectories_clear, METH_NOARGS, "clear(): no item is there."},
    {"drop", trajectories_drop, METH_VARARGS, "drop(slots, count): their items are gone."},
    {"before", trajectories_before, METH_VARARGS,
     "before(slots, sources, reach, count, out): the slot that each follows in its source; -1: none, or behind a hole."},
    {"append", trajectories_append, METH_VARARGS,
     "append(slots, sources, cuts, count, settled): behind the last of their source; cuts: bytes [count, width], cut before it;\n"
     "settled: so many of them may complete windows."},
    {"insert", trajectories_insert, METH_VARARGS,
     "insert(elements, sources, ids, steps, count): where their steps belong; (number, element) of one that is there twice."},
    {"around", trajectories_around, METH_VARARGS,
     "around(slots, sources, count, items, before): how many pairs the slots are in; None: one is not of that source."},
    {"cut", trajectories_cut, METH_VARARGS, "cut(slots, cuts, count): whether a trajectory begins there; bytes [count, width]."},
    {"long", trajectories_long, METH_VARARGS, "long(least): how many trajectories have at least so many items."},
    {"firsts", trajectories_firsts, METH_VARARGS,
     "firsts(numbers, count, out, from): the first elements of those, counted from an element on; -1: not so many."},
    {"list_items", trajectories_list_items, METH_VARARGS, "list_items(numbers, count, out, from): the same of all elements with an item."},
    {"rows", trajectories_rows, METH_VARARGS, "rows(elements, count, out): trajectory << 32 | step; -1: none."},
    {"elements", trajectories_elements, METH_VARARGS, "elements(rows, count, out): the elements again."},
    {"lengths", trajectories_lengths, METH_VARARGS, "lengths(trajectories, count, out): items of each."},
    {"cut_by", trajectories_cut_by, METH_O, "cut_by(windows): of all that comes from here on."},
    {"follow", shmb_trajectories_follow, METH_VARARGS,
     "follow(follower, cuts, n_cuts): poll, and append what is new; the head, or what is to be done first, or None: see slicing.c."},
    {"windows", shmb_trajectories_windows, METH_VARARGS, "windows(count, newest, out): claim_windows(), with all elements of each."},
    {"slices", shmb_trajectories_slices, METH_VARARGS,
     "slices(which, begins, count, steps, from, out): elements of slices, by two numbers each; False: no trajectory is as long."},
    {"histories", shmb_trajectories_histories, METH_VARARGS,
     "histories(follower or None, elements, drawn, count, steps, out, tickets): the steps up to each element, see slicing.c."},
    {"claim_windows", trajectories_claim_windows, METH_VARARGS, "claim_windows(count, newest, firsts): the next windows that are whole, of so many slots: their first elements."},
    {"used", trajectories_used, METH_VARARGS, "used(tickets, waiting): of each element whose item needs no window, or is in one; -1."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef trajectories_properties[] = {
    {"count", get_count, NULL, "Trajectories.", NULL},
    {"items", get_items, NULL, "Items in them.", NULL},
    {"moved", get_moved, NULL, "Trajectories that made room for others since all were cleared.", NULL},
    {"longest", get_longest, NULL, "Items of the longest; O(trajectories).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot trajectories_slots[] = {
    {Py_tp_doc, "Trajectories(slots, width): which items follow each other."},
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
