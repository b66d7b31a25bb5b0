/* Ring for Python: arguments in, one call, a number out. A negative number is a status (see ring.py).
 *
 * Addresses come as integers: the caller has checked what lies there and keeps it alive. The interpreter lock
 * is given up for copies that are worth it, and by whoever has to wait. */
#include "module.h"

#include <math.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ring.h"

#define RELEASE_FROM_BYTES 16384 /* below this, giving up and retaking the interpreter lock costs more than the copy */

#define AT(type, address) ((type *)(uintptr_t)(address))

struct ring_object {
    PyObject_HEAD
    struct shmb_ring ring;
    uint64_t row_bytes; /* of a slot, all leaves */
    PyObject *control, *slots, *leaves, *records; /* kept alive: the maps */
    PyObject *file; /* and the name of the control file */
    int ready;
};

struct python_call {
    struct shmb_call call;
    PyThreadState *saved;
};

static void may_block(struct shmb_call *call) {
    struct python_call *python = (struct python_call *)call;
    if (python->saved == NULL) python->saved = PyEval_SaveThread();
}

static bool interrupted(struct shmb_call *call) {
    struct python_call *python = (struct python_call *)call;
    PyEval_RestoreThread(python->saved);
    int raised = PyErr_CheckSignals();
    python->saved = PyEval_SaveThread();
    return raised != 0;
}

static struct python_call begin(int64_t timeout_ns) {
    return (struct python_call){{may_block, interrupted, timeout_ns}, NULL};
}

static PyObject *end(struct python_call *python, int status, uint64_t result) {
    if (python->saved) PyEval_RestoreThread(python->saved);
    if (status == SHMB_INTERRUPTED) return NULL; /* the signal handler's exception is set */
    return PyLong_FromLongLong(status == SHMB_OK ? (long long)result : -(long long)status);
}

/* Every write, draw and update ends here, so it is here that a directory which was removed is noticed: the clock is read
 * anyhow. What the call did is done, in memory that nobody will find; the status of all later calls is the same. */
static int seen(struct ring_object *self, int status) {
    if (status != SHMB_OK) return status;
    atomic_store_explicit(&self->ring.me->last_seen_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
    CP(count_added);
    return shmb_is_removed(&self->ring, shmb_clock_ns(CLOCK_MONOTONIC_COARSE)) ? SHMB_UNLINKED : SHMB_OK;
}

/* What makes a client one of those who insert, or of those who sample. A few milliseconds are nothing here. */
static int inserted(struct ring_object *self, int status) {
    struct shmb_entry *me = self->ring.me;
    if ((status = seen(self, status)) == SHMB_OK) {
        atomic_store_explicit(&me->last_insert_ns, (uint64_t)shmb_clock_ns(CLOCK_MONOTONIC_COARSE), memory_order_relaxed);
        CP(count_added);
    }
    return status;
}

static int sampled(struct ring_object *self, int status) {
    struct shmb_entry *me = self->ring.me;
    if ((status = seen(self, status)) == SHMB_OK) {
        atomic_store_explicit(&me->last_sample_ns, (uint64_t)shmb_clock_ns(CLOCK_MONOTONIC_COARSE), memory_order_relaxed);
        CP(count_added);
    }
    return status;
}

static int number(PyObject *object, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(object);
    return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int signed_number(PyObject *object, int64_t *out) {
    *out = PyLong_AsLongLong(object);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* A tuple with one address a leaf. Not PyMem_Malloc: it is freed where the interpreter lock may be given up. */
static const unsigned char **addresses(struct ring_object *self, PyObject *tuple, const unsigned char **room, size_t n) {
    unsigned leaves = self->ring.n_leaves;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != (Py_ssize_t)leaves)
        return (void)PyErr_Format(PyExc_TypeError, "a tuple of %u addresses is needed", leaves), NULL;
    const unsigned char **out = leaves <= n ? room : malloc(leaves * sizeof *out);
    if (out == NULL) return (void)PyErr_NoMemory(), NULL;
    for (unsigned i = 0; i < leaves; i++) {
        uint64_t address;
        if (number(PyTuple_GetItem(tuple, i), &address) < 0) {
            if (out != room) free(out);
            return NULL;
        }
        out[i] = (const unsigned char *)(uintptr_t)address;
    }
    return out;
}

static int expect(Py_ssize_t given, Py_ssize_t wanted, const char *name) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, wanted, given);
    return -1;
}

/* A ring of records takes no rows of leaves. */
static int of_leaves(struct ring_object *self, const char *name) {
    if (self->ring.bytes == NULL) return 0;
    PyErr_Format(PyExc_TypeError, "%s: the items of this ring are records", name);
    return -1;
}

static int of_records(struct ring_object *self, const char *name) {
    if (self->ring.bytes != NULL) return 0;
    PyErr_Format(PyExc_TypeError, "%s: the items of this ring are no records", name);
    return -1;
}

/* (descriptor of the directory, name of the control file, its device, its inode) */
static bool to_look_for(PyObject *file, struct shmb_presence *presence) {
    unsigned long long device, inode;
    if (!PyArg_ParseTuple(file, "isKK:Ring", &presence->folder, &presence->name, &device, &inode)) return false;
    presence->device = device;
    presence->inode = inode;
    return true;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "slots", "leaves", "capacity", "lanes", "entry", "checksum", "salt", "records", "file", NULL};
    PyObject *control, *slots, *leaves, *records = Py_None, *file = Py_None;
    unsigned long long capacity, lanes;
    unsigned int entry, salt;
    int checksum;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!KKIpI|OO:Ring", names, shmb_map_type, &control, shmb_map_type,
                                     &slots, &PyTuple_Type, &leaves, &capacity, &lanes, &entry, &checksum, &salt, &records, &file))
        return NULL;
    bool has_records = records != Py_None;
    if (has_records && (!PyObject_TypeCheck(records, shmb_map_type) || !shmb_map_is_twice(records) || lanes != 1 ||
                        shmb_map_bytes(records) < (Py_ssize_t)SHMB_PAGE || PyTuple_Size(leaves) != 0))
        return PyErr_Format(PyExc_ValueError, "Ring: records need a Map of them twice in a row, no leaves and one lane");
    if (capacity == 0 || lanes == 0 || capacity > ((uint64_t)1 << 40) / lanes || entry >= SHMB_ENTRIES)
        return PyErr_Format(PyExc_ValueError, "Ring: capacity %llu, lanes %llu, entry %u", capacity, lanes, entry);
    struct shmb_sections sections;
    shmb_sections_of(capacity, lanes, has_records, &sections);
    if (shmb_map_bytes(control) != (Py_ssize_t)SHMB_CONTROL_BYTES || shmb_map_bytes(slots) != (Py_ssize_t)sections.bytes)
        return PyErr_Format(PyExc_ValueError, "Ring: the slots file has %zd bytes, %llu are needed", shmb_map_bytes(slots),
                            (unsigned long long)sections.bytes);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct ring_object *self = (struct ring_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    struct shmb_ring *ring = &self->ring;
    char *control_base = shmb_map_address(control);
    unsigned char *base = shmb_map_address(slots);
    ring->runtime = (struct shmb_runtime *)(control_base + SHMB_RUNTIME_OFFSET);
    ring->entries = (struct shmb_entry *)(control_base + SHMB_REGISTRY_OFFSET);
    ring->me = &ring->entries[entry];
    ring->mutex_kind = shmb_mutex_kind();
    ring->incarnation = atomic_load(&ring->me->incarnation);
    ring->capacity = capacity;
    ring->lanes = lanes;
    ring->elements = capacity * lanes;
    ring->words = (_Atomic uint64_t *)(base + sections.words);
    ring->checksums = (uint32_t *)(base + sections.checksums);
    ring->sources = (uint64_t *)(base + sections.sources);
    ring->raw = (double *)(base + sections.raw);
    if (has_records) {
        ring->bytes = shmb_map_address(records);
        ring->max_bytes = (uint64_t)shmb_map_bytes(records);
        ring->extents = (struct shmb_extent *)(base + sections.extents);
    }
    ring->checksum = checksum != 0;
    ring->salt = salt;
    shmb_life_begin(); /* in the child of a fork nobody may have done it, and its own children must differ */
    ring->life = shmb_life();
    shmb_tree_map(&ring->tree, &sections, base);
    shmb_gate_init(&ring->gate);
    Py_ssize_t n = PyTuple_Size(leaves);
    ring->leaves = PyMem_Calloc((size_t)(n ? n : 1), sizeof *ring->leaves);
    self->control = Py_NewRef(control);
    self->slots = Py_NewRef(slots);
    self->leaves = Py_NewRef(leaves);
    self->records = Py_NewRef(records);
    self->file = Py_NewRef(file);
    self->ready = 1;
    if (file != Py_None && !to_look_for(file, &ring->presence)) {
        Py_DECREF(self);
        return NULL;
    }
    if (ring->leaves == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *map;
        unsigned long long element_bytes;
        if (!PyArg_ParseTuple(PyTuple_GetItem(leaves, i), "O!K", shmb_map_type, &map, &element_bytes)) {
            Py_DECREF(self);
            return NULL;
        }
        if ((uint64_t)shmb_map_bytes(map) != element_bytes * ring->elements) {
            PyErr_Format(PyExc_ValueError, "Ring: leaf %zd has %zd bytes, %llu are needed", i, shmb_map_bytes(map),
                         element_bytes * ring->elements);
            Py_DECREF(self);
            return NULL;
        }
        ring->leaves[i] = (struct shmb_leaf){shmb_map_address(map), element_bytes};
        self->row_bytes += element_bytes * lanes;
    }
    ring->n_leaves = (unsigned)n;
    return (PyObject *)self;
}

static void ring_dealloc(PyObject *object) {
    struct ring_object *self = (struct ring_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ready) {
        PyMem_Free(self->ring.leaves);
        free(self->ring.claim_slots);
        free(self->ring.claim_from);
        free(self->ring.masses);
        free(self->ring.touched);
    }
    Py_XDECREF(self->control);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->leaves);
    Py_XDECREF(self->records);
    Py_XDECREF(self->file);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

struct shmb_ring *shmb_binding_ring(PyObject *object) { return &((struct ring_object *)object)->ring; }

int shmb_binding_write(PyObject *object, const unsigned char *const *from, uint64_t count, const double *priorities,
                       int64_t timeout_ns, uint64_t *first) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_ring *ring = &self->ring;
    struct python_call python = begin(timeout_ns);
    int status = priorities ? shmb_priorities_in_order(ring, priorities, count * ring->lanes) : SHMB_OK;
    if (count * self->row_bytes >= RELEASE_FROM_BYTES) may_block(&python.call);
    if (status == SHMB_OK) status = shmb_claim_ring(ring, &python.call, count, NULL, first);
    if (status == SHMB_OK) {
        uint64_t skip = count > ring->capacity ? count - ring->capacity : 0;
        shmb_fill(ring, from, skip);
        if (priorities) shmb_fill_priorities(ring, priorities, skip);
        status = inserted(self, shmb_commit(ring, &python.call, priorities != NULL));
    }
    if (python.saved) PyEval_RestoreThread(python.saved);
    return status;
}

/* write(addresses, count, priorities, timeout_ns) -> first ticket */
static PyObject *ring_write(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    const unsigned char *room[64];
    uint64_t count, priorities, first = 0;
    int64_t timeout;
    if (expect(nargs, 4, "write") < 0 || of_leaves(self, "write") < 0 || number(args[1], &count) < 0 || number(args[2], &priorities) < 0 ||
        signed_number(args[3], &timeout) < 0)
        return NULL;
    const unsigned char **from = addresses(self, args[0], room, 64);
    if (from == NULL) return NULL;
    int status = shmb_binding_write(object, from, count, (const double *)(uintptr_t)priorities, timeout, &first);
    if (from != room) free(from);
    if (status == SHMB_INTERRUPTED) return NULL;
    return PyLong_FromLongLong(status == SHMB_OK ? (long long)first : -(long long)status);
}

/* place(slots, count, addresses, priorities, in_place, timeout_ns) -> 0 */
static PyObject *ring_place(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_ring *ring = &self->ring;
    const unsigned char *room[64];
    uint64_t slots, count, priorities, rows;
    int64_t timeout;
    int in_place;
    if (expect(nargs, 6, "place") < 0 || of_leaves(self, "place") < 0 || number(args[0], &slots) < 0 || number(args[1], &count) < 0 ||
        number(args[3], &priorities) < 0 || (in_place = PyObject_IsTrue(args[4])) < 0 ||
        signed_number(args[5], &timeout) < 0)
        return NULL;
    const unsigned char **from = addresses(self, args[2], room, 64);
    if (from == NULL) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_indices_in_order(ring, (const int64_t *)(uintptr_t)slots, count, ring->capacity);
    if (status == SHMB_OK && priorities)
        status = shmb_priorities_in_order(ring, (const double *)(uintptr_t)priorities, count * ring->lanes);
    if (count * self->row_bytes >= RELEASE_FROM_BYTES) may_block(&python.call);
    if (status == SHMB_OK)
        status = shmb_claim_slots(ring, &python.call, (const int64_t *)(uintptr_t)slots, count, in_place != 0, NULL, NULL,
                                  NULL, &rows);
    if (status == SHMB_OK) {
        shmb_fill(ring, from, 0);
        if (priorities) shmb_fill_priorities(ring, (const double *)(uintptr_t)priorities, 0);
        status = inserted(self, shmb_commit(ring, &python.call, priorities != 0));
    }
    if (from != room) free(from);
    return end(&python, status, 0);
}

/* claim(count, timeout_ns) -> first ticket; the payload is moved by the caller, then commit or abort */
static PyObject *ring_claim(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t count, first = 0;
    int64_t timeout;
    if (expect(nargs, 2, "claim") < 0 || of_leaves(self, "claim") < 0 || number(args[0], &count) < 0 || signed_number(args[1], &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_claim_ring(&self->ring, &python.call, count, NULL, &first);
    if (status == SHMB_OK) shmb_gate_pause(&self->ring);
    return end(&python, status, first);
}

/* claim_slots(slots, count, in_place, tickets or 0, kept or 0, timeout_ns) -> rows that were taken */
static PyObject *ring_claim_slots(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t slots, count, tickets, kept, rows = 0;
    int64_t timeout;
    int in_place;
    if (expect(nargs, 6, "claim_slots") < 0 || of_leaves(self, "claim_slots") < 0 || number(args[0], &slots) < 0 || number(args[1], &count) < 0 ||
        (in_place = PyObject_IsTrue(args[2])) < 0 || number(args[3], &tickets) < 0 || number(args[4], &kept) < 0 ||
        signed_number(args[5], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_indices_in_order(&self->ring, (const int64_t *)(uintptr_t)slots, count, self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_claim_slots(&self->ring, &python.call, (const int64_t *)(uintptr_t)slots, count, in_place != 0,
                                  (const int64_t *)(uintptr_t)tickets, (unsigned char *)(uintptr_t)kept, NULL,
                                  &rows);
    if (status == SHMB_OK && (rows || tickets == 0)) shmb_gate_pause(&self->ring);
    return end(&python, status, rows);
}

/* commit(priorities, skip_rows, timeout_ns) -> 0; whatever it answers, nothing is claimed any more */
static PyObject *ring_commit(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t priorities, skip;
    int64_t timeout;
    if (expect(nargs, 3, "commit") < 0 || number(args[0], &priorities) < 0 || number(args[1], &skip) < 0 ||
        signed_number(args[2], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_gate_resume(&self->ring);
    if (status != SHMB_OK) return end(&python, status, 0);
    if (priorities) {
        const double *from = (const double *)(uintptr_t)priorities;
        status = shmb_priorities_in_order(&self->ring, from, (skip + self->ring.claim_rows) * self->ring.lanes);
        if (status == SHMB_OK) shmb_fill_priorities(&self->ring, from, skip);
    }
    if (status == SHMB_OK)
        status = inserted(self, shmb_commit(&self->ring, &python.call, priorities != 0));
    else if (shmb_abort(&self->ring, &python.call) == SHMB_INTERRUPTED)
        status = SHMB_INTERRUPTED;
    return end(&python, status, 0);
}

static PyObject *ring_abort(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_gate_resume(&self->ring);
    if (status == SHMB_OK) status = shmb_abort(&self->ring, &python.call);
    return end(&python, status, 0);
}

static int sample(struct ring_object *self, struct python_call *python, uint64_t count, uint64_t key, unsigned char *const *out,
                  int64_t *index, int64_t *tickets, float *weights, double beta, bool prioritized, uint64_t *redrawn) {
    if (out && count * self->row_bytes / self->ring.lanes >= RELEASE_FROM_BYTES) may_block(&python->call);
    return sampled(self, shmb_sample(&self->ring, &python->call, count, key, out, index, tickets, weights, beta, prioritized, redrawn, NULL));
}

int shmb_binding_sample(PyObject *object, uint64_t count, uint64_t key, unsigned char *const *out, int64_t *index, int64_t *tickets,
                        float *weights, double beta, _Bool prioritized, int64_t timeout_ns, uint64_t *redrawn) {
    struct python_call python = begin(timeout_ns);
    int status = sample((struct ring_object *)object, &python, count, key, out, index, tickets, weights, beta, prioritized, redrawn);
    if (python.saved) PyEval_RestoreThread(python.saved);
    return status;
}

/* sample(count, key, out addresses or None, index, tickets, weights or 0, beta, prioritized, timeout_ns) -> rows redrawn */
static PyObject *ring_sample(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    const unsigned char *room[64], **out = NULL;
    uint64_t count, index, tickets, weights, redrawn = 0;
    int64_t timeout;
    int prioritized;
    if (expect(nargs, 9, "sample") < 0 || number(args[0], &count) < 0 || number(args[3], &index) < 0 ||
        number(args[4], &tickets) < 0 || number(args[5], &weights) < 0 || (prioritized = PyObject_IsTrue(args[7])) < 0 ||
        signed_number(args[8], &timeout) < 0)
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLongMask(args[1]);
    double beta = PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred()) return NULL;
    if (args[2] != Py_None && (out = addresses(self, args[2], room, 64)) == NULL) return NULL;
    struct python_call python = begin(timeout);
    int status = sample(self, &python, count, key, (unsigned char *const *)out, AT(int64_t, index), AT(int64_t, tickets),
                        AT(float, weights), beta, prioritized != 0, &redrawn);
    if (out && out != room) free(out);
    return end(&python, status, redrawn);
}

/* read(index, count, out addresses, tickets, timeout_ns) -> rows that hold no item */
static PyObject *ring_read(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    const unsigned char *room[64];
    uint64_t index, count, tickets, missing = 0;
    int64_t timeout;
    if (expect(nargs, 5, "read") < 0 || of_leaves(self, "read") < 0 || number(args[0], &index) < 0 || number(args[1], &count) < 0 ||
        number(args[3], &tickets) < 0 || signed_number(args[4], &timeout) < 0)
        return NULL;
    const unsigned char **out = addresses(self, args[2], room, 64);
    if (out == NULL) return NULL;
    struct python_call python = begin(timeout);
    if (count * self->row_bytes / self->ring.lanes >= RELEASE_FROM_BYTES) may_block(&python.call);
    int status = shmb_indices_in_order(&self->ring, (const int64_t *)(uintptr_t)index, count, self->ring.elements);
    if (status == SHMB_OK)
        status = shmb_read(&self->ring, &python.call, (const int64_t *)(uintptr_t)index, count,
                           (unsigned char *const *)out, (int64_t *)(uintptr_t)tickets, &missing);
    if (out != room) free(out);
    return end(&python, status, missing);
}

static PyObject *update(struct ring_object *self, PyObject *const *args, bool single) {
    uint64_t index, tickets, priorities, count, applied = 0;
    int64_t timeout;
    if (number(args[0], &index) < 0 || number(args[1], &tickets) < 0 || number(args[2], &priorities) < 0 ||
        number(args[3], &count) < 0 || signed_number(args[4], &timeout) < 0)
        return NULL;
    double *widened = NULL;
    if (single) {
        if ((widened = malloc(count * sizeof *widened + 1)) == NULL) return PyErr_NoMemory();
        for (uint64_t i = 0; i < count; i++) widened[i] = AT(const float, priorities)[i];
    }
    struct python_call python = begin(timeout);
    int status = seen(self, shmb_update(&self->ring, &python.call, AT(const int64_t, index), AT(const int64_t, tickets),
                                        single ? widened : AT(const double, priorities), count, &applied));
    free(widened);
    if (status == SHMB_OK) {
        atomic_fetch_add_explicit(&self->ring.me->updates_applied, applied, memory_order_relaxed);
        CP(count_added);
        atomic_fetch_add_explicit(&self->ring.me->updates_stale, count - applied, memory_order_relaxed);
        CP(count_added);
    }
    return end(&python, status, applied);
}

/* update(index, tickets or 0, priorities, count, timeout_ns) -> how many were applied */
static PyObject *ring_update(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return expect(nargs, 5, "update") < 0 ? NULL : update((struct ring_object *)object, args, false);
}

/* update_singles(index, tickets or 0, priorities, count, timeout_ns): the same, of float32 */
static PyObject *ring_update_singles(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return expect(nargs, 5, "update_singles") < 0 ? NULL : update((struct ring_object *)object, args, true);
}

static PyObject *ring_empty(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    int keep_write_count;
    int64_t timeout;
    if (expect(nargs, 2, "empty") < 0 || (keep_write_count = PyObject_IsTrue(args[0])) < 0 ||
        signed_number(args[1], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    int status = seen(self, shmb_empty(&self->ring, &python.call, keep_write_count != 0));
    return end(&python, status, 0);
}

/* The number; NaN of None. */
static double number_or_none(PyObject *given) {
    if (given == Py_None) return NAN;
    double found = PyFloat_AsDouble(given);
    return isnan(found) ? INFINITY : found; /* which is refused as well */
}

/* set_alpha(alpha or None, eps or None, bind, timeout_ns) -> 0 */
static PyObject *ring_set_alpha(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    int bind;
    int64_t timeout;
    if (expect(nargs, 4, "set_alpha") < 0 || (bind = PyObject_IsTrue(args[2])) < 0 || signed_number(args[3], &timeout) < 0)
        return NULL;
    double alpha = number_or_none(args[0]), eps = number_or_none(args[1]);
    if (PyErr_Occurred()) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_set_alpha(&self->ring, &python.call, alpha, eps, bind != 0);
    return end(&python, status, 0);
}

/* reap(entry, incarnation, timeout_ns) -> 1 if the entry was freed */
static PyObject *ring_reap(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t entry, incarnation;
    int64_t timeout;
    bool freed = false;
    if (expect(nargs, 3, "reap") < 0 || number(args[0], &entry) < 0 || number(args[1], &incarnation) < 0 ||
        signed_number(args[2], &timeout) < 0)
        return NULL;
    if (entry >= SHMB_ENTRIES) return PyErr_Format(PyExc_IndexError, "reap: no entry %llu", (unsigned long long)entry);
    struct python_call python = begin(timeout);
    int status = shmb_reap(&self->ring, &python.call, (uint32_t)entry, incarnation, &freed);
    return end(&python, status, freed);
}

/* forfeit(entry, turn, timeout_ns) -> 0 */
static PyObject *ring_forfeit(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t entry, turn;
    int64_t timeout;
    if (expect(nargs, 3, "forfeit") < 0 || number(args[0], &entry) < 0 || number(args[1], &turn) < 0 ||
        signed_number(args[2], &timeout) < 0)
        return NULL;
    if (entry >= SHMB_ENTRIES) return PyErr_Format(PyExc_IndexError, "forfeit: no entry %llu", (unsigned long long)entry);
    struct python_call python = begin(timeout);
    int status = shmb_forfeit_turn(&self->ring, &python.call, (uint32_t)entry, turn);
    return end(&python, status, 0);
}

static PyObject *ring_leave(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_leave(&self->ring, &python.call);
    return end(&python, status, 0);
}

/* check(timeout_ns) -> (wrong nodes, wrong leaves, wrong length, wrong words, orphans, wrong extents), or a status */
static PyObject *ring_check(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_check found;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    may_block(&python.call);
    int status = shmb_check(&self->ring, &python.call, &found);
    if (status != SHMB_OK) return end(&python, status, 0);
    PyEval_RestoreThread(python.saved);
    return Py_BuildValue("(KKKKKK)", (unsigned long long)found.wrong_nodes, (unsigned long long)found.wrong_leaves,
                         (unsigned long long)found.wrong_length, (unsigned long long)found.wrong_words,
                         (unsigned long long)found.orphans, (unsigned long long)found.wrong_extents);
}

static PyObject *ring_give_up_turn(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_give_up_turn(&self->ring, &python.call);
    return end(&python, status, 0);
}

/* wait(timeout_ns): until somebody makes progress after this handle was blocked */
static PyObject *ring_wait(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    if (shmb_refusal.why == SHMB_SLOT_IS_TAKEN) atomic_fetch_add_explicit(&self->ring.me->waits, 1, memory_order_relaxed);
    CP(count_added);
    Py_BEGIN_ALLOW_THREADS
    shmb_wait_progress(self->ring.runtime, shmb_refusal.blocker.progress, timeout);
    Py_END_ALLOW_THREADS
    if (PyErr_CheckSignals() < 0) return NULL;
    Py_RETURN_NONE;
}

/* look() -> 0: the directory is there, as far as was seen within the last second */
static PyObject *ring_look(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    struct ring_object *self = (struct ring_object *)object;
    return PyLong_FromLong(shmb_is_removed(&self->ring, shmb_now_ns()) ? -(long)SHMB_UNLINKED : 0);
}

/* let_pass(whether): the next write or draw of this thread goes on whatever the ratio */
static PyObject *ring_let_pass(PyObject *Py_UNUSED(object), PyObject *whether) {
    int pass = PyObject_IsTrue(whether);
    if (pass < 0) return NULL;
    shmb_let_pass = pass != 0;
    Py_RETURN_NONE;
}

/* admit_sample(count, min_size, chosen, timeout_ns) -> elements that count as drawn: the draw may be made */
static PyObject *ring_admit_sample(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t count, min_size, counted = 0;
    int64_t timeout;
    int chosen;
    if (expect(nargs, 4, "admit_sample") < 0 || number(args[0], &count) < 0 || number(args[1], &min_size) < 0 ||
        (chosen = PyObject_IsTrue(args[2])) < 0 || signed_number(args[3], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_admit_sample(&self->ring, &python.call, count, min_size, chosen != 0, &counted);
    return end(&python, status, counted);
}

/* take_back(count, version, timeout_ns) -> 0: a draw that was admitted was not made */
static PyObject *ring_take_back(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t count, version;
    int64_t timeout;
    if (expect(nargs, 3, "take_back") < 0 || number(args[0], &count) < 0 || number(args[1], &version) < 0 ||
        signed_number(args[2], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    return end(&python, shmb_take_back(&self->ring, &python.call, count, (uint32_t)version), 0);
}

/* take(count, index, tickets, timeout_ns) -> 0: the oldest of a queue; then read them, and release */
static PyObject *ring_take(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t count, index, tickets;
    int64_t timeout;
    if (expect(nargs, 4, "take") < 0 || number(args[0], &count) < 0 || number(args[1], &index) < 0 ||
        number(args[2], &tickets) < 0 || signed_number(args[3], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    return end(&python, shmb_take(&self->ring, &python.call, count, AT(int64_t, index), AT(int64_t, tickets)), 0);
}

static PyObject *ring_release(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    return end(&python, shmb_release(&self->ring, &python.call), 0);
}

/* limit(limits, samples_per_insert, error_buffer, min_size, max_times_sampled, when_alone, timeout_ns) -> 0 */
static PyObject *ring_limit(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t limits, min_size, times, when_alone;
    int64_t timeout;
    if (expect(nargs, 7, "limit") < 0 || number(args[0], &limits) < 0 || number(args[3], &min_size) < 0 ||
        number(args[4], &times) < 0 || number(args[5], &when_alone) < 0 || signed_number(args[6], &timeout) < 0)
        return NULL;
    double ratio = PyFloat_AsDouble(args[1]), error_buffer = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    const struct shmb_limiter wanted = {ratio, error_buffer, min_size, 0, 0, times, 0, (uint32_t)when_alone, (uint32_t)limits};
    struct python_call python = begin(timeout);
    return end(&python, shmb_limit(&self->ring, &python.call, &wanted), 0);
}

/* give_up_waiting(sides, timeout_ns) -> 0: nobody has to say any more that we wait for them */
static PyObject *ring_give_up_waiting(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t sides;
    int64_t timeout;
    if (expect(nargs, 2, "give_up_waiting") < 0 || number(args[0], &sides) < 0 || signed_number(args[1], &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    return end(&python, shmb_give_up_waiting(&self->ring, &python.call, (uint32_t)sides), 0);
}

/* waits_in_queue(entry, side, timeout_ns) -> why the queue makes that client wait; 0: it does not */
static PyObject *ring_waits_in_queue(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t entry, side;
    int64_t timeout;
    enum shmb_reason why;
    if (expect(nargs, 3, "waits_in_queue") < 0 || number(args[0], &entry) < 0 || number(args[1], &side) < 0 ||
        signed_number(args[2], &timeout) < 0)
        return NULL;
    if (entry >= SHMB_ENTRIES) return PyErr_Format(PyExc_IndexError, "there is no entry %llu", (unsigned long long)entry);
    struct python_call python = begin(timeout);
    int status = shmb_waits_in_queue(&self->ring, &python.call, &self->ring.entries[entry], (uint32_t)side, &why);
    return end(&python, status, (int64_t)why);
}

/* snapshot(timeout_ns) -> bytes of the runtime page and the registry, all of one moment; or a status */
static PyObject *ring_snapshot(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    int64_t timeout;
    const size_t bytes = SHMB_CONTROL_BYTES - SHMB_RUNTIME_OFFSET;
    if (signed_number(timeout_ns, &timeout) < 0) return NULL;
    PyObject *copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (copy == NULL) return NULL;
    char *to = PyBytes_AsString(copy);
    struct python_call python = begin(timeout);
    int status = shmb_lock(&self->ring, &python.call);
    if (status == SHMB_OK) {
        memcpy(to, (const void *)self->ring.runtime, bytes);
        shmb_unlock(&self->ring);
    }
    if (python.saved) PyEval_RestoreThread(python.saved);
    python.saved = NULL;
    if (status == SHMB_OK) return copy;
    Py_DECREF(copy);
    return end(&python, status, 0);
}

/* restore(slot, write_count, max_priority, timeout_ns) -> 0 */
static PyObject *ring_restore(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t slot, write_count;
    int64_t timeout;
    if (expect(nargs, 4, "restore") < 0 || number(args[0], &slot) < 0 || number(args[1], &write_count) < 0 ||
        signed_number(args[3], &timeout) < 0)
        return NULL;
    double max_priority = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (slot >= self->ring.capacity) return PyErr_Format(PyExc_IndexError, "restore: no slot %llu", (unsigned long long)slot);
    struct python_call python = begin(timeout);
    int status = shmb_restore(&self->ring, &python.call, slot, write_count, max_priority);
    return end(&python, status, 0);
}

/* copy_slots(first, count, out addresses, tickets) -> slots that had changed */
static PyObject *ring_copy_slots(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    const unsigned char *room[64];
    uint64_t first, count, tickets;
    if (expect(nargs, 4, "copy_slots") < 0 || of_leaves(self, "copy_slots") < 0 || number(args[0], &first) < 0 || number(args[1], &count) < 0 ||
        number(args[3], &tickets) < 0)
        return NULL;
    if (first > self->ring.capacity || count > self->ring.capacity - first)
        return PyErr_Format(PyExc_IndexError, "copy_slots: no slots %llu to %llu", (unsigned long long)first,
                            (unsigned long long)(first + count));
    const unsigned char **out = addresses(self, args[2], room, 64);
    if (out == NULL) return NULL;
    struct python_call python = begin(0);
    may_block(&python.call);
    uint64_t changed = shmb_copy_slots(&self->ring, first, count, (unsigned char *const *)out, (int64_t *)(uintptr_t)tickets);
    if (out != room) free(out);
    return end(&python, SHMB_OK, changed);
}

/* copy_moment(out addresses, tickets, sources, raw, timeout_ns) -> (head, write_count, max_priority), or a status */
static PyObject *ring_copy_moment(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_moment moment;
    const unsigned char *room[64];
    uint64_t tickets, sources, raw;
    int64_t timeout;
    if (expect(nargs, 5, "copy_moment") < 0 || of_leaves(self, "copy_moment") < 0 || number(args[1], &tickets) < 0 || number(args[2], &sources) < 0 ||
        number(args[3], &raw) < 0 || signed_number(args[4], &timeout) < 0)
        return NULL;
    const unsigned char **out = addresses(self, args[0], room, 64);
    if (out == NULL) return NULL;
    struct python_call python = begin(timeout);
    may_block(&python.call);
    int status = shmb_copy_moment(&self->ring, &python.call, (unsigned char *const *)out, (int64_t *)(uintptr_t)tickets,
                                  (uint64_t *)(uintptr_t)sources, (double *)(uintptr_t)raw, &moment);
    if (out != room) free(out);
    if (status != SHMB_OK) return end(&python, status, 0);
    PyEval_RestoreThread(python.saved);
    return Py_BuildValue("(KKd)", (unsigned long long)moment.head, (unsigned long long)moment.write_count,
                         moment.max_priority);
}

/* Of a batch of records that is handed in: data, bytes of it, starts, sizes, count. */
static int batch_of(PyObject *const *args, struct shmb_batch *batch, uint64_t *bytes) {
    uint64_t data, starts, sizes;
    if (number(args[0], &data) < 0 || number(args[1], bytes) < 0 || number(args[2], &starts) < 0 ||
        number(args[3], &sizes) < 0 || number(args[4], &batch->count) < 0)
        return -1;
    batch->data = AT(const unsigned char, data);
    batch->starts = AT(const int64_t, starts);
    batch->sizes = AT(const int64_t, sizes);
    return 0;
}

static int fill_and_commit(struct ring_object *self, struct shmb_call *call, const double *priorities, uint64_t skip) {
    shmb_fill_records(&self->ring);
    if (priorities) shmb_fill_priorities(&self->ring, priorities, skip);
    return inserted(self, shmb_commit(&self->ring, call, priorities != NULL));
}

/* write_records(data, bytes, starts, sizes, count, priorities, timeout_ns) -> first ticket */
static PyObject *ring_write_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_ring *ring = &self->ring;
    struct shmb_batch batch;
    uint64_t bytes, priorities, first = 0;
    int64_t timeout;
    if (expect(nargs, 7, "write_records") < 0 || of_records(self, "write_records") < 0 ||
        batch_of(args, &batch, &bytes) < 0 || number(args[5], &priorities) < 0 || signed_number(args[6], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_batch_in_order(ring, &batch, bytes, false);
    if (status == SHMB_OK && priorities) status = shmb_priorities_in_order(ring, AT(const double, priorities), batch.count);
    if (bytes >= RELEASE_FROM_BYTES) may_block(&python.call);
    if (status == SHMB_OK) status = shmb_claim_ring(ring, &python.call, batch.count, &batch, &first);
    if (status == SHMB_OK)
        status = fill_and_commit(self, &python.call, AT(const double, priorities),
                                 batch.count > ring->capacity ? batch.count - ring->capacity : 0);
    return end(&python, status, first);
}

/* place_records(slots, data, bytes, starts, sizes, count, priorities, in_place, tickets or 0, kept or 0, timeout_ns)
 * -> rows that were written; slots ascend */
static PyObject *ring_place_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_ring *ring = &self->ring;
    struct shmb_batch batch;
    uint64_t slots, bytes, priorities, tickets, kept, rows = 0;
    int64_t timeout;
    int in_place;
    if (expect(nargs, 11, "place_records") < 0 || of_records(self, "place_records") < 0 || number(args[0], &slots) < 0 ||
        batch_of(args + 1, &batch, &bytes) < 0 || number(args[6], &priorities) < 0 ||
        (in_place = PyObject_IsTrue(args[7])) < 0 || number(args[8], &tickets) < 0 || number(args[9], &kept) < 0 ||
        signed_number(args[10], &timeout) < 0)
        return NULL;
    for (uint64_t i = 1; i < batch.count; i++)
        if (AT(const int64_t, slots)[i] <= AT(const int64_t, slots)[i - 1])
            return PyErr_Format(PyExc_ValueError, "place_records: slots have to ascend");
    if (priorities && tickets) return PyErr_Format(PyExc_ValueError, "place_records: priorities or tickets, not both");
    if (batch.count == 0) return PyLong_FromLong(0); /* a claim of nothing would stay open */
    struct python_call python = begin(timeout);
    int status = shmb_indices_in_order(ring, AT(const int64_t, slots), batch.count, ring->capacity);
    if (status == SHMB_OK) status = shmb_batch_in_order(ring, &batch, bytes, true);
    if (status == SHMB_OK && priorities) status = shmb_priorities_in_order(ring, AT(const double, priorities), batch.count);
    if (bytes >= RELEASE_FROM_BYTES) may_block(&python.call);
    if (status == SHMB_OK)
        status = shmb_claim_slots(ring, &python.call, AT(const int64_t, slots), batch.count, in_place != 0,
                                  AT(const int64_t, tickets), AT(unsigned char, kept), &batch, &rows);
    if (rows) status = fill_and_commit(self, &python.call, AT(const double, priorities), 0);
    return end(&python, status, rows);
}

/* Where records go: data, room, starts, sizes, positions. */
static int arena_of(PyObject *const *args, struct shmb_arena *arena) {
    uint64_t data, starts, sizes, positions;
    if (number(args[0], &data) < 0 || number(args[1], &arena->room) < 0 || number(args[2], &starts) < 0 ||
        number(args[3], &sizes) < 0 || number(args[4], &positions) < 0)
        return -1;
    arena->used = 0;
    arena->data = AT(unsigned char, data);
    arena->starts = AT(int64_t, starts);
    arena->sizes = AT(int64_t, sizes);
    arena->positions = AT(uint64_t, positions);
    return 0;
}

/* sample_records(count, key, data, room, starts, sizes, positions, index, tickets, weights or 0, beta, prioritized,
 * timeout_ns) -> bytes of the arena that are used */
static PyObject *ring_sample_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_arena arena;
    uint64_t count, index, tickets, weights, redrawn = 0;
    int64_t timeout;
    int prioritized;
    if (expect(nargs, 13, "sample_records") < 0 || of_records(self, "sample_records") < 0 || number(args[0], &count) < 0 ||
        arena_of(args + 2, &arena) < 0 || number(args[7], &index) < 0 || number(args[8], &tickets) < 0 ||
        number(args[9], &weights) < 0 || (prioritized = PyObject_IsTrue(args[11])) < 0 || signed_number(args[12], &timeout) < 0)
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLongMask(args[1]);
    double beta = PyFloat_AsDouble(args[10]);
    if (PyErr_Occurred()) return NULL;
    struct python_call python = begin(timeout);
    if (arena.room >= RELEASE_FROM_BYTES) may_block(&python.call);
    int status = sampled(self, shmb_sample(&self->ring, &python.call, count, key, NULL, AT(int64_t, index), AT(int64_t, tickets),
                                           AT(float, weights), beta, prioritized != 0, &redrawn, &arena));
    return end(&python, status, arena.used);
}

/* read_records(index, count, data, room, starts, sizes, positions, tickets, timeout_ns) -> bytes of the arena that are used */
static PyObject *ring_read_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_arena arena;
    uint64_t index, count, tickets;
    int64_t timeout;
    if (expect(nargs, 9, "read_records") < 0 || of_records(self, "read_records") < 0 || number(args[0], &index) < 0 ||
        number(args[1], &count) < 0 || arena_of(args + 2, &arena) < 0 || number(args[7], &tickets) < 0 ||
        signed_number(args[8], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    if (arena.room >= RELEASE_FROM_BYTES) may_block(&python.call);
    int status = shmb_indices_in_order(&self->ring, AT(const int64_t, index), count, self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_read_records(&self->ring, &python.call, AT(const int64_t, index), count, &arena, AT(int64_t, tickets));
    return end(&python, status, arena.used);
}

/* span(timeout_ns) -> (tail, where nobody writes below, head), or a status */
static PyObject *ring_span(PyObject *object, PyObject *timeout_ns) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t span[3];
    int64_t timeout;
    if (of_records(self, "span") < 0 || signed_number(timeout_ns, &timeout) < 0) return NULL;
    struct python_call python = begin(timeout);
    int status = shmb_span(&self->ring, &python.call, span);
    if (status != SHMB_OK) return end(&python, status, 0);
    if (python.saved) PyEval_RestoreThread(python.saved);
    return Py_BuildValue("(KKK)", (unsigned long long)span[0], (unsigned long long)span[1], (unsigned long long)span[2]);
}

/* records_moment(from, data, room, tickets, extents, sources, raw, timeout_ns)
 * -> (head, write_count, max_priority, tail, byte head), or a status */
static PyObject *ring_records_moment(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_moment moment;
    uint64_t from, data, room, tickets, extents, sources, raw;
    int64_t timeout;
    if (expect(nargs, 8, "records_moment") < 0 || of_records(self, "records_moment") < 0 || number(args[0], &from) < 0 ||
        number(args[1], &data) < 0 || number(args[2], &room) < 0 || number(args[3], &tickets) < 0 ||
        number(args[4], &extents) < 0 || number(args[5], &sources) < 0 || number(args[6], &raw) < 0 ||
        signed_number(args[7], &timeout) < 0)
        return NULL;
    struct python_call python = begin(timeout);
    may_block(&python.call);
    int status = shmb_records_moment(&self->ring, &python.call, from, AT(unsigned char, data), room, AT(int64_t, tickets),
                                     AT(struct shmb_extent, extents), AT(uint64_t, sources), AT(double, raw), &moment);
    if (status != SHMB_OK) return end(&python, status, 0);
    PyEval_RestoreThread(python.saved);
    return Py_BuildValue("(KKdKK)", (unsigned long long)moment.head, (unsigned long long)moment.write_count,
                         moment.max_priority, (unsigned long long)moment.byte_tail, (unsigned long long)moment.byte_head);
}

/* relink(slots, count) -> how many were forgotten. For recovery, while nobody else is alive. */
static PyObject *ring_relink(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t slots, count;
    if (expect(nargs, 2, "relink") < 0 || of_records(self, "relink") < 0 || number(args[0], &slots) < 0 ||
        number(args[1], &count) < 0)
        return NULL;
    for (uint64_t i = 0; i < count; i++)
        if (AT(const uint64_t, slots)[i] >= self->ring.capacity)
            return PyErr_Format(PyExc_IndexError, "relink: no slot %llu", (unsigned long long)AT(const uint64_t, slots)[i]);
    return PyLong_FromUnsignedLongLong(shmb_relink(&self->ring, AT(const int64_t, slots), count));
}

/* checksum(slot, ticket) -> what the checksum of that slot's bytes is now */
static PyObject *ring_checksum(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    uint64_t slot, ticket;
    if (expect(nargs, 2, "checksum") < 0 || number(args[0], &slot) < 0 || number(args[1], &ticket) < 0) return NULL;
    if (slot >= self->ring.capacity) return PyErr_Format(PyExc_IndexError, "checksum: no slot %llu", (unsigned long long)slot);
    return PyLong_FromUnsignedLong(shmb_row_checksum(&self->ring, slot, ticket));
}

/* verify(first, count) -> slots in [first, first + count) that are COMMITTED and whose checksum is wrong, as a list */
static PyObject *ring_verify(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct shmb_ring *ring = &self->ring;
    uint64_t first, count;
    if (expect(nargs, 2, "verify") < 0 || number(args[0], &first) < 0 || number(args[1], &count) < 0) return NULL;
    if (first > ring->capacity || count > ring->capacity - first)
        return PyErr_Format(PyExc_IndexError, "verify: no slots %llu + %llu", (unsigned long long)first, (unsigned long long)count);
    PyObject *list = PyList_New(0);
    for (uint64_t slot = first; list && slot < first + count;) {
        uint64_t word = 0;
        bool wrong = false;
        Py_BEGIN_ALLOW_THREADS
        for (uint64_t left = 4096; left && slot < first + count && !wrong; left--, slot++) {
            word = atomic_load_explicit(&ring->words[slot], memory_order_acquire);
            if (SHMB_STATE(word) != SHMB_COMMITTED) continue;
            wrong = shmb_row_checksum(ring, slot, SHMB_TICKET(word)) != ring->checksums[slot];
            atomic_thread_fence(memory_order_acquire);
            wrong = wrong && atomic_load_explicit(&ring->words[slot], memory_order_relaxed) == word;
        }
        Py_END_ALLOW_THREADS
        if (wrong) {
            PyObject *at = PyLong_FromUnsignedLongLong(slot - 1);
            if (at == NULL || PyList_Append(list, at) < 0) Py_CLEAR(list);
            Py_XDECREF(at);
        }
    }
    return list;
}

/* rebuild(): leaves, length and parents from words and raw priorities. For recovery, while nobody else is alive. */
static PyObject *ring_rebuild(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    struct ring_object *self = (struct ring_object *)object;
    Py_BEGIN_ALLOW_THREADS
    shmb_ring_leaves(&self->ring);
    shmb_tree_parents(&self->ring.tree);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *get_blocker(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure)) {
    return Py_BuildValue("(IKKO)", shmb_refusal.blocker.entry, (unsigned long long)shmb_refusal.blocker.incarnation,
                         (unsigned long long)shmb_refusal.blocker.turn, shmb_refusal.blocker.by_turn ? Py_True : Py_False);
}

static PyObject *get_bad_at(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_refusal.bad_at);
}

static PyObject *get_needed(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_refusal.needed);
}

static PyObject *get_why(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure)) {
    return PyLong_FromLong(shmb_refusal.why);
}

#define GET_U64(name, expression)                                                                            \
    static PyObject *get_##name(PyObject *object, void *Py_UNUSED(closure)) {                                \
        const struct shmb_ring *ring = &((struct ring_object *)object)->ring;                                \
        return PyLong_FromUnsignedLongLong(expression);                                                      \
    }
GET_U64(head, atomic_load_explicit(&ring->runtime->head, memory_order_acquire))
GET_U64(write_count, atomic_load_explicit(&ring->runtime->write_count, memory_order_acquire))
static uint64_t length_of(const struct shmb_ring *ring) { /* no more than there is room for, whatever is there */
    uint64_t length = atomic_load_explicit(&ring->runtime->length, memory_order_acquire);
    return (length < ring->capacity ? length : ring->capacity) * ring->lanes;
}
GET_U64(length, length_of(ring))
GET_U64(state, atomic_load_explicit(&ring->runtime->state, memory_order_acquire))
GET_U64(prioritized, atomic_load_explicit(&ring->runtime->prioritized, memory_order_acquire))
GET_U64(limits, shmb_limits(ring->runtime))
GET_U64(queued, shmb_queued(ring))
GET_U64(waits_for, atomic_load_explicit(&ring->me->waits_for, memory_order_relaxed))
GET_U64(last_writer, (uint64_t)ring->gate.last)
GET_U64(incarnation, ring->incarnation)
GET_U64(byte_head, atomic_load_explicit(&ring->runtime->byte_head, memory_order_acquire))
GET_U64(byte_tail, atomic_load_explicit(&ring->runtime->byte_tail, memory_order_acquire))

#define GET_DOUBLE(name, expression)                                                                         \
    static PyObject *get_##name(PyObject *object, void *Py_UNUSED(closure)) {                                \
        const struct shmb_ring *ring = &((struct ring_object *)object)->ring;                                \
        return PyFloat_FromDouble(expression);                                                               \
    }
GET_DOUBLE(max_priority, ring->runtime->max_priority)
GET_DOUBLE(alpha, ring->runtime->alpha)
GET_DOUBLE(eps, ring->runtime->eps)
GET_DOUBLE(total, shmb_tree_total(&ring->tree))
GET_DOUBLE(least, shmb_tree_min(&ring->tree))

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))ring_##name, METH_FASTCALL, text}
static PyMethodDef methods[] = {
    FAST(write, "write(addresses, count, priorities, timeout_ns): claim, fill, commit."),
    FAST(place, "place(slots, count, addresses, priorities, in_place, timeout_ns): the same for named slots."),
    FAST(claim, "claim(count, timeout_ns): take slots; the caller fills them."),
    FAST(claim_slots, "claim_slots(slots, count, in_place, tickets or 0, kept or 0, timeout_ns): take named slots."),
    FAST(restore, "restore(slot, write_count, max_priority, timeout_ns): position and counts of a buffer that is loaded."),
    FAST(copy_slots, "copy_slots(first, count, out, tickets): copy the slots that differ from tickets."),
    FAST(copy_moment, "copy_moment(out, tickets, sources, raw, timeout_ns): the same under the mutex, and the counters."),
    FAST(commit, "commit(priorities, skip_rows, timeout_ns): publish what was claimed."),
    {"abort", ring_abort, METH_O, "abort(timeout_ns): give the claimed slots back, empty."},
    FAST(sample, "sample(count, key, out, index, tickets, weights, beta, prioritized, timeout_ns): draw, copy, validate."),
    FAST(read, "read(index, count, out, tickets, timeout_ns): validated copies by index."),
    FAST(update, "update(index, tickets, priorities, count, timeout_ns): raw priorities."),
    FAST(update_singles, "update_singles(index, tickets, priorities, count, timeout_ns): the same, of float32."),
    FAST(empty, "empty(keep_write_count, timeout_ns): forget every item."),
    FAST(set_alpha, "set_alpha(alpha or None, eps or None, bind, timeout_ns): change them, or switch the tree on; None: as it is."),
    FAST(reap, "reap(entry, incarnation, timeout_ns): finish the claim of a client proven dead, free its entry."),
    FAST(forfeit, "forfeit(entry, turn, timeout_ns): send a turn that is not used to the end of the queue."),
    {"leave", ring_leave, METH_O, "leave(timeout_ns): free our entry."},
    {"check", ring_check, METH_O, "check(timeout_ns): what is not as it should be, counted."},
    {"give_up_turn", ring_give_up_turn, METH_O, "give_up_turn(timeout_ns): stop waiting."},
    {"wait", ring_wait, METH_O, "wait(timeout_ns): sleep until somebody makes progress."},
    {"snapshot", ring_snapshot, METH_O, "snapshot(timeout_ns): runtime page and registry of one moment."},
    {"look", ring_look, METH_NOARGS, "look(): whether the directory is there; asked of the system once a second."},
    {"let_pass", ring_let_pass, METH_O, "let_pass(whether): this thread's next write or draw goes on whatever the ratio."},
    FAST(admit_sample, "admit_sample(count, min_size, chosen, timeout_ns): the draw may be made, and counts."),
    FAST(take_back, "take_back(count, version, timeout_ns): a draw that was admitted was not made."),
    FAST(take, "take(count, index, tickets, timeout_ns): the oldest of a queue."),
    {"release", ring_release, METH_O, "release(timeout_ns): what was taken is read."},
    FAST(limit, "limit(limits, samples_per_insert, error_buffer, min_size, max_times_sampled, when_alone, timeout_ns)."),
    FAST(waits_in_queue, "waits_in_queue(entry, side, timeout_ns): why a queue makes a client wait, or 0."),
    FAST(give_up_waiting, "give_up_waiting(sides, timeout_ns): stop waiting for the other side."),
    FAST(write_records, "write_records(data, bytes, starts, sizes, count, priorities, timeout_ns): claim, fill, commit."),
    FAST(place_records, "place_records(slots, data, bytes, starts, sizes, count, priorities, in_place, tickets or 0,\n"
                        "kept or 0, timeout_ns): the same for named slots, in ascending order."),
    FAST(sample_records, "sample_records(count, key, data, room, starts, sizes, positions, index, tickets, weights, beta,\n"
                         "prioritized, timeout_ns): draw, copy, validate."),
    FAST(read_records, "read_records(index, count, data, room, starts, sizes, positions, tickets, timeout_ns): by slot."),
    {"span", ring_span, METH_O, "span(timeout_ns): tail, where nobody writes below, and head of the byte ring."},
    FAST(records_moment, "records_moment(from, data, room, tickets, extents, sources, raw, timeout_ns): all of one moment."),
    FAST(relink, "relink(slots, count): one way from record to record; slots in the order of their positions."),
    FAST(checksum, "checksum(slot, ticket): CRC32C of a slot's bytes."),
    FAST(verify, "verify(first, count): slots whose checksum is wrong."),
    {"rebuild", ring_rebuild, METH_NOARGS, "rebuild(): leaves, length and parents anew; nobody else may be alive."},
    {NULL, NULL, 0, NULL},
};

#define GET(name, text) {#name, get_##name, NULL, text, NULL}
static PyGetSetDef properties[] = {
    GET(blocker, "(entry, incarnation, turn, by_turn) of whom the last blocked call of this thread met."),
    GET(head, "Next ticket."),
    GET(write_count, "Elements written so far."),
    GET(length, "Elements that are committed."),
    GET(state, "Life of the buffer."),
    GET(prioritized, "1 once the tree is kept."),
    GET(incarnation, "Ours."),
    GET(limits, "What limits both sides: RATIO, QUEUE, MIN_SIZE."),
    GET(queued, "Elements that a queue has not handed out as often as it may."),
    GET(waits_for, "The sides that this handle waits for."),
    GET(last_writer, "Thread of this process that wrote last, 0 if none did."),
    GET(why, "What this thread's last call was limited by."),
    GET(bad_at, "Position of the argument that this thread's last call was refused for."),
    GET(needed, "Bytes that this thread's last call needed, where there were too few."),
    GET(byte_head, "Where the next record starts."),
    GET(byte_tail, "Where the oldest record in use starts."),
    GET(max_priority, "Largest raw priority given; negative: none yet."),
    GET(alpha, "Priority exponent."),
    GET(eps, "Added to raw priorities."),
    GET(total, "Sum of all masses."),
    GET(least, "Smallest positive mass, 0 if there is none."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Ring(control, slots, leaves, capacity, lanes, entry, checksum, salt, records=None, file=None)"},
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec shmb_ring_spec = {
    .name = "shmbuffer._native._core.Ring",
    .basicsize = sizeof(struct ring_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
