/* How a batch goes out: memory for each leaf, one draw that fills it, and a tensor around each.
 *
 *     count, key ──▶ memory ──▶ draw, copy, validate, weigh ──▶ [leaf, ...], index, tickets, weights
 *
 * A tensor that is made around memory of ours (dlpack.h) takes half as long as one that torch is asked for, and its
 * address need not be asked for either. Its memory is its own. Of large leaves it is kept when the tensor goes, as much
 * as two batches have, for the next one: what malloc gives back to the system would be a page fault every 4 KB.
 *
 * What could not be drawn is answered with a status, and Python does the waiting or says what is wrong, as for any
 * other call. */
#include "module.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"
#include "ring.h"

#define ROOM_LEAVES 64
#define CACHE_LINE 64
#define MOST ((uint64_t)1 << 40) /* items of a batch */
#define LARGE (64u << 10) /* bytes of a leaf; smaller ones malloc keeps by itself */

struct out_form {
    struct dl_dtype dtype;
    int32_t rank; /* with the dimension of the batch */
    int64_t *shape;
};

struct out_memory;

/* Memory of tensors that are gone. It outlives the outtake as long as tensors are around that may come back to it. The
 * child of a fork does without, and makes one of its own: the mutex may be held by a thread that it has not got. */
struct pool {
    pthread_mutex_t mutex;
    uint64_t life; /* of the process */
    uint64_t users; /* the outtake, and tensors */
    uint64_t batch; /* bytes of a batch, for as long as its form is the same; 0: nothing is kept any more */
    uint64_t kept;  /* bytes */
    struct out_memory *first;
};

struct outtake_object {
    PyObject_HEAD
    PyObject *ring;
    struct pool *pool;
    struct out_form *forms; /* one a leaf */
    unsigned n_leaves;
    const struct dl_table *table;
};

/* A tensor's memory: this, its shape, and from the next cache line on its bytes. */
struct out_memory {
    struct dl_managed managed;
    struct pool *pool; /* NULL: of a small leaf */
    struct out_memory *next;
    uint64_t room;
    int64_t shape[];
};

static bool lock_pool(struct pool *pool) { return shmb_life() == pool->life && pthread_mutex_lock(&pool->mutex) == 0; }

static void drop_kept(struct pool *pool) {
    for (struct out_memory *memory = pool->first, *next; memory != NULL; memory = next) {
        next = memory->next;
        free(memory);
    }
    pool->first = NULL;
    pool->kept = 0;
}

/* The mutex is held; it is released here. */
static void leave_pool(struct pool *pool) {
    bool last = --pool->users == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (!last) return;
    drop_kept(pool);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static struct out_memory *take_kept(struct pool *pool, uint64_t room) {
    struct out_memory **at = &pool->first;
    while (*at != NULL && (*at)->room != room) at = &(*at)->next;
    struct out_memory *found = *at;
    if (found == NULL) return NULL;
    *at = found->next;
    pool->kept -= room;
    return found;
}

static struct out_memory *take_memory(struct pool *pool, uint64_t room) {
    struct out_memory *memory = NULL;
    bool pooled = room >= LARGE && lock_pool(pool);
    if (pooled) memory = take_kept(pool, room);
    if (memory == NULL) memory = malloc(room);
    if (memory != NULL) memory->pool = pooled ? pool : NULL, memory->room = room;
    if (pooled && memory != NULL) pool->users++;
    if (pooled) pthread_mutex_unlock(&pool->mutex);
    return memory;
}

static void give_memory(struct out_memory *memory) {
    struct pool *pool = memory == NULL ? NULL : memory->pool;
    if (pool == NULL || !lock_pool(pool)) return free(memory);
    bool keeps = pool->kept + memory->room <= 2 * pool->batch;
    if (keeps) {
        memory->next = pool->first;
        pool->first = memory;
        pool->kept += memory->room;
    }
    leave_pool(pool);
    if (!keeps) free(memory);
}

/* Of another form than the batches before: what is kept does not fit. */
static void expect_batch(struct pool *pool, uint64_t bytes) {
    if (!lock_pool(pool)) return;
    if (pool->batch != bytes) drop_kept(pool);
    pool->batch = bytes;
    pthread_mutex_unlock(&pool->mutex);
}

static void release_memory(struct dl_managed *managed) { give_memory((struct out_memory *)managed); }

static uint64_t room_of(int32_t rank, uint64_t bytes) {
    return sizeof(struct out_memory) + (size_t)rank * sizeof(int64_t) + bytes + CACHE_LINE;
}

static struct out_memory *memory_of(struct pool *pool, struct dl_dtype dtype, int32_t rank, const int64_t *item, uint64_t count,
                                    uint64_t bytes) {
    struct out_memory *memory = take_memory(pool, room_of(rank, bytes));
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

/* Memory for each leaf of so many items. False: there is not enough. */
static bool take_leaves(struct outtake_object *self, uint64_t count, struct out_memory **memory, unsigned char **out) {
    const struct shmb_leaf *leaves = shmb_binding_ring(self->ring)->leaves;
    uint64_t large = 0;
    for (unsigned i = 0; i < self->n_leaves; i++) {
        uint64_t room = room_of(self->forms[i].rank, count * leaves[i].item_bytes);
        large += room >= LARGE ? room : 0;
    }
    if (large) expect_batch(self->pool, large);
    for (unsigned i = 0; i < self->n_leaves; i++) {
        const struct out_form *form = &self->forms[i];
        memory[i] = memory_of(self->pool, form->dtype, form->rank, form->shape, count, count * leaves[i].item_bytes);
        if (memory[i] == NULL) return false;
        out[i] = memory[i]->managed.tensor.data;
    }
    return true;
}

static PyObject *tensors_of(const struct outtake_object *self, struct out_memory **memory) {
    PyObject *leaves = PyList_New((Py_ssize_t)self->n_leaves), *tensor = leaves;
    for (unsigned i = 0; tensor != NULL && i < self->n_leaves; i++)
        if ((tensor = tensor_of(self, &memory[i])) != NULL) PyList_SetItem(leaves, (Py_ssize_t)i, tensor);
    if (tensor == NULL) Py_CLEAR(leaves);
    return leaves;
}

/* sample(count, key, beta or None, timeout_ns) -> ([leaf, ...], index, tickets, weights or None), or a status */
static PyObject *outtake_sample(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct outtake_object *self = (struct outtake_object *)object;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "sample takes 4 arguments, %zd were given", nargs);
    uint64_t count = PyLong_AsUnsignedLongLong(args[0]), key = PyLong_AsUnsignedLongLongMask(args[1]), redrawn;
    bool prioritized = args[2] != Py_None;
    double beta = prioritized ? PyFloat_AsDouble(args[2]) : 0;
    int64_t timeout_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count > MOST) return PyErr_NoMemory();
    const struct dl_dtype integer = {DL_INT, 64, 1}, real = {DL_FLOAT, 32, 1};
    struct out_memory *memory[ROOM_LEAVES + 3] = {0};
    unsigned char *out[ROOM_LEAVES];
    unsigned n = self->n_leaves;
    bool there = take_leaves(self, count, memory, out) &&
                 (memory[n] = memory_of(self->pool, integer, 1, NULL, count, 8 * count)) != NULL &&
                 (memory[n + 1] = memory_of(self->pool, integer, 1, NULL, count, 8 * count)) != NULL &&
                 (!prioritized || (memory[n + 2] = memory_of(self->pool, real, 1, NULL, count, 4 * count)) != NULL);
    PyObject *leaves = NULL, *result = NULL;
    int status = SHMB_NO_MEMORY;
    if (there)
        status = shmb_binding_sample(self->ring, count, key, out, memory[n]->managed.tensor.data,
                                     memory[n + 1]->managed.tensor.data, prioritized ? memory[n + 2]->managed.tensor.data : NULL,
                                     beta, prioritized, timeout_ns, &redrawn);
    if (status == SHMB_OK && (leaves = tensors_of(self, memory)) != NULL && (result = PyTuple_New(4)) != NULL) {
        PyObject *tensor = leaves;
        for (unsigned i = 0; tensor != NULL && i < 3; i++)
            if ((tensor = tensor_of(self, &memory[n + i])) != NULL) PyTuple_SetItem(result, (Py_ssize_t)i + 1, tensor);
        PyTuple_SetItem(result, 0, leaves);
        leaves = NULL;
        if (tensor == NULL) Py_CLEAR(result);
    } else if (status != SHMB_OK && status != SHMB_INTERRUPTED) {
        result = PyLong_FromLong(-(long)status);
    }
    Py_XDECREF(leaves);
    for (unsigned i = 0; i < n + 3; i++) give_memory(memory[i]);
    return result;
}

/* take(index, tickets, count, timeout_ns) -> [leaf, ...]; None where one of them is another item by now; or a status */
static PyObject *outtake_take(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct outtake_object *self = (struct outtake_object *)object;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "take takes 4 arguments, %zd were given", nargs);
    const int64_t *index = (const int64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const int64_t *tickets = (const int64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    uint64_t count = PyLong_AsUnsignedLongLong(args[2]), missing = 0;
    int64_t timeout_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count > MOST) return PyErr_NoMemory();
    struct out_memory *memory[ROOM_LEAVES] = {0};
    unsigned char *out[ROOM_LEAVES];
    int64_t *now = malloc((count + 1) * sizeof *now);
    PyObject *result = NULL;
    int status = SHMB_NO_MEMORY;
    if (now != NULL && take_leaves(self, count, memory, out))
        status = shmb_binding_read(self->ring, index, count, out, now, &missing, timeout_ns);
    if (status == SHMB_OK)
        result = memcmp(now, tickets, count * sizeof *now) ? Py_NewRef(Py_None) : tensors_of(self, memory);
    else if (status != SHMB_INTERRUPTED)
        result = PyLong_FromLong(-(long)status);
    free(now);
    for (unsigned i = 0; i < self->n_leaves; i++) give_memory(memory[i]);
    return result;
}

static void outtake_dealloc(PyObject *object) {
    struct outtake_object *self = (struct outtake_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; self->forms != NULL && i < self->n_leaves; i++) PyMem_Free(self->forms[i].shape);
    PyMem_Free(self->forms);
    if (self->pool != NULL && lock_pool(self->pool)) {
        self->pool->batch = 0;
        drop_kept(self->pool);
        leave_pool(self->pool);
    }
    Py_XDECREF(self->ring);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* From an example of one item, which is of the class that makes tensors. */
static bool out_form_of(struct outtake_object *self, struct out_form *form, PyObject *example, uint64_t element_bytes) {
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
    self->pool = calloc(1, sizeof *self->pool);
    bool made = self->forms != NULL && self->pool != NULL;
    if (!made) PyErr_NoMemory();
    self->n_leaves = self->forms ? n : 0;
    if (self->pool != NULL) {
        pthread_mutex_init(&self->pool->mutex, NULL);
        self->pool->life = shmb_life();
        self->pool->users = 1;
    }
    for (unsigned i = 0; made && i < n; i++)
        made = out_form_of(self, &self->forms[i], PyTuple_GetItem(examples, (Py_ssize_t)i), of->leaves[i].item_bytes);
    if (!made) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"sample", (PyCFunction)(void (*)(void))outtake_sample, METH_FASTCALL,
     "sample(count, key, beta or None, timeout_ns): ([leaf, ...], index, tickets, weights or None), or a status below 0."},
    {"take", (PyCFunction)(void (*)(void))outtake_take, METH_FASTCALL,
     "take(index, tickets, count, timeout_ns): [leaf, ...]; None: one of them is another item by now; or a status below 0."},
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
