/* Fast path of writes: takes a dict of arrays and tensors as they are, in a single item numbers, too, or a list of
 * items. It compares them with the leaves of the ring, and writes them in one call.
 *
 *     data ──▶ each leaf by its key ──▶ address of its bytes ──▶ claim, fill, commit ──▶ slots of the items
 *
 * Data that do not fit (another class or dtype, strides, an additional key) are answered with None before anything
 * changes. Python code then converts them, or raises an error. So this file adds no rules and no messages: it
 * accepts what `Leaves.match` would use as it is, or convert from a number. */
#include "python/module.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/ring.h"
#include "python/leaf.h"

#define STACK_LEAVES 64     /* with more leaves or priorities, arrays are not on the stack */
#define STACK_PRIORITIES 256

/* A dict of the data: each key has a leaf (no child), or another dict. Leaves are numbered depth first. */
struct branch {
    Py_ssize_t size;
    PyObject **keys;
    struct branch **children;
};

struct intake_object {
    PyObject_HEAD
    PyObject *ring;
    struct branch *root; /* NULL: the data are a single leaf */
    struct shmb_form *forms;
    unsigned n_leaves;
    const struct dl_table *tensors; /* NULL: indices are returned as bytes */
    PyTypeObject *box; /* a class whose objects have such a dict as the attribute `inside` */
    PyObject *inside;
    PyObject *priority_key; /* key of an entry that is not a leaf; or NULL */
    int priority_leaf;      /* or -1 */
    uintptr_t lowest, span; /* address range that contains the ring's mappings */
    int64_t timeout_ns;
};

/* True if a leaf has the shape of one item, or of `count` items. */
static bool has_shape(const struct shmb_leaf_data *leaf, const struct shmb_form *form, bool single, uint64_t count) {
    int lead = single ? 0 : 1;
    if (leaf->rank != lead + form->rank || (lead && (uint64_t)leaf->shape[0] != count)) return false;
    for (int i = 0; i < form->rank; i++)
        if (leaf->shape[lead + i] != form->shape[i]) return false;
    return true;
}

/* True if the data are a view of the ring's own memory. Python copies such data before it writes them. */
static bool is_ring_memory(const struct intake_object *self, const unsigned char *data) {
    const struct shmb_ring *ring = shmb_binding_ring(self->ring);
    for (unsigned i = 0; (uintptr_t)data - self->lowest < self->span && i < ring->n_leaves; i++)
        if ((uintptr_t)data - (uintptr_t)ring->leaves[i].base < ring->leaves[i].element_bytes * ring->elements) return true;
    return false;
}

/* The value of one of our keys. Most dicts have our order of keys, and keys that are literals in a program are
 * interned. */
static PyObject *find_value(PyObject *dict, PyObject *key, Py_ssize_t *at) {
    PyObject *dict_key, *value;
    while (PyDict_Next(dict, at, &dict_key, &value))
        if (dict_key == key) return value;
    return PyDict_GetItemWithError(dict, key);
}

/* Collects the leaves of a dict, with a reference to each. */
static bool collect_leaves(const struct intake_object *self, const struct branch *branch, PyObject *data, PyObject **leaves,
                    unsigned *n, PyObject **priorities) {
    PyObject *dict = Py_TYPE(data) == self->box ? PyObject_GetAttr(data, self->inside) : Py_NewRef(data);
    if (dict == NULL) PyErr_Clear();
    bool fits = dict != NULL && PyDict_CheckExact(dict);
    Py_ssize_t more = 0, at = 0;
    if (fits && priorities != NULL && self->priority_key != NULL) {
        PyObject *priority_object = PyDict_GetItemWithError(dict, self->priority_key);
        if (priority_object != NULL) *priorities = Py_NewRef(priority_object), more = 1;
    }
    fits = fits && PyDict_Size(dict) == branch->size + more;
    for (Py_ssize_t i = 0; fits && i < branch->size; i++) {
        PyObject *value = find_value(dict, branch->keys[i], &at);
        if (value == NULL)
            fits = false;
        else if (branch->children[i] != NULL)
            fits = collect_leaves(self, branch->children[i], value, leaves, n, NULL);
        else
            leaves[(*n)++] = Py_NewRef(value);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(dict);
    return fits;
}

/* Streams of the items: one int for all, or a buffer of uint32[count]. Python has validated them. */
struct streams {
    uint32_t small[STACK_PRIORITIES], *all;
    Py_buffer view;
};

static bool read_streams(PyObject *priority_object, uint64_t count, struct streams *out) {
    if (!PyLong_Check(priority_object)) {
        if (PyObject_GetBuffer(priority_object, &out->view, PyBUF_SIMPLE) != 0) return PyErr_Clear(), false;
        out->all = out->view.buf;
        return (uint64_t)out->view.len == count * sizeof *out->all;
    }
    uint32_t stream = (uint32_t)PyLong_AsUnsignedLong(priority_object);
    out->all = count <= STACK_PRIORITIES ? out->small : malloc(count * sizeof *out->all);
    for (uint64_t i = 0; out->all != NULL && i < count; i++) out->all[i] = stream;
    return out->all != NULL;
}

static void release_streams(struct streams *streams) {
    if (streams->view.obj != NULL)
        PyBuffer_Release(&streams->view);
    else if (streams->all != streams->small)
        free(streams->all);
}

/* The resulting index, int64[count], which owns its memory. */
struct index_memory {
    struct dl_managed managed;
    int64_t shape[1], numbers[];
};

static void release_index(struct dl_managed *managed) { free(managed); }

static PyObject *build_index(const struct intake_object *self, struct index_memory *memory, uint64_t first, uint64_t count) {
    uint64_t capacity = shmb_binding_ring(self->ring)->capacity;
    for (uint64_t done = 0, slot = first % capacity, n; done < count; done += n, slot = 0) {
        n = count - done < capacity - slot ? count - done : capacity - slot;
        for (uint64_t i = 0; i < n; i++) memory->numbers[done + i] = (int64_t)(slot + i);
    }
    memory->shape[0] = (int64_t)count;
    memory->managed = (struct dl_managed){
        .version = {DL_MAJOR, 0},
        .release = release_index,
        .tensor = {memory->numbers, DL_CPU, 0, 1, {DL_INT, 64, 1}, memory->shape, NULL, 0},
    };
    void *index = NULL;
    if (self->tensors != NULL && self->tensors->wrap(&memory->managed, &index) == 0) return index;
    index = self->tensors != NULL ? NULL : PyByteArray_FromStringAndSize((char *)memory->numbers, (Py_ssize_t)(8 * count));
    free(memory);
    return index;
}

/* Leaves of a batch or an item, with references and addresses. */
struct leaves {
    PyObject *small_references[STACK_LEAVES], **references, *priority_object; /* given: the priorities */
    const unsigned char *small_addresses[STACK_LEAVES], **at;
    uint64_t numbers[STACK_LEAVES];
    unsigned n;
};

static bool make_leaves(const struct intake_object *self, struct leaves *leaves) {
    bool on_heap = self->n_leaves > STACK_LEAVES;
    leaves->references = on_heap ? malloc(self->n_leaves * sizeof *leaves->references) : leaves->small_references;
    leaves->at = on_heap ? malloc(self->n_leaves * sizeof *leaves->at) : leaves->small_addresses;
    leaves->priority_object = NULL;
    leaves->n = 0;
    return leaves->references != NULL && leaves->at != NULL;
}

static void release_leaves(struct leaves *leaves) {
    for (unsigned i = 0; i < leaves->n; i++) Py_DECREF(leaves->references[i]);
    Py_CLEAR(leaves->priority_object);
    leaves->n = 0;
}

static void free_leaves(struct leaves *leaves) {
    release_leaves(leaves);
    if (leaves->references != leaves->small_references) free(leaves->references);
    if (leaves->at != leaves->small_addresses) free(leaves->at);
}

/* True if a batch, or an item, fits. `count` is 1 for an item. */
static bool check_items(const struct intake_object *self, PyObject *data, bool single, struct leaves *leaves, uint64_t *count) {
    bool fits = true;
    *count = single;
    if (self->root != NULL)
        fits = collect_leaves(self, self->root, data, leaves->references, &leaves->n, &leaves->priority_object);
    else
        leaves->references[leaves->n++] = Py_NewRef(data);
    for (unsigned i = 0; fits && i < leaves->n; i++) {
        const struct shmb_form *form = &self->forms[i];
        struct shmb_leaf_data leaf;
        uint64_t *number = single && i < STACK_LEAVES ? &leaves->numbers[i] : NULL;
        fits = shmb_locate_leaf(form, leaves->references[i], number, &leaf);
        if (!fits) break;
        if (i == 0 && !single && leaf.rank > 0) *count = (uint64_t)leaf.shape[0];
        fits = *count > 0 && has_shape(&leaf, form, single, *count) && !is_ring_memory(self, leaf.data);
        leaves->at[i] = leaf.data;
    }
    if (fits && self->priority_leaf >= 0) leaves->priority_object = Py_NewRef(leaves->references[self->priority_leaf]);
    return fits;
}

/* NULL: the priorities need conversion in Python. */
static double *read_item_priorities(const struct intake_object *self, const struct leaves *leaves, uint64_t count, double *buffer) {
    int which = self->priority_leaf;
    return shmb_read_priorities(leaves->priority_object, which < 0 ? NULL : &self->forms[which], which < 0 ? NULL : leaves->at[which], count, buffer,
                                count == 1 ? 1 : STACK_PRIORITIES);
}

static uint64_t round_to_lines(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Copies the items of a list to consecutive rows of each leaf, in memory that the caller frees; leaves->at gets the
 * addresses. NULL: an item does not fit. `priorities` is set to those of all items, or NULL. */
static void *gather_items(const struct intake_object *self, PyObject *list, struct leaves *leaves, uint64_t count, double **priorities) {
    const struct shmb_ring *ring = shmb_binding_ring(self->ring);
    uint64_t column = round_to_lines(count * sizeof(double)), bytes = column, one = 0;
    for (unsigned i = 0; i < ring->n_leaves; i++) bytes += round_to_lines(count * ring->leaves[i].item_bytes);
    struct leaves item;
    unsigned char *buffer = malloc(bytes);
    bool fits = make_leaves(self, &item) && buffer != NULL, has_priorities = false;
    for (uint64_t row = 0; fits && row < count; row++) {
        release_leaves(&item);
        PyObject *data = PyList_GetItem(list, (Py_ssize_t)row); /* NULL: the list has become shorter */
        fits = data != NULL && check_items(self, data, true, &item, &one);
        unsigned char *at = buffer + column;
        for (unsigned i = 0; fits && i < ring->n_leaves; i++) {
            uint64_t size = ring->leaves[i].item_bytes;
            memcpy(at + row * size, item.at[i], size);
            leaves->at[i] = at;
            at += round_to_lines(count * size);
        }
        fits = fits && (row == 0 || has_priorities == (item.priority_object != NULL)); /* either all items have priorities or none */
        has_priorities = item.priority_object != NULL;
        fits = fits && (!has_priorities || read_item_priorities(self, &item, 1, (double *)buffer + row) != NULL);
    }
    free_leaves(&item);
    if (!fits) return PyErr_Clear(), free(buffer), NULL;
    *priorities = has_priorities ? (double *)buffer : NULL;
    return buffer;
}

/* Returns a slot, slots, or a negated status. */
static PyObject *write_leaves(struct intake_object *self, const struct leaves *leaves, uint64_t count, const double *priorities,
                              const uint32_t *streams, bool single) {
    struct index_memory *index = NULL;
    uint64_t first = 0;
    if (!single && (index = malloc(sizeof *index + count * sizeof *index->numbers)) == NULL) return PyErr_NoMemory();
    int status = shmb_binding_write(self->ring, leaves->at, count, priorities, streams, self->timeout_ns, &first);
    if ((status == SHMB_BLOCKED || status == SHMB_LIMITED) &&
        shmb_binding_stop_waiting(self->ring, self->timeout_ns) == SHMB_INTERRUPTED)
        status = SHMB_INTERRUPTED;
    if (status != SHMB_OK) {
        free(index);
        return status == SHMB_INTERRUPTED ? NULL : PyLong_FromLong(-(long)status);
    }
    if (single) return PyLong_FromUnsignedLongLong(first % shmb_binding_ring(self->ring)->capacity);
    return build_index(self, index, first, count);
}

/* Returns None if Python must handle the data. A negative number is a negated status; nothing was written then. */
static PyObject *insert_items(struct intake_object *self, PyObject *data, bool single, PyObject *in_streams) {
    double small[STACK_PRIORITIES], *priorities = NULL;
    PyObject *result = NULL;
    struct leaves leaves;
    struct streams streams;
    void *gathered = NULL;
    uint64_t count = 0;
    bool fits = make_leaves(self, &leaves);
    if (fits && !single && PyList_CheckExact(data)) {
        count = (uint64_t)PyList_Size(data);
        fits = count > 0 && (gathered = gather_items(self, data, &leaves, count, &priorities)) != NULL;
    } else if (fits && (fits = check_items(self, data, single, &leaves, &count)) && leaves.priority_object != NULL) {
        fits = (priorities = read_item_priorities(self, &leaves, count, small)) != NULL;
    }
    streams.all = NULL;
    if (in_streams != Py_None) {
        streams.view.obj = NULL;
        fits = fits && read_streams(in_streams, count, &streams);
    }
    result = fits ? write_leaves(self, &leaves, count, priorities, streams.all, single) : Py_NewRef(Py_None);
    if (in_streams != Py_None) release_streams(&streams);
    if (gathered == NULL && priorities != small) free(priorities);
    free(gathered);
    free_leaves(&leaves);
    return result;
}

static PyObject *intake_call(PyObject *object, PyObject *const *args, Py_ssize_t nargs, const char *name, bool single) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "Intake.%s() takes 2 arguments, but %zd were given.", name, nargs);
    return insert_items((struct intake_object *)object, args[0], single, args[1]);
}

static PyObject *intake_add(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return intake_call(object, args, nargs, "add", true);
}

static PyObject *intake_extend(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return intake_call(object, args, nargs, "extend", false);
}

static void free_branch(struct branch *branch) {
    if (branch == NULL) return;
    for (Py_ssize_t i = 0; i < branch->size; i++) {
        Py_XDECREF(branch->keys[i]);
        free_branch(branch->children[i]);
    }
    PyMem_Free(branch->keys);
    PyMem_Free(branch->children);
    PyMem_Free(branch);
}

static bool is_tuple(PyObject *object) {
    if (PyTuple_Check(object)) return true;
    PyErr_Format(PyExc_TypeError, "Intake: the tree must consist of tuples, but it contains %R.", object);
    return false;
}

/* From ((key, None or such a tuple), ...). */
static struct branch *build_branch(PyObject *tree, unsigned *leaves) {
    if (!is_tuple(tree)) return NULL;
    struct branch *branch = PyMem_Calloc(1, sizeof *branch);
    if (branch == NULL) return (void)PyErr_NoMemory(), NULL;
    Py_ssize_t size = PyTuple_Size(tree);
    branch->keys = PyMem_Calloc((size_t)size + 1, sizeof *branch->keys);
    branch->children = PyMem_Calloc((size_t)size + 1, sizeof *branch->children);
    bool ok = branch->keys != NULL && branch->children != NULL;
    branch->size = ok ? size : ((void)PyErr_NoMemory(), 0);
    for (Py_ssize_t i = 0; ok && i < size; i++) {
        PyObject *pair = PyTuple_GetItem(tree, i), *key, *below;
        ok = is_tuple(pair) && PyArg_ParseTuple(pair, "OO:Intake", &key, &below);
        if (!ok) break;
        branch->keys[i] = Py_NewRef(key);
        PyUnicode_InternInPlace(&branch->keys[i]);
        if (below == Py_None)
            *leaves += 1;
        else
            ok = (branch->children[i] = build_branch(below, leaves)) != NULL;
    }
    if (!ok) free_branch(branch), branch = NULL;
    return branch;
}

static void intake_dealloc(PyObject *object) {
    struct intake_object *self = (struct intake_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; self->forms != NULL && i < self->n_leaves; i++) shmb_release_form(&self->forms[i]);
    PyMem_Free(self->forms);
    free_branch(self->root);
    Py_XDECREF(self->ring);
    Py_XDECREF((PyObject *)self->box);
    Py_XDECREF(self->inside);
    Py_XDECREF(self->priority_key);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static void set_span(struct intake_object *self, const struct shmb_ring *ring) {
    uintptr_t lowest = UINTPTR_MAX, end = 0;
    for (unsigned i = 0; i < ring->n_leaves; i++) {
        uintptr_t base = (uintptr_t)ring->leaves[i].base, leaf_end = base + ring->leaves[i].element_bytes * ring->elements;
        lowest = base < lowest ? base : lowest;
        end = leaf_end > end ? leaf_end : end;
    }
    self->lowest = lowest, self->span = end - lowest;
}

static PyObject *intake_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ring", "tree", "forms", "tensors", "box", "inside", "priority", "timeout_ns", NULL};
    PyObject *ring, *tree, *forms, *box, *inside, *priority;
    long long timeout_ns;
    int tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!pO!UOL:Intake", names, &ring, &tree, &PyTuple_Type, &forms, &tensors,
                                     &PyType_Type, &box, &inside, &priority, &timeout_ns))
        return NULL;
    if (!PyObject_TypeCheck(ring, shmb_ring_type)) return PyErr_Format(PyExc_TypeError, "Intake: the first argument must be a Ring.");
    unsigned n = (unsigned)PyTuple_Size(forms), leaves = tree == Py_None;
    const struct shmb_ring *core_ring = shmb_binding_ring(ring);
    if ((tensors && shmb_tensor_table() == NULL) || core_ring->lanes != 1 || core_ring->bytes != NULL || n != core_ring->n_leaves)
        return PyErr_Format(PyExc_ValueError, "Intake needs a ring with one lane and rows of leaves, one form for each leaf, and a registered tensor class.");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct intake_object *self = (struct intake_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->ring = Py_NewRef(ring);
    self->box = (PyTypeObject *)Py_NewRef(box);
    self->inside = Py_NewRef(inside);
    self->timeout_ns = timeout_ns;
    set_span(self, core_ring);
    self->tensors = tensors ? shmb_tensor_table() : NULL;
    self->priority_leaf = -1;
    if (PyLong_Check(priority)) {
        long leaf = PyLong_AsLong(priority);
        self->priority_leaf = leaf >= 0 && leaf < (long)n ? (int)leaf : (int)n;
    }
    if (!PyLong_Check(priority) && priority != Py_None)
        self->priority_key = Py_NewRef(priority);
    self->forms = PyMem_Calloc((size_t)n + 1, sizeof *self->forms);
    bool ok = self->forms != NULL;
    if (!ok) PyErr_NoMemory();
    self->n_leaves = self->forms ? n : 0;
    for (unsigned i = 0; ok && i < n; i++) ok = shmb_parse_form(&self->forms[i], PyTuple_GetItem(forms, i));
    if (ok && tree != Py_None) ok = (self->root = build_branch(tree, &leaves)) != NULL;
    if (ok && PyErr_Occurred() == NULL && (leaves != n || self->priority_leaf >= (int)n))
        PyErr_Format(PyExc_ValueError, "Intake: the tree has %u leaves, but %u forms were given, or priority is not a leaf: %R.", leaves, n, priority);
    if (!ok || PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))intake_##name, METH_FASTCALL, text}
static PyMethodDef methods[] = {
    FAST(add, "add(item, streams): writes one item. Returns its slot, a negated status, or None if the item needs conversion."),
    FAST(extend, "extend(batch, streams): writes a batch. Returns int64 slots, a negated status, or None if the batch needs conversion."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Intake(ring, tree, forms, tensors, box, inside, priority, timeout_ns): the fast path of writes."},
    {Py_tp_new, intake_new},
    {Py_tp_dealloc, intake_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec shmb_intake_spec = {
    .name = "shmbuffer._native._core.Intake",
    .basicsize = sizeof(struct intake_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
