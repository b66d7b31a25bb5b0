/* Fast path of samples: allocates memory for each leaf, fills it by one draw, and wraps it in tensors.
 *
 *     count, key ──▶ memory ──▶ draw, copy, validate, weigh ──▶ [leaf, ...], index, tickets, weights
 *
 * Wrapping our own memory (dlpack.h) takes half as long as allocating a tensor by torch, and the address is known.
 * Each tensor owns its memory. When a tensor of a large leaf is freed, its memory is kept for the next batch, up to
 * the size of two batches. malloc would return it to the system, which would cost a page fault for every 4 KB.
 *
 * A draw that is refused is answered with a status. Python then waits or raises an error, as for any other call. */
#include "python/module.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/ring.h"
#include "core/stacks.h"
#include "python/dlpack.h"
#include "python/following.h"
#include "python/slicing.h"

#define STACK_LEAVES 64
#define CACHE_LINE 64
#define MAX_ITEMS ((uint64_t)1 << 40) /* items of a batch */
#define LARGE (64u << 10) /* bytes of a leaf; malloc itself keeps smaller blocks */

struct out_form {
    struct dl_dtype dtype;
    int32_t rank; /* including the dimension of the batch */
    int64_t *shape;
    uint64_t bytes; /* of a row of a sample */
};

struct out_memory;

/* Memory of freed tensors. It exists as long as the outtake or a tensor that may return memory. The child of a fork
 * does not use the parent's pool, because another thread of the parent may have held the mutex. */
struct pool {
    pthread_mutex_t mutex;
    uint64_t process_token; /* identifies the process */
    uint64_t users; /* the outtake, and tensors */
    /* bytes of a batch of the present form; 0: nothing is kept any more */
    uint64_t batch;
    uint64_t cached_bytes;  /* kept bytes */
    struct out_memory *first;
};

struct outtake_object {
    PyObject_HEAD
    PyObject *ring;
    struct pool *pool;
    struct out_form *forms; /* one per leaf */
    /* form of each leaf in a sample: see stacks.h. NULL: one row each */
    int32_t *stacks;
    uint64_t steps;         /* steps of a stack */
    uint64_t row_bytes;     /* bytes of a row of a sample, all leaves together */
    unsigned n_leaves;
    const struct dl_table *table;
};

/* Memory of a tensor: this header, its shape, and its data from the next cache line on. */
struct out_memory {
    struct dl_managed managed;
    struct pool *pool; /* NULL: memory of a small leaf */
    struct out_memory *next;
    uint64_t block_bytes;
    int64_t shape[];
};

static bool lock_pool(struct pool *pool) { return shmb_process_token() == pool->process_token && pthread_mutex_lock(&pool->mutex) == 0; }

static void free_unused(struct pool *pool) {
    for (struct out_memory *memory = pool->first, *next; memory != NULL; memory = next) {
        next = memory->next;
        free(memory);
    }
    pool->first = NULL;
    pool->cached_bytes = 0;
}

/* The mutex is held on entry, and released here. */
static void leave_pool(struct pool *pool) {
    bool last = --pool->users == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (!last) return;
    free_unused(pool);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static struct out_memory *reuse_memory(struct pool *pool, uint64_t block_bytes) {
    struct out_memory **at = &pool->first;
    while (*at != NULL && (*at)->block_bytes != block_bytes) at = &(*at)->next;
    struct out_memory *memory = *at;
    if (memory == NULL) return NULL;
    *at = memory->next;
    pool->cached_bytes -= block_bytes;
    return memory;
}

static struct out_memory *allocate_memory(struct pool *pool, uint64_t block_bytes) {
    struct out_memory *memory = NULL;
    bool pooled = block_bytes >= LARGE && lock_pool(pool);
    if (pooled) memory = reuse_memory(pool, block_bytes);
    if (memory == NULL) memory = malloc(block_bytes);
    if (memory != NULL) memory->pool = pooled ? pool : NULL, memory->block_bytes = block_bytes;
    if (pooled && memory != NULL) pool->users++;
    if (pooled) pthread_mutex_unlock(&pool->mutex);
    return memory;
}

static void release_or_keep_memory(struct out_memory *memory) {
    struct pool *pool = memory == NULL ? NULL : memory->pool;
    if (pool == NULL || !lock_pool(pool)) return free(memory);
    bool keeps = pool->cached_bytes + memory->block_bytes <= 2 * pool->batch;
    if (keeps) {
        memory->next = pool->first;
        pool->first = memory;
        pool->cached_bytes += memory->block_bytes;
    }
    leave_pool(pool);
    if (!keeps) free(memory);
}

/* Frees the kept memory if the next batch has another form, which it does not fit. */
static void expect_batch(struct pool *pool, uint64_t bytes) {
    if (!lock_pool(pool)) return;
    if (pool->batch != bytes) free_unused(pool);
    pool->batch = bytes;
    pthread_mutex_unlock(&pool->mutex);
}

static void release_memory(struct dl_managed *managed) { release_or_keep_memory((struct out_memory *)managed); }

static uint64_t memory_bytes(int32_t rank, uint64_t bytes) {
    return sizeof(struct out_memory) + (size_t)rank * sizeof(int64_t) + bytes + CACHE_LINE;
}

static struct out_memory *prepare_memory(struct pool *pool, struct dl_dtype dtype, int32_t rank, const int64_t *item, uint64_t count,
                                    uint64_t bytes) {
    struct out_memory *memory = allocate_memory(pool, memory_bytes(rank, bytes));
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

static PyObject *wrap_memory(const struct outtake_object *self, struct out_memory **memory) {
    void *tensor = NULL;
    if (*memory == NULL) return Py_NewRef(Py_None);
    if (self->table->wrap(&(*memory)->managed, &tensor) == 0) *memory = NULL; /* the tensor owns it now */
    return tensor;
}

/* Allocates memory for each leaf of `count` items. False: out of memory. */
static bool allocate_leaves(struct outtake_object *self, uint64_t count, struct out_memory **memory, unsigned char **out) {
    uint64_t large = 0;
    for (unsigned i = 0; i < self->n_leaves; i++) {
        uint64_t block_bytes = memory_bytes(self->forms[i].rank, count * self->forms[i].bytes);
        large += block_bytes >= LARGE ? block_bytes : 0;
    }
    if (large) expect_batch(self->pool, large);
    for (unsigned i = 0; i < self->n_leaves; i++) {
        const struct out_form *form = &self->forms[i];
        memory[i] = prepare_memory(self->pool, form->dtype, form->rank, form->shape, count, count * form->bytes);
        if (memory[i] == NULL) return false;
        out[i] = memory[i]->managed.tensor.data;
    }
    return true;
}

static PyObject *wrap_leaves(const struct outtake_object *self, struct out_memory **memory) {
    PyObject *leaves = PyList_New((Py_ssize_t)self->n_leaves), *tensor = leaves;
    for (unsigned i = 0; tensor != NULL && i < self->n_leaves; i++)
        if ((tensor = wrap_memory(self, &memory[i])) != NULL) PyList_SetItem(leaves, (Py_ssize_t)i, tensor);
    if (tensor == NULL) Py_CLEAR(leaves);
    return leaves;
}

/* Allocates memory for index, tickets and, for a prioritized draw, weights. False: out of memory. */
static bool allocate_info(struct outtake_object *self, uint64_t count, struct out_memory **memory, bool prioritized) {
    const struct dl_dtype integer = {DL_INT, 64, 1}, real = {DL_FLOAT, 32, 1};
    const unsigned n = self->n_leaves;
    return (memory[n] = prepare_memory(self->pool, integer, 1, NULL, count, 8 * count)) != NULL &&
           (memory[n + 1] = prepare_memory(self->pool, integer, 1, NULL, count, 8 * count)) != NULL &&
           (!prioritized || (memory[n + 2] = prepare_memory(self->pool, real, 1, NULL, count, 4 * count)) != NULL);
}

/* The result of a draw. If the status is SHMB_INTERRUPTED, the exception is set. */
static PyObject *build_draw_result(const struct outtake_object *self, struct out_memory **memory, int status) {
    const unsigned n = self->n_leaves;
    PyObject *leaves = NULL, *result = NULL;
    if (status == SHMB_OK && (leaves = wrap_leaves(self, memory)) != NULL && (result = PyTuple_New(4)) != NULL) {
        PyObject *tensor = leaves;
        for (unsigned i = 0; tensor != NULL && i < 3; i++)
            if ((tensor = wrap_memory(self, &memory[n + i])) != NULL) PyTuple_SetItem(result, (Py_ssize_t)i + 1, tensor);
        PyTuple_SetItem(result, 0, leaves);
        leaves = NULL;
        if (tensor == NULL) Py_CLEAR(result);
    } else if (status != SHMB_OK && status != SHMB_INTERRUPTED) {
        result = PyLong_FromLong(-(long)status);
    }
    Py_XDECREF(leaves);
    return result;
}

/* sample(count, key, beta or None, timeout_ns) -> ([leaf, ...], index, tickets, weights or None), or a status */
static PyObject *outtake_sample(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct outtake_object *self = (struct outtake_object *)object;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "Outtake.sample() takes 4 arguments, but %zd were given.", nargs);
    uint64_t count = PyLong_AsUnsignedLongLong(args[0]), key = PyLong_AsUnsignedLongLongMask(args[1]), redrawn;
    bool prioritized = args[2] != Py_None;
    double beta = prioritized ? PyFloat_AsDouble(args[2]) : 0;
    int64_t timeout_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count > MAX_ITEMS) return PyErr_NoMemory();
    if (self->stacks) return PyErr_Format(PyExc_ValueError, "Outtake.sample() was called on an Outtake for stacks. Call draw() instead.");
    struct out_memory *memory[STACK_LEAVES + 3] = {0};
    unsigned char *out[STACK_LEAVES];
    unsigned n = self->n_leaves;
    bool allocated = allocate_leaves(self, count, memory, out) && allocate_info(self, count, memory, prioritized);
    int status = SHMB_NO_MEMORY;
    if (allocated)
        status = shmb_binding_sample(self->ring, count, key, out, memory[n]->managed.tensor.data,
                                     memory[n + 1]->managed.tensor.data, prioritized ? memory[n + 2]->managed.tensor.data : NULL,
                                     beta, prioritized, timeout_ns, &redrawn);
    PyObject *result = build_draw_result(self, memory, status);
    for (unsigned i = 0; i < n + 3; i++) release_or_keep_memory(memory[i]);
    return result;
}

/* Copies items, or stacks of them. SHMB_LAPPED: one of them was overwritten. */
static int copy_items(struct outtake_object *self, const int64_t *index, const int64_t *tickets, uint64_t count, unsigned char *const *out,
                int64_t timeout_ns) {
    uint64_t missing = 0;
    if (self->stacks) {
        const struct shmb_stacks stacks = {index, tickets, count, self->steps, self->stacks};
        return shmb_binding_stacks(self->ring, &stacks, out, self->row_bytes, timeout_ns);
    }
    int64_t *now = malloc((count + 1) * sizeof *now);
    if (now == NULL) return SHMB_NO_MEMORY;
    int status = shmb_binding_read(self->ring, index, count, out, now, &missing, timeout_ns);
    if (status == SHMB_OK && memcmp(now, tickets, count * sizeof *now)) status = SHMB_LAPPED;
    free(now);
    return status;
}

/* copy(index, tickets, count, timeout_ns) -> [leaf, ...]; None: an item was overwritten; or a status */
static PyObject *outtake_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct outtake_object *self = (struct outtake_object *)object;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "Outtake.copy() takes 4 arguments, but %zd were given.", nargs);
    const int64_t *index = (const int64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const int64_t *tickets = (const int64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    uint64_t count = PyLong_AsUnsignedLongLong(args[2]);
    int64_t timeout_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count > MAX_ITEMS) return PyErr_NoMemory();
    struct out_memory *memory[STACK_LEAVES] = {0};
    unsigned char *out[STACK_LEAVES];
    PyObject *result = NULL;
    int status = SHMB_NO_MEMORY;
    if (allocate_leaves(self, count, memory, out)) status = copy_items(self, index, tickets, count, out, timeout_ns);
    if (status == SHMB_OK)
        result = wrap_leaves(self, memory);
    else if (status == SHMB_LAPPED)
        result = Py_NewRef(Py_None);
    else if (status != SHMB_INTERRUPTED)
        result = PyLong_FromLong(-(long)status);
    for (unsigned i = 0; i < self->n_leaves; i++) release_or_keep_memory(memory[i]);
    return result;
}

/* Addresses of the caller's memory. False: the exception is set. */
static bool addresses_of(PyObject *addresses, unsigned count, unsigned char **out) {
    if (PyTuple_Size(addresses) != (Py_ssize_t)count)
        return PyErr_Format(PyExc_ValueError, "Outtake: this call needs a tuple of %u addresses.", count), false;
    for (unsigned i = 0; i < count; i++)
        out[i] = (unsigned char *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, (Py_ssize_t)i));
    return !PyErr_Occurred();
}

/* fill(index, tickets, count, timeout_ns, addresses) -> True; None: an item was overwritten; or a status */
static PyObject *outtake_fill(PyObject *object, PyObject *args) {
    struct outtake_object *self = (struct outtake_object *)object;
    unsigned long long index, tickets, count;
    long long timeout_ns;
    PyObject *addresses;
    unsigned char *out[STACK_LEAVES];
    if (!PyArg_ParseTuple(args, "KKKLO!:fill", &index, &tickets, &count, &timeout_ns, &PyTuple_Type, &addresses)) return NULL;
    if (count > MAX_ITEMS) return PyErr_NoMemory();
    if (!addresses_of(addresses, self->n_leaves, out)) return NULL;
    int status = copy_items(self, (const int64_t *)(uintptr_t)index, (const int64_t *)(uintptr_t)tickets, count, out, timeout_ns);
    if (status == SHMB_INTERRUPTED) return NULL;
    if (status == SHMB_LAPPED) Py_RETURN_NONE;
    return status == SHMB_OK ? Py_NewRef(Py_True) : PyLong_FromLong(-(long)status);
}

/* Draws, finds the steps before each item, and copies them, like the separate calls. The trajectories are those of
 * the follower, and the caller's lock prevents changes. */
static PyObject *outtake_draw(PyObject *object, PyObject *args) {
    struct outtake_object *self = (struct outtake_object *)object;
    unsigned long long count, key;
    uint64_t redrawn;
    long long timeout_ns;
    PyObject *beta_object, *trajectories, *follower, *addresses = NULL;
    if (!PyArg_ParseTuple(args, "KKOLO!O!|O!:draw", &count, &key, &beta_object, &timeout_ns, shmb_trajectories_type, &trajectories,
                          shmb_follower_type, &follower, &PyTuple_Type, &addresses))
        return NULL;
    bool prioritized = beta_object != Py_None;
    double beta = prioritized ? PyFloat_AsDouble(beta_object) : 0;
    if (PyErr_Occurred()) return NULL;
    if (self->stacks == NULL) return PyErr_Format(PyExc_ValueError, "Outtake.draw() was called on an Outtake without stacks. Call sample() instead.");
    if (count > MAX_ITEMS || count > SIZE_MAX / 16 / self->steps) return PyErr_NoMemory();
    struct out_memory *memory[STACK_LEAVES + 3] = {0};
    unsigned char *out[STACK_LEAVES + 3] = {0}; /* the leaves, index, tickets, weights */
    const unsigned n = self->n_leaves;
    if (addresses && !addresses_of(addresses, n + 3, out)) return NULL;
    int64_t *steps = malloc(2 * count * self->steps * sizeof *steps + 1), *step_tickets = steps + count * self->steps;
    bool allocated = steps != NULL && (addresses || (allocate_leaves(self, count, memory, out) && allocate_info(self, count, memory, prioritized)));
    for (unsigned i = n; allocated && !addresses && i < n + 3; i++) out[i] = memory[i] ? memory[i]->managed.tensor.data : NULL;
    int64_t *index = (int64_t *)(void *)out[n], *tickets = (int64_t *)(void *)out[n + 1];
    int status = SHMB_NO_MEMORY;
    if (allocated)
        status = shmb_binding_sample(self->ring, count, key, NULL, index, tickets, (float *)(void *)out[n + 2], beta, prioritized,
                                     timeout_ns, &redrawn);
    const struct shmb_trajectories *all = shmb_trajectories_in(trajectories);
    if (status == SHMB_OK) {
        const struct shmb_follower *f = shmb_follower_in(follower);
        bool known = !all->failed && shmb_read_histories(all, f, index, tickets, count, self->steps, steps, step_tickets);
        status = known ? copy_items(self, steps, step_tickets, count, out, timeout_ns) : SHMB_LAPPED;
    }
    PyObject *result;
    if (status == SHMB_LAPPED || (status == SHMB_OK && addresses))
        result = Py_NewRef(status == SHMB_OK ? Py_True : Py_None);
    else
        result = build_draw_result(self, memory, status);
    free(steps);
    for (unsigned i = 0; i < n + 3; i++) release_or_keep_memory(memory[i]);
    return result;
}

static void outtake_dealloc(PyObject *object) {
    struct outtake_object *self = (struct outtake_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; self->forms != NULL && i < self->n_leaves; i++) PyMem_Free(self->forms[i].shape);
    PyMem_Free(self->forms);
    PyMem_Free(self->stacks);
    if (self->pool != NULL && lock_pool(self->pool)) {
        self->pool->batch = 0;
        free_unused(self->pool);
        leave_pool(self->pool);
    }
    Py_XDECREF(self->ring);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* From an example of one item, a tensor of the given class. */
static bool parse_out_form(struct outtake_object *self, struct out_form *form, PyObject *example, uint64_t element_bytes) {
    struct dl_tensor tensor;
    if (self->table->borrow(example, &tensor) != 0) return false;
    uint64_t bytes = (uint64_t)tensor.dtype.bits / 8 * tensor.dtype.lanes;
    for (int32_t i = 0; i < tensor.rank; i++) bytes *= (uint64_t)tensor.shape[i];
    if (tensor.device != DL_CPU || tensor.dtype.bits % 8 || bytes != element_bytes)
        return PyErr_Format(PyExc_ValueError, "Outtake: the example %R is not an item of %llu bytes. Pass a tensor on the CPU with the form of the leaf.", example, (unsigned long long)element_bytes), false;
    form->bytes = bytes;
    form->dtype = tensor.dtype;
    form->rank = tensor.rank + 1;
    form->shape = PyMem_Malloc(((size_t)tensor.rank + 1) * sizeof *form->shape);
    if (form->shape == NULL) return (void)PyErr_NoMemory(), false;
    for (int32_t i = 0; i < tensor.rank; i++) form->shape[i] = tensor.shape[i];
    return true;
}

/* From one number per leaf: see stacks.h. */
static bool parse_stacks(struct outtake_object *self, PyObject *numbers, const struct shmb_ring *ring) {
    const unsigned n = self->n_leaves;
    if (PyTuple_Size(numbers) != (Py_ssize_t)n || self->steps == 0 || self->steps > MAX_ITEMS)
        return PyErr_Format(PyExc_ValueError, "Outtake: stacks must have at least one step and one number for each leaf."), false;
    self->stacks = PyMem_Calloc((size_t)n + 1, sizeof *self->stacks);
    if (self->stacks == NULL) return (void)PyErr_NoMemory(), false;
    for (unsigned i = 0; i < n; i++) {
        long form = PyLong_AsLong(PyTuple_GetItem(numbers, (Py_ssize_t)i));
        if (form < SHMB_ONE_ROW || form >= (long)n)
            return PyErr_Format(PyExc_ValueError, "Outtake: there is no leaf %ld. Pass the number of a leaf, or a form from stacks.h.", form), false;
        self->stacks[i] = (int32_t)form;
    }
    for (unsigned i = 0; i < n; i++) {
        const int32_t form = self->stacks[i];
        if (form >= 0 && (self->stacks[form] != SHMB_STACK || ring->leaves[form].item_bytes != ring->leaves[i].item_bytes))
            return PyErr_Format(PyExc_ValueError, "Outtake: leaf %d is not a stack with the form of leaf %u.", (int)form, i), false;
    }
    return true;
}

static PyObject *outtake_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ring", "examples", "tensors", "steps", "stacks", NULL};
    PyObject *ring, *examples, *tensors, *stacks = NULL;
    unsigned long long steps = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!|KO!:Outtake", names, &ring, &PyTuple_Type, &examples, &PyType_Type, &tensors,
                                     &steps, &PyTuple_Type, &stacks))
        return NULL;
    if (!PyObject_TypeCheck(ring, shmb_ring_type)) return PyErr_Format(PyExc_TypeError, "Outtake: the first argument must be a Ring.");
    const struct dl_table *table = shmb_find_dl_table((PyTypeObject *)tensors);
    const struct shmb_ring *core_ring = shmb_binding_ring(ring);
    unsigned n = (unsigned)PyTuple_Size(examples);
    if (table == NULL || core_ring->bytes != NULL || n != core_ring->n_leaves || n > STACK_LEAVES)
        return PyErr_Format(PyExc_ValueError, "Outtake needs one example for each leaf, at most %d leaves, and a tensor class with " DL_ATTRIBUTE ".",
                            STACK_LEAVES);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct outtake_object *self = (struct outtake_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->ring = Py_NewRef(ring);
    self->table = table;
    self->forms = PyMem_Calloc((size_t)n + 1, sizeof *self->forms);
    self->pool = calloc(1, sizeof *self->pool);
    bool ok = self->forms != NULL && self->pool != NULL;
    if (!ok) PyErr_NoMemory();
    self->n_leaves = self->forms ? n : 0;
    if (self->pool != NULL) {
        pthread_mutex_init(&self->pool->mutex, NULL);
        self->pool->process_token = shmb_process_token();
        self->pool->users = 1;
    }
    self->steps = steps;
    if (ok && stacks) ok = parse_stacks(self, stacks, core_ring);
    for (unsigned i = 0; ok && i < n; i++) {
        uint64_t rows = self->stacks ? shmb_rows_of(self->stacks[i], steps) : 1;
        ok = parse_out_form(self, &self->forms[i], PyTuple_GetItem(examples, (Py_ssize_t)i), rows * core_ring->leaves[i].item_bytes);
        if (ok) self->row_bytes += self->forms[i].bytes;
    }
    if (!ok) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"sample", (PyCFunction)(void (*)(void))outtake_sample, METH_FASTCALL,
     "sample(count, key, beta or None, timeout_ns): draws a batch. Returns ([leaf, ...], index, tickets, weights or None), or a\n"
     "negated status."},
    {"copy", (PyCFunction)(void (*)(void))outtake_copy, METH_FASTCALL,
     "copy(index, tickets, count, timeout_ns): copies items. Returns [leaf, ...]; None: an item was overwritten; or a negated status."},
    {"draw", outtake_draw, METH_VARARGS,
     "draw(count, key, beta or None, timeout_ns, trajectories, follower, addresses=None): like sample(), but of stacks. None: poll,\n"
     "and draw again. With addresses of the leaves, index, tickets and weights it fills these and returns True."},
    {"fill", outtake_fill, METH_VARARGS, "fill(index, tickets, count, timeout_ns, addresses): like copy(), but fills the given memory and returns True."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Outtake(ring, examples, tensors, steps=1, stacks=None): the fast path of samples."},
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
