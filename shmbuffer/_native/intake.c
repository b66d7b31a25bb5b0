/* How a batch comes in: a dict of arrays and tensors as the caller has it, compared with what the ring holds, and
 * written with one call.
 *
 *     data ──▶ each leaf by its key ──▶ where its bytes are ──▶ claim, fill, commit ──▶ where the items are
 *
 * What does not lie as it has to (another class or dtype, strides, a key too many) is answered with None before
 * anything is touched: Python converts it then, or says what is wrong. So there are no rules and no messages here
 * beside Python's: what is taken is what `Leaves.match` would take as it is.
 *
 * Leaves of two kinds are looked at without a call of Python:
 *   arrays    numpy's own struct, whose layout is part of numpy's ABI (PyArrayObject_fields in ndarraytypes.h). An
 *             example is compared with what the buffer protocol says of it before the layout is relied on.
 *   tensors   by the functions that their class offers (dlpack.h). */
#include "module.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"
#include "ring.h"

#define ROOM_LEAVES 64     /* more than these, and more priorities than those, do not go onto the stack */
#define ROOM_PRIORITIES 256
#define MOST_DIMS 32

struct array_object {
    PyObject_HEAD
    char *data;
    int rank;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};
#define ARRAY_C_CONTIGUOUS 1

/* What a leaf has to be. */
struct form {
    PyObject *array_dtype; /* the one object that stands for it; NULL: arrays are left to Python */
    struct dl_dtype dtype; /* of a tensor; no bits: tensors are left to Python */
    int rank;              /* of an item */
    int64_t shape[MOST_DIMS];
};

/* A dict of the data: under each key a leaf (no child), or another dict. Leaves are counted depth first. */
struct branch {
    Py_ssize_t size;
    PyObject **keys;
    struct branch **children;
};

struct intake_object {
    PyObject_HEAD
    PyObject *ring;
    struct branch *root; /* NULL: the data are the one leaf */
    struct form *forms;
    unsigned n_leaves;
    PyTypeObject *arrays, *tensors; /* exactly these classes; NULL: not looked at here */
    const struct dl_table *table;   /* NULL where there are no tensors: indices are bytes then */
    PyTypeObject *box; /* a class whose objects hold such a dict, under the attribute `inside` */
    PyObject *inside;
    PyObject *priority_key; /* of an entry that is no leaf; or NULL */
    int priority_leaf;      /* or -1 */
    PyObject *reals[2];     /* dtypes of arrays: float32, float64 */
    PyObject *is_negative;  /* name of a method */
};

/* Where the bytes of a leaf are, and how many dimensions it has. */
struct found {
    const unsigned char *data;
    const int64_t *shape;
    int rank;
};

static int64_t product(const int64_t *shape, int rank) {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) count *= shape[i];
    return count;
}

static bool lies_in_order(const struct dl_tensor *tensor) {
    if (tensor->strides == NULL) return true;
    int64_t stride = 1;
    for (int i = tensor->rank - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride) return product(tensor->shape, tensor->rank) == 0;
        stride *= tensor->shape[i];
    }
    return true;
}

/* A tensor on the CPU, contiguous, whose bytes are its numbers: torch keeps "negative" as a flag, which a view of the
 * imaginary parts of complex numbers has; it is contiguous only where it holds one number. */
static bool look_at_tensor(const struct intake_object *self, PyObject *leaf, struct dl_tensor *tensor) {
    if (self->table->look(leaf, tensor) != 0) return PyErr_Clear(), false;
    if (tensor->device != DL_CPU || !lies_in_order(tensor)) return false;
    if (tensor->dtype.code != DL_FLOAT || product(tensor->shape, tensor->rank) != 1) return true;
    PyObject *negative = PyObject_CallMethodObjArgs(leaf, self->is_negative, NULL);
    bool plain = negative == Py_False;
    if (negative == NULL) PyErr_Clear();
    Py_XDECREF(negative);
    return plain;
}

static bool look_at_leaf(const struct intake_object *self, const struct form *form, PyObject *leaf, struct found *out) {
    if (Py_TYPE(leaf) == self->arrays) {
        const struct array_object *array = (const struct array_object *)leaf;
        *out = (struct found){(const unsigned char *)array->data, (const int64_t *)array->shape, array->rank};
        return array->dtype == form->array_dtype && (array->flags & ARRAY_C_CONTIGUOUS);
    }
    if (Py_TYPE(leaf) == self->tensors) {
        struct dl_tensor tensor;
        if (!look_at_tensor(self, leaf, &tensor)) return false;
        *out = (struct found){(const unsigned char *)tensor.data + tensor.byte_offset, tensor.shape, tensor.rank};
        return form->dtype.bits && memcmp(&tensor.dtype, &form->dtype, sizeof form->dtype) == 0;
    }
    return false;
}

/* Whether a leaf is of one item, or of `count` of them, and each is as it has to be. */
static bool has_shape(const struct found *leaf, const struct form *form, bool single, uint64_t count) {
    int lead = single ? 0 : 1;
    if (leaf->rank != lead + form->rank || (lead && (uint64_t)leaf->shape[0] != count)) return false;
    for (int i = 0; i < form->rank; i++)
        if (leaf->shape[lead + i] != form->shape[i]) return false;
    return true;
}

/* Views of the ring's own memory are handed out: what lies there is copied before it is written, by Python. */
static bool is_the_rings(const struct shmb_ring *ring, const unsigned char *data) {
    for (unsigned i = 0; i < ring->n_leaves; i++)
        if ((uintptr_t)data - (uintptr_t)ring->leaves[i].base < ring->leaves[i].element_bytes * ring->elements) return true;
    return false;
}

/* The leaves of a dict, each held. */
static bool collect(const struct intake_object *self, const struct branch *branch, PyObject *data, PyObject **leaves,
                    unsigned *n, PyObject **priorities) {
    PyObject *dict = Py_TYPE(data) == self->box ? PyObject_GetAttr(data, self->inside) : Py_NewRef(data);
    if (dict == NULL) PyErr_Clear();
    bool fits = dict != NULL && PyDict_CheckExact(dict);
    Py_ssize_t more = 0;
    if (fits && priorities != NULL && self->priority_key != NULL) {
        PyObject *given = PyDict_GetItemWithError(dict, self->priority_key);
        if (given != NULL) *priorities = Py_NewRef(given), more = 1;
    }
    fits = fits && PyDict_Size(dict) == branch->size + more;
    for (Py_ssize_t i = 0; fits && i < branch->size; i++) {
        PyObject *value = PyDict_GetItemWithError(dict, branch->keys[i]);
        if (value == NULL)
            fits = false;
        else if (branch->children[i] != NULL)
            fits = collect(self, branch->children[i], value, leaves, n, NULL);
        else
            leaves[(*n)++] = Py_NewRef(value);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(dict);
    return fits;
}

/* One for each item, as float64; into `room` if they fit there. NULL: not as they have to be. */
static double *read_priorities(const struct intake_object *self, PyObject *given, uint64_t count, double *room) {
    const unsigned char *from;
    bool wide;
    int64_t size;
    if (Py_TYPE(given) == self->arrays) {
        const struct array_object *array = (const struct array_object *)given;
        wide = array->dtype == self->reals[1];
        if (!wide && array->dtype != self->reals[0]) return NULL;
        if (!(array->flags & ARRAY_C_CONTIGUOUS)) return NULL;
        from = (const unsigned char *)array->data;
        size = product((const int64_t *)array->shape, array->rank);
    } else {
        struct dl_tensor tensor;
        if (Py_TYPE(given) != self->tensors || !look_at_tensor(self, given, &tensor)) return NULL;
        wide = tensor.dtype.bits == 64;
        if (tensor.dtype.code != DL_FLOAT || tensor.dtype.lanes != 1 || (!wide && tensor.dtype.bits != 32)) return NULL;
        from = (const unsigned char *)tensor.data + tensor.byte_offset;
        size = product(tensor.shape, tensor.rank);
    }
    if ((uint64_t)size != count) return NULL;
    double *out = count <= ROOM_PRIORITIES ? room : malloc(count * sizeof *out);
    if (out == NULL) return NULL;
    if (wide) return memcpy(out, from, count * sizeof *out);
    for (uint64_t i = 0; i < count; i++) {
        float real;
        memcpy(&real, from + i * sizeof real, sizeof real);
        out[i] = (double)real;
    }
    return out;
}

/* Of each item: an int for all of them, or a buffer of uint32[count]. Their numbers were checked by Python. */
struct streams {
    uint32_t little[ROOM_PRIORITIES], *all;
    Py_buffer view;
};

static bool read_streams(PyObject *given, uint64_t count, struct streams *out) {
    if (!PyLong_Check(given)) {
        if (PyObject_GetBuffer(given, &out->view, PyBUF_SIMPLE) != 0) return PyErr_Clear(), false;
        out->all = out->view.buf;
        return (uint64_t)out->view.len == count * sizeof *out->all;
    }
    uint32_t stream = (uint32_t)PyLong_AsUnsignedLong(given);
    out->all = count <= ROOM_PRIORITIES ? out->little : malloc(count * sizeof *out->all);
    for (uint64_t i = 0; out->all != NULL && i < count; i++) out->all[i] = stream;
    return out->all != NULL;
}

static void forget_streams(struct streams *streams) {
    if (streams->view.obj != NULL)
        PyBuffer_Release(&streams->view);
    else if (streams->all != streams->little)
        free(streams->all);
}

/* Index of the items, int64[count], in memory of its own that goes with it. */
struct index_memory {
    struct dl_managed managed;
    int64_t shape[1], numbers[];
};

static void release_index(struct dl_managed *managed) { free(managed); }

static PyObject *index_of(const struct intake_object *self, struct index_memory *memory, uint64_t first, uint64_t count) {
    uint64_t capacity = shmb_binding_ring(self->ring)->capacity, slot = first % capacity;
    for (uint64_t i = 0; i < count; i++) {
        memory->numbers[i] = (int64_t)slot;
        if (++slot == capacity) slot = 0;
    }
    memory->shape[0] = (int64_t)count;
    memory->managed = (struct dl_managed){
        .version = {DL_MAJOR, 0},
        .release = release_index,
        .tensor = {memory->numbers, DL_CPU, 0, 1, {DL_INT, 64, 1}, memory->shape, NULL, 0},
    };
    void *index = NULL;
    if (self->table != NULL && self->table->wrap(&memory->managed, &index) == 0) return index;
    index = self->table != NULL ? NULL : PyByteArray_FromStringAndSize((char *)memory->numbers, (Py_ssize_t)(8 * count));
    free(memory);
    return index;
}

/* None: Python has to look at it. A negative number: a status, and nothing was written. */
static PyObject *take(struct intake_object *self, PyObject *data, bool single, int64_t timeout_ns, PyObject *in_streams) {
    struct shmb_ring *ring = shmb_binding_ring(self->ring);
    PyObject *room[ROOM_LEAVES], *given = NULL, *result = NULL, **leaves = room;
    const unsigned char *addresses[ROOM_LEAVES], **from = addresses;
    double little[ROOM_PRIORITIES], *priorities = NULL;
    struct index_memory *index = NULL;
    struct streams streams;
    unsigned n = 0;
    uint64_t count = single, first = 0;
    if (self->n_leaves > ROOM_LEAVES) {
        leaves = malloc(self->n_leaves * sizeof *leaves);
        from = malloc(self->n_leaves * sizeof *from);
    }
    bool fits = leaves != NULL && from != NULL;
    if (fits && self->root != NULL)
        fits = collect(self, self->root, data, leaves, &n, &given);
    else if (fits)
        leaves[n++] = Py_NewRef(data);
    for (unsigned i = 0; fits && i < n; i++) {
        const struct form *form = &self->forms[i];
        struct found leaf;
        fits = look_at_leaf(self, form, leaves[i], &leaf);
        if (!fits) break;
        if (i == 0 && !single && leaf.rank > 0) count = (uint64_t)leaf.shape[0];
        fits = count > 0 && has_shape(&leaf, form, single, count) && !is_the_rings(ring, leaf.data);
        from[i] = leaf.data;
    }
    if (fits && self->priority_leaf >= 0) given = Py_NewRef(leaves[self->priority_leaf]);
    if (fits && given != NULL) fits = (priorities = read_priorities(self, given, count, little)) != NULL;
    streams.all = NULL;
    if (in_streams != Py_None) {
        streams.view.obj = NULL;
        fits = fits && read_streams(in_streams, count, &streams);
    }
    if (fits && !single) fits = (index = malloc(sizeof *index + count * sizeof *index->numbers)) != NULL;
    if (fits) {
        int status = shmb_binding_write(self->ring, from, count, priorities, streams.all, timeout_ns, &first);
        if ((status == SHMB_BLOCKED || status == SHMB_LIMITED) &&
            shmb_binding_give_up(self->ring, timeout_ns) == SHMB_INTERRUPTED)
            status = SHMB_INTERRUPTED;
        if (status != SHMB_OK) {
            free(index);
            if (status != SHMB_INTERRUPTED) result = PyLong_FromLong(-(long)status);
        } else if (single) {
            result = PyLong_FromUnsignedLongLong(first % ring->capacity);
        } else {
            result = index_of(self, index, first, count);
        }
    } else {
        result = Py_NewRef(Py_None);
    }
    if (in_streams != Py_None) forget_streams(&streams);
    if (priorities != little) free(priorities);
    for (unsigned i = 0; leaves != NULL && i < n; i++) Py_DECREF(leaves[i]);
    Py_XDECREF(given);
    if (leaves != room) free(leaves);
    if (from != addresses) free(from);
    return result;
}

static PyObject *intake_call(PyObject *object, PyObject *const *args, Py_ssize_t nargs, const char *name, bool single) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "%s takes 3 arguments, %zd were given", name, nargs);
    int64_t timeout_ns = PyLong_AsLongLong(args[1]);
    if (timeout_ns == -1 && PyErr_Occurred()) return NULL;
    return take((struct intake_object *)object, args[0], single, timeout_ns, args[2]);
}

static PyObject *intake_add(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return intake_call(object, args, nargs, "add", true);
}

static PyObject *intake_extend(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return intake_call(object, args, nargs, "extend", false);
}

/* Whether numpy's struct is the one that we know: the buffer protocol has to say the same of an example. */
static bool is_as_known(PyObject *example, PyObject *dtype) {
    const struct array_object *array = (const struct array_object *)example;
    PyObject *turned = PyObject_GetAttrString(example, "T");
    Py_buffer view;
    bool known = turned != NULL && PyObject_GetBuffer(example, &view, PyBUF_STRIDES) == 0;
    if (known) {
        known = view.ndim == 2 && view.buf == array->data && array->rank == 2 && array->dtype == dtype &&
                memcmp(view.shape, array->shape, 2 * sizeof *view.shape) == 0 &&
                memcmp(view.strides, array->strides, 2 * sizeof *view.strides) == 0 &&
                (array->flags & ARRAY_C_CONTIGUOUS) &&
                !(((const struct array_object *)turned)->flags & ARRAY_C_CONTIGUOUS);
        PyBuffer_Release(&view);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(turned);
    return known;
}

const struct dl_table *shmb_dl_table(PyTypeObject *kind) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)kind, DL_ATTRIBUTE);
    const struct dl_table *table = capsule ? PyCapsule_GetPointer(capsule, DL_CAPSULE) : NULL;
    Py_XDECREF(capsule);
    if (PyErr_Occurred()) PyErr_Clear();
    while (table != NULL && table->version.major != DL_MAJOR) table = table->before;
    return table != NULL && table->look != NULL ? table : NULL;
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
    PyErr_Format(PyExc_TypeError, "Intake: %R should be a tuple", object);
    return false;
}

/* From ((key, None or the same again), ...). */
static struct branch *branch_of(PyObject *tree, unsigned *leaves) {
    if (!is_tuple(tree)) return NULL;
    struct branch *branch = PyMem_Calloc(1, sizeof *branch);
    if (branch == NULL) return (void)PyErr_NoMemory(), NULL;
    Py_ssize_t size = PyTuple_Size(tree);
    branch->keys = PyMem_Calloc((size_t)size + 1, sizeof *branch->keys);
    branch->children = PyMem_Calloc((size_t)size + 1, sizeof *branch->children);
    bool made = branch->keys != NULL && branch->children != NULL;
    branch->size = made ? size : ((void)PyErr_NoMemory(), 0);
    for (Py_ssize_t i = 0; made && i < size; i++) {
        PyObject *pair = PyTuple_GetItem(tree, i), *key, *below;
        made = is_tuple(pair) && PyArg_ParseTuple(pair, "OO:Intake", &key, &below);
        if (!made) break;
        branch->keys[i] = Py_NewRef(key);
        if (below == Py_None)
            *leaves += 1;
        else
            made = (branch->children[i] = branch_of(below, leaves)) != NULL;
    }
    if (!made) free_branch(branch), branch = NULL;
    return branch;
}

/* One (shape, example array or None, example tensor or None). */
static bool form_of(struct intake_object *self, struct form *form, PyObject *said) {
    PyObject *shape, *array, *tensor;
    if (!is_tuple(said) || !PyArg_ParseTuple(said, "O!OO:Intake", &PyTuple_Type, &shape, &array, &tensor)) return false;
    Py_ssize_t rank = PyTuple_Size(shape);
    if (rank > MOST_DIMS) return PyErr_Format(PyExc_ValueError, "Intake: a leaf of %zd dimensions", rank), false;
    form->rank = (int)rank;
    for (Py_ssize_t i = 0; i < rank; i++) form->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred()) return false;
    if (array != Py_None) {
        PyObject *dtype = PyObject_GetAttrString(array, "dtype");
        if (dtype == NULL) return false;
        if (is_as_known(array, dtype)) form->array_dtype = Py_NewRef(dtype);
        if (form->array_dtype != NULL && self->arrays == NULL)
            self->arrays = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(array));
        Py_DECREF(dtype);
    }
    struct dl_tensor example;
    if (tensor == Py_None || Py_TYPE(tensor) != self->tensors) return true;
    if (self->table->look(tensor, &example) != 0) PyErr_Clear();
    else if (example.dtype.code != DL_COMPLEX) form->dtype = example.dtype; /* complex ones have a flag, see look_at_tensor */
    return true;
}

static void intake_dealloc(PyObject *object) {
    struct intake_object *self = (struct intake_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; self->forms != NULL && i < self->n_leaves; i++) Py_XDECREF(self->forms[i].array_dtype);
    PyMem_Free(self->forms);
    free_branch(self->root);
    Py_XDECREF(self->ring);
    Py_XDECREF((PyObject *)self->arrays);
    Py_XDECREF((PyObject *)self->tensors);
    Py_XDECREF((PyObject *)self->box);
    Py_XDECREF(self->inside);
    Py_XDECREF(self->priority_key);
    Py_XDECREF(self->reals[0]);
    Py_XDECREF(self->reals[1]);
    Py_XDECREF(self->is_negative);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *intake_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ring", "tree", "forms", "tensors", "box", "inside", "reals", "priority", NULL};
    PyObject *ring, *tree, *forms, *tensors, *box, *inside, *single, *wide, *priority;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!O!U(OO)O:Intake", names, &ring, &tree, &PyTuple_Type, &forms,
                                     &PyType_Type, &tensors, &PyType_Type, &box, &inside, &single, &wide, &priority))
        return NULL;
    if (!PyObject_TypeCheck(ring, shmb_ring_type)) return PyErr_Format(PyExc_TypeError, "Intake: a Ring is needed");
    bool none = tensors == (PyObject *)Py_TYPE(Py_None); /* its class stands for "no tensors" */
    const struct dl_table *table = none ? NULL : shmb_dl_table((PyTypeObject *)tensors);
    unsigned n = (unsigned)PyTuple_Size(forms), leaves = tree == Py_None;
    const struct shmb_ring *of = shmb_binding_ring(ring);
    if ((table == NULL && !none) || of->lanes != 1 || of->bytes != NULL || n != of->n_leaves)
        return PyErr_Format(PyExc_ValueError, "Intake: one form a leaf, one lane, and tensors with " DL_ATTRIBUTE " are needed");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct intake_object *self = (struct intake_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->ring = Py_NewRef(ring);
    if (!none) self->tensors = (PyTypeObject *)Py_NewRef(tensors);
    self->table = table;
    self->box = (PyTypeObject *)Py_NewRef(box);
    self->inside = Py_NewRef(inside);
    self->reals[0] = Py_NewRef(single);
    self->reals[1] = Py_NewRef(wide);
    self->is_negative = PyUnicode_InternFromString("is_neg");
    self->priority_leaf = -1;
    if (PyLong_Check(priority)) {
        long leaf = PyLong_AsLong(priority);
        self->priority_leaf = leaf >= 0 && leaf < (long)n ? (int)leaf : (int)n;
    }
    if (!PyLong_Check(priority) && priority != Py_None)
        self->priority_key = Py_NewRef(priority);
    self->forms = PyMem_Calloc((size_t)n + 1, sizeof *self->forms);
    bool made = self->forms != NULL && self->is_negative != NULL;
    if (self->forms == NULL) PyErr_NoMemory();
    self->n_leaves = self->forms ? n : 0;
    for (unsigned i = 0; made && i < n; i++) made = form_of(self, &self->forms[i], PyTuple_GetItem(forms, i));
    if (made && tree != Py_None) made = (self->root = branch_of(tree, &leaves)) != NULL;
    if (made && PyErr_Occurred() == NULL && (leaves != n || self->priority_leaf >= (int)n))
        PyErr_Format(PyExc_ValueError, "Intake: the tree has %u leaves, %u forms are given; priority is %R", leaves, n, priority);
    if (!made || PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))intake_##name, METH_FASTCALL, text}
static PyMethodDef methods[] = {
    FAST(add, "add(item, timeout_ns, streams): write one item; its slot, a status below 0, or None: not as it lies."),
    FAST(extend, "extend(batch, timeout_ns, streams): write a batch; int64 slots, a status below 0, or None: not as it lies."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Intake(ring, tree, forms, tensors, box, inside, reals, priority)"},
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
