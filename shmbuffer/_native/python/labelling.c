/* Labels for Python. Addresses are passed as integers, as in arguments.c, and point to int64 unless stated
 * otherwise. Only one thread at a time may use an object. The caller holds a lock. */
#include "python/labelling.h"

#include <stdlib.h>

#include "core/ring.h"
#include "python/following.h"
#include "python/module.h"
#include "tables/choosing.h"

#define MUCH 16384u /* items; for more, the interpreter lock is released */

static PyObject *labels_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    unsigned long long elements;
    unsigned int limit;
    int by_age;
    if (!PyArg_ParseTuple(args, "KIp:Labels", &elements, &limit, &by_age)) return NULL;
    if (elements == 0 || elements > SHMB_MOST_ITEMS)
        return PyErr_Format(PyExc_ValueError, "labels are kept of 1 to %llu items, not of %llu", (unsigned long long)SHMB_MOST_ITEMS,
                            elements);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self == NULL) return NULL;
    if (shmb_labels_make(shmb_labels_in(self), elements, limit, by_age != 0)) return self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void labels_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    shmb_labels_free(shmb_labels_in(self));
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Parses up to six numbers or addresses. False: the exception is set; also after an allocation failed. */
static bool parse_call(PyObject *self, PyObject *args, const char *format, unsigned long long *at) {
    if (!PyArg_ParseTuple(args, format, &at[0], &at[1], &at[2], &at[3], &at[4], &at[5])) return false;
    if (shmb_labels_in(self)->failed) return PyErr_NoMemory(), false;
    return true;
}

static PyObject *end_call(PyObject *self) {
    if (shmb_labels_in(self)->failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define NUMBERS(n) ((int64_t *)(uintptr_t)at[n])

static PyObject *labels_clear(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Py_BEGIN_ALLOW_THREADS
    shmb_labels_clear(shmb_labels_in(self));
    Py_END_ALLOW_THREADS
    return end_call(self);
}

static PyObject *each_element(PyObject *self, PyObject *args, const char *format,
                              void (*change)(struct shmb_labels *all, uint32_t element)) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, format, at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++)
        if ((uint64_t)NUMBERS(0)[i] < all->elements) change(all, (uint32_t)NUMBERS(0)[i]);
    return end_call(self);
}

static PyObject *labels_drop(PyObject *self, PyObject *args) { return each_element(self, args, "KK:drop", shmb_label_drop); }

static PyObject *labels_away(PyObject *self, PyObject *args) { return each_element(self, args, "KK:away", shmb_label_away); }

static PyObject *labels_put(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKKK:put", at)) return NULL;
    all->first = at[3];
    PyThreadState *state = at[2] > MUCH ? PyEval_SaveThread() : NULL;
    for (uint64_t i = 0; i < at[2] && !all->failed; i++)
        if ((uint64_t)NUMBERS(0)[i] < all->elements)
            shmb_label_put(all, (uint32_t)NUMBERS(0)[i], NUMBERS(1)[i], (int64_t)at[4]);
    if (state) PyEval_RestoreThread(state);
    return end_call(self);
}

static PyObject *labels_give_up(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "K:give_up", at)) return NULL;
    shmb_labels_give_up(shmb_labels_in(self), (int64_t)at[0]);
    return end_call(self);
}

static PyObject *labels_missing(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "K:missing", at)) return NULL;
    const struct shmb_kin *kin = shmb_kin_of(all, at[0]);
    return PyLong_FromUnsignedLong(kin && all->limit && kin->state == SHMB_KIN_OPEN ? all->limit - kin->came : 0);
}

static PyObject *labels_give_up_one(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "K:give_up_one", at)) return NULL;
    if (at[0] < shmb_labels_in(self)->elements) shmb_label_give_up(shmb_labels_in(self), (uint32_t)at[0]);
    return end_call(self);
}

static PyObject *labels_mark_claimed(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:mark_claimed", at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++)
        if ((uint64_t)NUMBERS(0)[i] < all->elements) shmb_label_mark_claimed(all, (uint32_t)NUMBERS(0)[i], at[2] != 0);
    return end_call(self);
}

static PyObject *labels_order(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct shmb_labels *all = shmb_labels_in(self);
    if (all->failed) return PyErr_NoMemory();
    Py_ssize_t bytes = (Py_ssize_t)(shmb_labels_order(all) * sizeof(int64_t));
    PyObject *labels = PyBytes_FromStringAndSize(NULL, bytes), *counts = PyBytes_FromStringAndSize(NULL, bytes), *told = NULL;
    if (labels && counts) {
        int64_t *label = (int64_t *)(void *)PyBytes_AsString(labels), *count = (int64_t *)(void *)PyBytes_AsString(counts);
        for (uint64_t i = 0; i < all->n_order; i++) {
            label[i] = all->order[i].label;
            count[i] = all->order[i].count;
        }
        told = Py_BuildValue("(OO)", labels, counts);
    }
    Py_XDECREF(labels);
    Py_XDECREF(counts);
    return told;
}

static PyObject *labels_draw(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKKK:draw", at)) return NULL;
    bool made;
    Py_BEGIN_ALLOW_THREADS
    made = shmb_draw_labelled(shmb_labels_in(self), (const double *)(uintptr_t)at[0], at[1], at[2], at[3] != 0, NUMBERS(4), NULL);
    Py_END_ALLOW_THREADS
    if (made) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "draw: nothing is left that weighs anything");
}

/* False: an item was overwritten since it was reported. */
static bool tickets_of(const struct shmb_follower *f, const int64_t *elements, uint64_t count, int64_t *tickets) {
    bool there = true;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = shmb_slot_of(f->ring, (uint64_t)elements[i]);
        uint64_t word = atomic_load_explicit(&f->ring->words[slot], memory_order_relaxed);
        there = there & (SHMB_STATE(word) == SHMB_COMMITTED) & (SHMB_TICKET(word) < f->seen);
        tickets[i] = (int64_t)SHMB_TICKET(word);
    }
    return there;
}

/* Each label weighs 1 / (staleness + 1), or 0 if it is too stale. Returns False if a ticket is not that of the
 * reported item. */
static PyObject *labels_fresh(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    PyObject *follower;
    long long version, most;
    unsigned long long key, count, out, stale, held;
    if (!PyArg_ParseTuple(args, "O!LLKKKKK:fresh", shmb_follower_type, &follower, &version, &most, &key, &count, &out, &stale, &held))
        return NULL;
    if (all->failed) return PyErr_NoMemory();
    const struct shmb_follower *f = shmb_follower_in(follower);
    uint64_t sets = shmb_labels_order(all), fresh = 0;
    double *weights = malloc((sets + 1) * sizeof *weights);
    if (weights == NULL) return PyErr_NoMemory();
    for (uint64_t i = 0; i < sets; i++) {
        int64_t staleness = version - all->order[i].label;
        weights[i] = staleness > most ? 0 : 1.0 / ((double)(staleness > 0 ? staleness : 0) + 1.0);
        fresh += staleness > most ? 0 : all->order[i].count;
    }
    int64_t *elements = (int64_t *)(uintptr_t)out, *tickets = (int64_t *)(uintptr_t)held;
    bool made = fresh > 0 && shmb_draw_labelled(all, weights, key, count, count > fresh, elements, tickets);
    free(weights);
    if (!made) Py_RETURN_NONE;
    /* tickets[i] is its label up to here */
    for (uint64_t i = 0; i < count; i++) ((float *)(uintptr_t)stale)[i] = (float)(version - tickets[i]);
    return PyBool_FromLong(tickets_of(f, elements, count, tickets));
}

static PyObject *labels_tickets(PyObject *self, PyObject *args) {
    PyObject *follower;
    unsigned long long elements, count, tickets;
    if (!PyArg_ParseTuple(args, "O!KKK:tickets", shmb_follower_type, &follower, &elements, &count, &tickets)) return NULL;
    if (shmb_labels_in(self)->failed) return PyErr_NoMemory();
    return PyBool_FromLong(tickets_of(shmb_follower_in(follower), (const int64_t *)(uintptr_t)elements, count,
                                      (int64_t *)(uintptr_t)tickets));
}

static PyObject *labels_freshest(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:freshest", at)) return NULL;
    uint64_t found = 0;
    for (uint64_t i = shmb_labels_order(all); i-- > 0 && found < at[1];) {
        if (!(((const double *)(uintptr_t)at[0])[i] > 0)) continue;
        const struct shmb_kin *kin = shmb_kin_at(all, i);
        for (uint32_t n = kin->count; n-- > 0 && found < at[1];) NUMBERS(2)[found++] = shmb_kin_item(kin, n);
    }
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *labels_read(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:read", at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_kin *kin = shmb_kin_of(shmb_labels_in(self), (uint64_t)NUMBERS(0)[i]);
        NUMBERS(2)[i] = kin ? kin->label : 0;
    }
    Py_RETURN_NONE;
}

static PyObject *labels_kins(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:kins", at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_kin *kin = shmb_kin_of(all, (uint64_t)NUMBERS(0)[i]);
        NUMBERS(2)[i] = kin ? kin - all->kins : -1;
    }
    Py_RETURN_NONE;
}

static PyObject *labels_choose(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKK:choose", at)) return NULL;
    struct shmb_choice choice;
    if (at[2] > at[1] || at[1] > SHMB_MOST_ITEMS) return PyErr_Format(PyExc_ValueError, "choose: %llu of %llu numbers", at[2], at[1]);
    if (!shmb_choice_begin(&choice, at[0], at[2])) return PyErr_NoMemory();
    for (uint64_t i = 0; i < at[2]; i++) NUMBERS(3)[i] = (int64_t)shmb_choose(&choice, 0, at[1] - i);
    shmb_choice_end(&choice);
    Py_RETURN_NONE;
}

/* The k-th of the marked groups, by the age of their first items. */
static const struct shmb_kin *marked_at(const struct shmb_labels *all, uint64_t k, uint64_t before) {
    return shmb_kin_of(all, shmb_marks_at(&all->marks, (k + before) % all->marks.total));
}

static PyObject *labels_sizes(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:sizes", at)) return NULL;
    uint64_t before = all->by_age ? shmb_marks_below(&all->marks, all->first) : 0, total = all->by_age ? all->marks.total : 0;
    for (uint64_t i = 0; i < at[1]; i++)
        NUMBERS(2)[i] = (uint64_t)NUMBERS(0)[i] < total ? (int64_t)marked_at(all, (uint64_t)NUMBERS(0)[i], before)->count : 0;
    Py_RETURN_NONE;
}

static PyObject *labels_members(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKK:members", at)) return NULL;
    uint64_t before = all->by_age ? shmb_marks_below(&all->marks, all->first) : 0, total = all->by_age ? all->marks.total : 0;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_kin *kin = (uint64_t)NUMBERS(0)[i] < total ? marked_at(all, (uint64_t)NUMBERS(0)[i], before) : NULL;
        for (uint32_t n = 0; n < at[2]; n++)
            NUMBERS(3)[i * at[2] + n] = kin && n < kin->count ? (int64_t)shmb_kin_item(kin, n) : -1;
    }
    Py_RETURN_NONE;
}

/* Chooses members of each group without replacement. If a group has too few, the others are drawn with replacement. */
static PyObject *labels_choose_members(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKKK:choose_members", at)) return NULL;
    uint64_t before = all->by_age ? shmb_marks_below(&all->marks, all->first) : 0, total = all->by_age ? all->marks.total : 0;
    struct shmb_choice choice;
    if (!shmb_choice_begin(&choice, at[3], at[1] * at[2])) return PyErr_NoMemory();
    /* one step for all groups at a time, so that the cache misses overlap */
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        uint64_t number = (uint64_t)NUMBERS(0)[i];
        uint64_t first = number < total ? shmb_marks_at(&all->marks, (number + before) % total) : SHMB_NO_ITEM;
        if (first != SHMB_NO_ITEM) __builtin_prefetch(&all->where[first]);
        NUMBERS(4)[i * at[2]] = (int64_t)first;
    }
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        const struct shmb_kin *kin = shmb_kin_of(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        if (kin) __builtin_prefetch(kin);
    }
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        const struct shmb_kin *kin = shmb_kin_of(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        if (kin) __builtin_prefetch(kin->items);
    }
    uint32_t least = UINT32_MAX;
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        const struct shmb_kin *kin = shmb_kin_of(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        least = kin && kin->count < least ? kin->count : least;
        for (uint32_t n = 0; kin && n < at[2]; n++) {
            uint64_t chosen = n < kin->count ? shmb_choose(&choice, i, kin->count - n) : shmb_choose_any(&choice, kin->count);
            NUMBERS(4)[i * at[2] + n] = (int64_t)shmb_kin_item(kin, (uint32_t)chosen);
        }
    }
    shmb_choice_end(&choice);
    return PyLong_FromUnsignedLong(least);
}

/* Returns only elements that still are in lost groups, because a slot may hold a new item by now. */
static PyObject *labels_lost(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct shmb_labels *all = shmb_labels_in(self);
    if (all->failed) return PyErr_NoMemory();
    uint64_t kept = 0;
    for (uint64_t i = 0; i < all->n_lost; i++) {
        const struct shmb_kin *kin = shmb_kin_of(all, all->lost[i]);
        if (kin && kin->state == SHMB_KIN_LOST) all->lost[kept++] = all->lost[i];
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(kept * sizeof(int64_t)));
    if (bytes == NULL) return NULL;
    int64_t *lost = (int64_t *)(void *)PyBytes_AsString(bytes);
    for (uint64_t i = 0; i < kept; i++) lost[i] = all->lost[i];
    all->n_lost = 0;
    return bytes;
}

static PyObject *labels_tell(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    shmb_labels_in(self)->tells = true;
    Py_RETURN_NONE;
}

#define COUNTED(name, expression)                                                                           \
    static PyObject *counted_##name(PyObject *self, void *Py_UNUSED(closure)) {                             \
        const struct shmb_labels *all = shmb_labels_in(self);                                                    \
        return PyLong_FromUnsignedLongLong(expression);                                                     \
    }
COUNTED(items, all->items)
COUNTED(marked, all->by_age ? all->marks.total : 0)
COUNTED(open, all->open)
COUNTED(withdrawn, all->withdrawn)
COUNTED(given_up, all->given_up)

static PyMethodDef labels_methods[] = {
    {"clear", labels_clear, METH_NOARGS, "clear(): no item is there; what was counted stays."},
    {"drop", labels_drop, METH_VARARGS, "drop(elements, count): they are gone."},
    {"away", labels_away, METH_VARARGS, "away(elements, count): they are being written, or gone; with a limit."},
    {"put", labels_put, METH_VARARGS, "put(elements, labels, count, first, now): they are there; first: of the oldest slot."},
    {"settle", shmb_labels_settle_all, METH_O, "settle(follower): behind puts and drops, before anything is asked; None: no ring."},
    {"follow", shmb_labels_follow, METH_VARARGS,
     "follow(follower, labels, bytes, kind, values, count, bytes, kind, means, steps, code, piece, now): a poll of columns of\n"
     "numbers, or at the piece of records of the form that `locate_pieces` would be told of; the head. None: one of them is no\n"
     "label, and the next poll is a first one."},
    {"give_up", labels_give_up, METH_VARARGS, "give_up(before): groups that began until then and are not whole."},
    {"missing", labels_missing, METH_VARARGS, "missing(element): items that its group lacks, where that is open; else 0."},
    {"give_up_one", labels_give_up_one, METH_VARARGS, "give_up_one(element): its group, where that is open."},
    {"mark_claimed", labels_mark_claimed, METH_VARARGS, "mark_claimed(elements, count, claimed): whether a learner has their groups."},
    {"order", labels_order, METH_NOARGS, "order(): the labels, the smallest first, and the items of each, as int64."},
    {"draw", labels_draw, METH_VARARGS, "draw(weights, key, count, again, out): by a float64 for each of `order`."},
    {"fresh", labels_fresh, METH_VARARGS,
     "fresh(follower, version, most, key, count, out, staleness, tickets): draw by 1 / (staleness + 1), float32 [count];\n"
     "False: one has been written over; None: nothing is fresh enough."},
    {"tickets", labels_tickets, METH_VARARGS,
     "tickets(follower, elements, count, out): of items of the last poll; False: one has been written over since."},
    {"freshest", labels_freshest, METH_VARARGS, "freshest(weights, count, out): how many, of the largest labels, newest first."},
    {"read", labels_read, METH_VARARGS, "read(elements, count, out): their labels."},
    {"kins", labels_kins, METH_VARARGS, "kins(elements, count, out): a number for each group; -1: the element is in none."},
    {"choose", labels_choose, METH_VARARGS, "choose(key, of, count, out): numbers below `of`, each once."},
    {"sizes", labels_sizes, METH_VARARGS, "sizes(numbers, count, out): items of those, by age of the first."},
    {"members", labels_members, METH_VARARGS, "members(numbers, count, width, out): their items, [count, width]; -1: no more."},
    {"choose_members", labels_choose_members, METH_VARARGS, "choose_members(numbers, count, width, key, out): items of those by chance, [count, width]; how many the smallest has."},
    {"lost", labels_lost, METH_NOARGS, "lost(): items of lost groups, int64, each told once."},
    {"tell", labels_tell, METH_NOARGS, "tell(): have `lost` tell of them."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef labels_properties[] = {
    {"items", counted_items, NULL, "Items that are there.", NULL},
    {"marked", counted_marked, NULL, "Groups that may be drawn.", NULL},
    {"open", counted_open, NULL, "Groups that are not whole yet.", NULL},
    {"withdrawn", counted_withdrawn, NULL, "Groups that lost an item.", NULL},
    {"given_up", counted_given_up, NULL, "Groups that were given up.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot labels_slots[] = {
    {Py_tp_doc, "Labels(elements, limit, by_age): items by label."},
    {Py_tp_new, labels_new},
    {Py_tp_dealloc, labels_dealloc},
    {Py_tp_methods, labels_methods},
    {Py_tp_getset, labels_properties},
    {0, NULL},
};
PyType_Spec shmb_labels_spec = {.name = "shmbuffer._native._core.Labels",
                                .basicsize = sizeof(struct labels_object),
                                .flags = Py_TPFLAGS_DEFAULT,
                                .slots = labels_slots};
