/* How a batch goes out: memory for each leaf, one draw that fills it, and a tensor around each.
 *
 *     count, key ──▶ memory ──▶ draw, copy, validate, weigh ──▶ [leaf, ...], index, tickets, weights
 *
 * A tensor that is made around memory of ours (dlpack.h) takes half as long as one that torch is asked for, and its
 * address need not be asked for either. Its memory is its own, and goes with it. What could not be drawn is answered
 * with a status, and Python does the waiting or says what is wrong, as for any other call. */
#include "module.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"
#include "ring.h"

#define ROOM_LEAVES 64
#define CACHE_LINE 64

struct out_form {
    struct dl_dtype dtype;
    int32_t rank; /* with the dimension of the batch */
    int64_t *shape;
};

struct outtake_object {
    PyObject_HEAD
    PyObject *ring;
    struct out_form *forms; /* one a leaf */
    unsigned n_leaves;
    const struct dl_table *table;
};

/* A tensor's memory: this, its shape, and from the next cache line on its bytes. */
struct out_memory {
    struct dl_managed managed;
    int64_t shape[];
};

static void release_memory(struct dl_managed *managed) { free(managed); }

static struct out_memory *memory_of(struct dl_dtype dtype, int32_t rank, const int64_t *item, uint64_t count, uint64_t bytes) {
    struct out_memory *memory = malloc(sizeof *memory + (size_t)rank * sizeof *memory->shape + bytes + CACHE_LINE);
    if (memory == NULL) return NULL;
    uintptr_t end = (uintptr_t)&memory->shape[rank];
    memory->shape[0] = (int64_t)count;
    for (int32_t i = 1; i < rank; i++) memory->shape[i] = item[i - 1];
    memory->managed = (struct dl_managed){
        .version = {DL_MAJOR, 0},
        .release = release_memory,
        .tensor = {(void *)((end + CACHE_LINE - 1) & ~(uintptr_t)(CACHE_LINE - 1)), DL_CPU, 0, rank, dtype, memory->shape, NULL, 0},
    };
    return memory;
}

static PyObject *tensor_of(const struct outtake_object *self, struct out_memory **memory) {
    void *tensor = NULL;
    if (*memory == NULL) return Py_NewRef(Py_None);
    if (self->table->wrap(&(*memory)->managed, &tensor) == 0) *memory = NULL; /* it is the tensor's now */
    return tensor;
}

/* sample(count, key, beta or None, timeout_ns) -> ([leaf, ...], index, tickets, weights or None), or a status */
static PyObject *outtake_sample(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct outtake_object *self = (struct outtake_object *)object;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "sample takes 4 arguments, %zd were given", nargs);
    struct shmb_ring *ring = shmb_binding_ring(self->ring);
    uint64_t count = PyLong_AsUnsignedLongLong(args[0]), key = PyLong_AsUnsignedLongLongMask(args[1]), redrawn;
    bool prioritized = args[2] != Py_None;
    double beta = prioritized ? PyFloat_AsDouble(args[2]) : 0;
    int64_t timeout_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count > ((uint64_t)1 << 40)) return PyErr_NoMemory();
    const struct dl_dtype integer = {DL_INT, 64, 1}, real = {DL_FLOAT, 32, 1};
    struct out_memory *memory[ROOM_LEAVES + 3] = {0};
    unsigned char *out[ROOM_LEAVES];
    unsigned n = self->n_leaves;
    bool there = true;
    for (unsigned i = 0; there && i < n; i++) {
        const struct out_form *form = &self->forms[i];
        memory[i] = memory_of(form->dtype, form->rank, form->shape, count, count * ring->leaves[i].element_bytes);
        if ((there = memory[i] != NULL)) out[i] = memory[i]->managed.tensor.data;
    }
    there = there && (memory[n] = memory_of(integer, 1, NULL, count, 8 * count)) != NULL &&
            (memory[n + 1] = memory_of(integer, 1, NULL, count, 8 * count)) != NULL &&
            (!prioritized || (memory[n + 2] = memory_of(real, 1, NULL, count, 4 * count)) != NULL);
    PyObject *leaves = NULL, *result = NULL;
    int status = SHMB_NO_MEMORY;
    if (there)
        status = shmb_binding_sample(self->ring, count, key, out, memory[n]->managed.tensor.data,
                                     memory[n + 1]->managed.tensor.data, prioritized ? memory[n + 2]->managed.tensor.data : NULL,
                                     beta, prioritized, timeout_ns, &redrawn);
    if (status == SHMB_OK && (leaves = PyList_New((Py_ssize_t)n)) != NULL && (result = PyTuple_New(4)) != NULL) {
        PyObject *tensor = leaves;
        for (unsigned i = 0; tensor != NULL && i < n; i++)
            if ((tensor = tensor_of(self, &memory[i])) != NULL) PyList_SetItem(leaves, (Py_ssize_t)i, tensor);
        for (unsigned i = 0; tensor != NULL && i < 3; i++)
            if ((tensor = tensor_of(self, &memory[n + i])) != NULL) PyTuple_SetItem(result, (Py_ssize_t)i + 1, tensor);
        PyTuple_SetItem(result, 0, leaves);
        leaves = NULL;
        if (tensor == NULL) Py_CLEAR(result);
    } else if (status != SHMB_OK && status != SHMB_INTERRUPTED) {
        result = PyLong_FromLong(-(long)status);
    }
    Py_XDECREF(leaves);
    for (unsigned i = 0; i < n + 3; i++) free(memory[i]);
    return result;
}

static void outtake_dealloc(PyObject *object) {
    struct outtake_object *self = (struct outtake_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; self->forms != NULL && i < self->n_leaves; i++) PyMem_Free(self->forms[i].shape);
    PyMem_Free(self->forms);
    Py_XDECREF(self->ring);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* From an example of one item, which is of the class that makes tensors. */
static bool form_of(struct outtake_object *self, struct out_form *form, PyObject *example, uint64_t element_bytes) {
    struct dl_tensor tensor;
    if (self->table->look(example, &tensor) != 0) return false;
    uint64_t bytes = (uint64_t)tensor.dtype.bits / 8 * tensor.dtype.lanes;
    for (int32_t i = 0; i < tensor.rank; i++) bytes *= (uint64_t)tensor.shape[i];
    if (tensor.device != DL_CPU || tensor.dtype.bits % 8 || bytes != element_bytes)
        return PyErr_Format(PyExc_ValueError, "Outtake: %R is not an item of %llu bytes", example, (unsigned long long)element_bytes), false;
    form->dtype = tensor.dtype;
    form->rank = tensor.rank + 1;
    form->shape = PyMem_Malloc(((size_t)tensor.rank + 1) * sizeof *form->shape);
    if (form->shape == NULL) return (void)PyErr_NoMemory(), false;
    for (int32_t i = 0; i < tensor.rank; i++) form->shape[i] = tensor.shape[i];
    return true;
}

static PyObject *outtake_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ring", "examples", "tensors", NULL};
    PyObject *ring, *examples, *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!:Outtake", names, &ring, &PyTuple_Type, &examples, &PyType_Type, &tensors))
        return NULL;
    if (!PyObject_TypeCheck(ring, shmb_ring_type)) return PyErr_Format(PyExc_TypeError, "Outtake: a Ring is needed");
    const struct dl_table *table = shmb_dl_table((PyTypeObject *)tensors);
    const struct shmb_ring *of = shmb_binding_ring(ring);
    unsigned n = (unsigned)PyTuple_Size(examples);
    if (table == NULL || of->bytes != NULL || n != of->n_leaves || n > ROOM_LEAVES)
        return PyErr_Format(PyExc_ValueError, "Outtake: one example a leaf, not more than %d, and tensors with " DL_ATTRIBUTE " are needed",
                            ROOM_LEAVES);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct outtake_object *self = (struct outtake_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->ring = Py_NewRef(ring);
    self->table = table;
    self->forms = PyMem_Calloc((size_t)n + 1, sizeof *self->forms);
    if (self->forms == NULL) PyErr_NoMemory();
    self->n_leaves = self->forms ? n : 0;
    bool made = self->forms != NULL;
    for (unsigned i = 0; made && i < n; i++)
        made = form_of(self, &self->forms[i], PyTuple_GetItem(examples, (Py_ssize_t)i), of->leaves[i].element_bytes);
    if (!made) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"sample", (PyCFunction)(void (*)(void))outtake_sample, METH_FASTCALL,
     "sample(count, key, beta or None, timeout_ns): ([leaf, ...], index, tickets, weights or None), or a status below 0."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Outtake(ring, examples, tensors)"},
    {Py_tp_new, outtake_new},
    {Py_tp_dealloc, outtake_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec shmb_outtake_spec = {
    .name = "shmbuffer._native._core.Outtake",
    .basicsize = sizeof(struct outtake_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
