/* Labels for Python. Addresses are passed as integers, as in arguments.c, and point to int64 unless stated
 * otherwise. Only one thread at a time may use an object. The caller holds a lock. */
#include "python/labelling.h"

#include <stdlib.h>

#include "core/ring.h"
#include "python/following.h"
#include "python/module.h"
#include "tables/choosing.h"

#define LARGE_CALL 16384u /* items; for more, the interpreter lock is released */

static PyObject *labels_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    unsigned long long elements;
    unsigned int limit;
    int by_age;
    if (!PyArg_ParseTuple(args, "KIp:Labels", &elements, &limit, &by_age)) return NULL;
    if (elements == 0 || elements > SHMB_MAX_ITEMS)
        return PyErr_Format(PyExc_ValueError, "Labels: 1 to %llu elements are supported, but %llu were requested.", (unsigned long long)SHMB_MAX_ITEMS,
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

static PyObject *labels_mark_absent(PyObject *self, PyObject *args) { return each_element(self, args, "KK:mark_absent", shmb_label_mark_absent); }

static PyObject *labels_put(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKKK:put", at)) return NULL;
    all->first = at[3];
    PyThreadState *state = at[2] > LARGE_CALL ? PyEval_SaveThread() : NULL;
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

static PyObject *labels_count_missing(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "K:count_missing", at)) return NULL;
    const struct shmb_group *group = shmb_find_group(all, at[0]);
    return PyLong_FromUnsignedLong(group && all->limit && group->state == SHMB_GROUP_OPEN ? all->limit - group->added : 0);
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
    PyObject *labels = PyBytes_FromStringAndSize(NULL, bytes), *counts = PyBytes_FromStringAndSize(NULL, bytes), *result = NULL;
    if (labels && counts) {
        int64_t *label = (int64_t *)(void *)PyBytes_AsString(labels), *count = (int64_t *)(void *)PyBytes_AsString(counts);
        for (uint64_t i = 0; i < all->n_order; i++) {
            label[i] = all->order[i].label;
            count[i] = all->order[i].count;
        }
        result = Py_BuildValue("(OO)", labels, counts);
    }
    Py_XDECREF(labels);
    Py_XDECREF(counts);
    return result;
}

static PyObject *labels_draw(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKKK:draw", at)) return NULL;
    bool drawn;
    Py_BEGIN_ALLOW_THREADS
    drawn = shmb_draw_labelled(shmb_labels_in(self), (const double *)(uintptr_t)at[0], at[1], at[2], at[3] != 0, NUMBERS(4), NULL);
    Py_END_ALLOW_THREADS
    if (drawn) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "Labels.draw(): no remaining item has a positive weight. Draw fewer items, or draw with replacement.");
}

/* False: an item was overwritten since it was reported. */
static bool tickets_of(const struct shmb_follower *f, const int64_t *elements, uint64_t count, int64_t *tickets) {
    bool present = true;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = shmb_slot_of(f->ring, (uint64_t)elements[i]);
        uint64_t word = atomic_load_explicit(&f->ring->words[slot], memory_order_relaxed);
        present = present & (SHMB_STATE(word) == SHMB_COMMITTED) & (SHMB_TICKET(word) < f->seen);
        tickets[i] = (int64_t)SHMB_TICKET(word);
    }
    return present;
}

/* Each label weighs 1 / (staleness + 1), or 0 if it is too stale. Returns False if a ticket is not that of the
 * reported item. */
static PyObject *labels_draw_fresh(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    PyObject *follower;
    long long version, max_staleness;
    unsigned long long key, count, out, stale, tickets_address;
    if (!PyArg_ParseTuple(args, "O!LLKKKKK:draw_fresh", shmb_follower_type, &follower, &version, &max_staleness, &key, &count, &out, &stale, &tickets_address))
        return NULL;
    if (all->failed) return PyErr_NoMemory();
    const struct shmb_follower *f = shmb_follower_in(follower);
    uint64_t sets = shmb_labels_order(all), fresh = 0;
    double *weights = malloc((sets + 1) * sizeof *weights);
    if (weights == NULL) return PyErr_NoMemory();
    for (uint64_t i = 0; i < sets; i++) {
        int64_t staleness = version - all->order[i].label;
        weights[i] = staleness > max_staleness ? 0 : 1.0 / ((double)(staleness > 0 ? staleness : 0) + 1.0);
        fresh += staleness > max_staleness ? 0 : all->order[i].count;
    }
    int64_t *elements = (int64_t *)(uintptr_t)out, *tickets = (int64_t *)(uintptr_t)tickets_address;
    bool drawn = fresh > 0 && shmb_draw_labelled(all, weights, key, count, count > fresh, elements, tickets);
    free(weights);
    if (!drawn) Py_RETURN_NONE;
    /* tickets[i] is its label up to here */
    for (uint64_t i = 0; i < count; i++) ((float *)(uintptr_t)stale)[i] = (float)(version - tickets[i]);
    return PyBool_FromLong(tickets_of(f, elements, count, tickets));
}

static PyObject *labels_read_tickets(PyObject *self, PyObject *args) {
    PyObject *follower;
    unsigned long long elements, count, tickets;
    if (!PyArg_ParseTuple(args, "O!KKK:read_tickets", shmb_follower_type, &follower, &elements, &count, &tickets)) return NULL;
    if (shmb_labels_in(self)->failed) return PyErr_NoMemory();
    return PyBool_FromLong(tickets_of(shmb_follower_in(follower), (const int64_t *)(uintptr_t)elements, count,
                                      (int64_t *)(uintptr_t)tickets));
}

static PyObject *labels_list_freshest(PyObject *self, PyObject *args) {
    struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:list_freshest", at)) return NULL;
    uint64_t count = 0;
    for (uint64_t i = shmb_labels_order(all); i-- > 0 && count < at[1];) {
        if (!(((const double *)(uintptr_t)at[0])[i] > 0)) continue;
        const struct shmb_group *group = shmb_group_at(all, i);
        for (uint32_t n = group->count; n-- > 0 && count < at[1];) NUMBERS(2)[count++] = shmb_group_item(group, n);
    }
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *labels_read(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:read", at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_group *group = shmb_find_group(shmb_labels_in(self), (uint64_t)NUMBERS(0)[i]);
        NUMBERS(2)[i] = group ? group->label : 0;
    }
    Py_RETURN_NONE;
}

static PyObject *labels_read_groups(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:read_groups", at)) return NULL;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_group *group = shmb_find_group(all, (uint64_t)NUMBERS(0)[i]);
        NUMBERS(2)[i] = group ? group - all->groups : -1;
    }
    Py_RETURN_NONE;
}

static PyObject *labels_choose(PyObject *self, PyObject *args) {
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKK:choose", at)) return NULL;
    struct shmb_choice choice;
    if (at[2] > at[1] || at[1] > SHMB_MAX_ITEMS) return PyErr_Format(PyExc_ValueError, "Labels.choose(): %llu of %llu numbers cannot be chosen without replacement.", at[2], at[1]);
    if (!shmb_choice_begin(&choice, at[0], at[2])) return PyErr_NoMemory();
    for (uint64_t i = 0; i < at[2]; i++) NUMBERS(3)[i] = (int64_t)shmb_choose(&choice, 0, at[1] - i);
    shmb_choice_end(&choice);
    Py_RETURN_NONE;
}

/* The k-th of the marked groups, by the age of their first items. */
static const struct shmb_group *marked_at(const struct shmb_labels *all, uint64_t k, uint64_t before) {
    return shmb_find_group(all, shmb_marks_at(&all->marks, (k + before) % all->marks.total));
}

static PyObject *labels_read_sizes(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKK:read_sizes", at)) return NULL;
    uint64_t before = all->by_age ? shmb_marks_below(&all->marks, all->first) : 0, total = all->by_age ? all->marks.total : 0;
    for (uint64_t i = 0; i < at[1]; i++)
        NUMBERS(2)[i] = (uint64_t)NUMBERS(0)[i] < total ? (int64_t)marked_at(all, (uint64_t)NUMBERS(0)[i], before)->count : 0;
    Py_RETURN_NONE;
}

static PyObject *labels_read_members(PyObject *self, PyObject *args) {
    const struct shmb_labels *all = shmb_labels_in(self);
    unsigned long long at[6];
    if (!parse_call(self, args, "KKKK:read_members", at)) return NULL;
    uint64_t before = all->by_age ? shmb_marks_below(&all->marks, all->first) : 0, total = all->by_age ? all->marks.total : 0;
    for (uint64_t i = 0; i < at[1]; i++) {
        const struct shmb_group *group = (uint64_t)NUMBERS(0)[i] < total ? marked_at(all, (uint64_t)NUMBERS(0)[i], before) : NULL;
        for (uint32_t n = 0; n < at[2]; n++)
            NUMBERS(3)[i * at[2] + n] = group && n < group->count ? (int64_t)shmb_group_item(group, n) : -1;
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
        const struct shmb_group *group = shmb_find_group(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        if (group) __builtin_prefetch(group);
    }
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        const struct shmb_group *group = shmb_find_group(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        if (group) __builtin_prefetch(group->items);
    }
    uint32_t least = UINT32_MAX;
    for (uint64_t i = 0; i < at[1] && at[2]; i++) {
        const struct shmb_group *group = shmb_find_group(all, (uint64_t)NUMBERS(4)[i * at[2]]);
        least = group && group->count < least ? group->count : least;
        for (uint32_t n = 0; group && n < at[2]; n++) {
            uint64_t chosen = n < group->count ? shmb_choose(&choice, i, group->count - n) : shmb_choose_any(&choice, group->count);
            NUMBERS(4)[i * at[2] + n] = (int64_t)shmb_group_item(group, (uint32_t)chosen);
        }
    }
    shmb_choice_end(&choice);
    return PyLong_FromUnsignedLong(least);
}

/* Returns only elements that still are in lost groups, because a slot may hold a new item by now. */
static PyObject *labels_take_lost(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct shmb_labels *all = shmb_labels_in(self);
    if (all->failed) return PyErr_NoMemory();
    uint64_t remaining = 0;
    for (uint64_t i = 0; i < all->n_lost; i++) {
        const struct shmb_group *group = shmb_find_group(all, all->lost[i]);
        if (group && group->state == SHMB_GROUP_LOST) all->lost[remaining++] = all->lost[i];
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(remaining * sizeof(int64_t)));
    if (bytes == NULL) return NULL;
    int64_t *lost = (int64_t *)(void *)PyBytes_AsString(bytes);
    for (uint64_t i = 0; i < remaining; i++) lost[i] = all->lost[i];
    all->n_lost = 0;
    return bytes;
}

static PyObject *labels_record_lost(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    shmb_labels_in(self)->records_lost = true;
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
    {"clear", labels_clear, METH_NOARGS, "clear(): removes all items. The counters keep their values."},
    {"drop", labels_drop, METH_VARARGS, "drop(elements, count): removes these items."},
    {"mark_absent", labels_mark_absent, METH_VARARGS,
     "mark_absent(elements, count): marks items that are being rewritten, or were removed; for tables with a limit."},
    {"put", labels_put, METH_VARARGS, "put(elements, labels, count, first, now): adds items; first: the element of the oldest slot."},
    {"settle", shmb_labels_settle_all, METH_O, "settle(follower or None): finishes a series of put() and drop(), before any query."},
    {"follow", shmb_labels_follow, METH_VARARGS,
     "follow(follower, labels, bytes, kind, values, count, bytes, kind, means, steps, code, piece, now): polls, and updates the\n"
     "labels from a column of numbers, or from a piece of records of one form (see `locate_pieces`). Returns the head. None: an\n"
     "item has no label, and the next poll starts over."},
    {"give_up", labels_give_up, METH_VARARGS, "give_up(before): gives up incomplete groups that began until then."},
    {"count_missing", labels_count_missing, METH_VARARGS, "count_missing(element): returns how many items its group lacks if that is open; otherwise 0."},
    {"give_up_one", labels_give_up_one, METH_VARARGS, "give_up_one(element): gives up its group, if that is open."},
    {"mark_claimed", labels_mark_claimed, METH_VARARGS, "mark_claimed(elements, count, claimed): sets whether a learner has claimed their groups."},
    {"order", labels_order, METH_NOARGS, "order(): returns the labels, the smallest first, and the number of items of each, as int64."},
    {"draw", labels_draw, METH_VARARGS, "draw(weights, key, count, again, out): draws by a float64 weight for each label of order()."},
    {"draw_fresh", labels_draw_fresh, METH_VARARGS,
     "draw_fresh(follower, version, most, key, count, out, staleness, tickets): draws by 1 / (staleness + 1), float32 [count].\n"
     "False: an item was overwritten. None: no item is fresh enough."},
    {"read_tickets", labels_read_tickets, METH_VARARGS,
     "read_tickets(follower, elements, count, out): stores tickets of items of the last poll. False: an item was overwritten since."},
    {"list_freshest", labels_list_freshest, METH_VARARGS,
     "list_freshest(weights, count, out): stores items of the largest labels, newest first, and returns their number."},
    {"read", labels_read, METH_VARARGS, "read(elements, count, out): stores their labels."},
    {"read_groups", labels_read_groups, METH_VARARGS, "read_groups(elements, count, out): stores the number of each element's group; -1: none."},
    {"choose", labels_choose, METH_VARARGS, "choose(key, of, count, out): draws distinct numbers below `of`."},
    {"read_sizes", labels_read_sizes, METH_VARARGS, "read_sizes(numbers, count, out): stores sizes of groups, which are numbered by the age of the first item."},
    {"read_members", labels_read_members, METH_VARARGS, "read_members(numbers, count, width, out): stores their items, [count, width]; -1: no more."},
    {"choose_members", labels_choose_members, METH_VARARGS, "choose_members(numbers, count, width, key, out): draws items of these groups, [count, width]. Returns the size of the\n"
     "smallest group."},
    {"take_lost", labels_take_lost, METH_NOARGS, "take_lost(): returns the items of lost groups, int64, each once."},
    {"record_lost", labels_record_lost, METH_NOARGS, "record_lost(): starts to record lost items for take_lost()."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef labels_properties[] = {
    {"items", counted_items, NULL, "Number of items.", NULL},
    {"marked", counted_marked, NULL, "Number of groups that can be drawn.", NULL},
    {"open", counted_open, NULL, "Number of incomplete groups.", NULL},
    {"withdrawn", counted_withdrawn, NULL, "Number of groups that lost an item.", NULL},
    {"given_up", counted_given_up, NULL, "Number of groups that were given up.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot labels_slots[] = {
    {Py_tp_doc, "Labels(elements, limit, by_age): a table of items by label."},
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
