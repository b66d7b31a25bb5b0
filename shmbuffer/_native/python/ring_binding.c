/* Ring for Python: construction, destruction, attributes, and the entry points of its methods. */
#include <stdlib.h>

#include "python/methods.h"

/* From (descriptor of the directory, name of the control file, its device, its inode). */
static bool parse_presence(PyObject *file, struct shmb_presence *presence) {
    unsigned long long device, inode;
    if (!PyArg_ParseTuple(file, "isKK:Ring", &presence->folder, &presence->name, &device, &inode)) return false;
    presence->device = device;
    presence->inode = inode;
    return true;
}

/* A leaf is (map, bytes of an element). For next observations that are stored once, it is (map, bytes, leaf number
 * of the observation). */
static bool parse_leaf(struct ring_object *self, Py_ssize_t i, uint64_t own_rows, long *root) {
    struct shmb_ring *ring = &self->ring;
    PyObject *map;
    unsigned long long bytes;
    *root = -1;
    if (!PyArg_ParseTuple(PyTuple_GetItem(self->leaves, i), "O!K|l", shmb_map_type, &map, &bytes, root)) return false;
    uint64_t rows = *root < 0 ? ring->elements : own_rows;
    if ((uint64_t)shmb_map_bytes(map) != bytes * rows || (*root >= 0 && !(bytes && rows)))
        return PyErr_Format(PyExc_ValueError, "Ring: leaf %zd has %zd bytes, but its rows need %llu. Pass a Map of that size.", i, shmb_map_bytes(map), bytes * rows), false;
    unsigned char *base = shmb_map_address(map);
    if (*root < 0)
        ring->leaves[i] = (struct shmb_leaf){base, bytes, bytes};
    else
        ring->leaves[i] = (struct shmb_leaf){NULL, 0, bytes};
    if (*root >= 0) ring->shared[ring->n_shared++] = (struct shmb_shared_leaf){(unsigned)i, (unsigned)*root, base, bytes};
    self->ring.row_bytes += bytes * ring->lanes;
    return true;
}

static bool parse_leaves(struct ring_object *self, uint64_t own_rows) {
    struct shmb_ring *ring = &self->ring;
    long root;
    ring->shared = PyMem_Calloc(ring->n_leaves + 1, sizeof *ring->shared);
    if (ring->shared == NULL) return (void)PyErr_NoMemory(), false;
    for (unsigned i = 0; i < ring->n_leaves; i++)
        if (!parse_leaf(self, i, own_rows, &root)) return false;
    for (unsigned which = 0; which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        if (shared->root >= ring->n_leaves || ring->leaves[shared->root].element_bytes != shared->bytes)
            return PyErr_Format(PyExc_ValueError, "Ring: leaf %u cannot be the observation of leaf %u, because they have different forms.", shared->root, shared->leaf), false;
    }
    if ((own_rows != 0) != (ring->n_shared != 0))
        return PyErr_Format(PyExc_ValueError, "Ring: %llu own rows were given for %u leaves of next observations. Give both or neither.", (unsigned long long)own_rows, ring->n_shared), false;
    return true;
}

static bool map_sharing(struct shmb_ring *ring, uint64_t own_rows, const struct shmb_sections *sections, unsigned char *base) {
    if (own_rows == 0) return true;
    ring->own_rows = own_rows;
    ring->nexts = (_Atomic uint64_t *)(base + sections->nexts);
    ring->holders = (_Atomic uint32_t *)(base + sections->holders);
    return shmb_sharing_begin(ring) || PyErr_NoMemory() != NULL;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "slots", "leaves", "capacity", "lanes", "entry", "checksum", "salt", "records", "file", "own_rows", "ledger", NULL};
    PyObject *control, *slots, *leaves, *records = Py_None, *file = Py_None, *ledger = Py_None;
    unsigned long long capacity, lanes, own_rows = 0;
    unsigned int entry, salt;
    int checksum;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!KKIpI|OOKO:Ring", names, shmb_map_type, &control, shmb_map_type,
                                     &slots, &PyTuple_Type, &leaves, &capacity, &lanes, &entry, &checksum, &salt, &records, &file, &own_rows, &ledger))
        return NULL;
    bool has_records = records != Py_None;
    if (has_records && (!PyObject_TypeCheck(records, shmb_map_type) || !shmb_map_is_twice(records) || lanes != 1 ||
                        shmb_map_bytes(records) < (Py_ssize_t)SHMB_PAGE || PyTuple_Size(leaves) != 0))
        return PyErr_Format(PyExc_ValueError, "Ring: records need a Map with twice=True, no leaves, and one lane.");
    if (capacity == 0 || lanes == 0 || capacity > ((uint64_t)1 << 40) / lanes || entry >= SHMB_ENTRIES)
        return PyErr_Format(PyExc_ValueError, "Ring: capacity %llu, lanes %llu or entry %u is out of range.", capacity, lanes, entry);
    if (own_rows && (has_records || lanes != 1 || capacity >= SHMB_NEXT_LIMIT || own_rows >= SHMB_NEXT_LIMIT))
        return PyErr_Format(PyExc_ValueError, "Ring: %llu own rows need rows of leaves, one lane, and fewer than 2 ** %d slots and own rows.", own_rows, SHMB_NEXT_BITS);
    struct shmb_sections sections;
    shmb_compute_sections(capacity, lanes, has_records, own_rows, &sections);
    if (shmb_map_bytes(control) != (Py_ssize_t)SHMB_CONTROL_BYTES || shmb_map_bytes(slots) != (Py_ssize_t)sections.bytes)
        return PyErr_Format(PyExc_ValueError, "Ring: the slots file has %zd bytes, but this capacity needs %llu.", shmb_map_bytes(slots),
                            (unsigned long long)sections.bytes);
    struct shmb_ledger_parts parts;
    shmb_compute_parts(capacity, &parts);
    bool has_ledger = ledger != Py_None;
    if (has_ledger && (!PyObject_TypeCheck(ledger, shmb_map_type) || shmb_map_bytes(ledger) != (Py_ssize_t)parts.bytes))
        return PyErr_Format(PyExc_ValueError, "Ring: the ledger of %llu slots must be a Map of %llu bytes.", capacity, (unsigned long long)parts.bytes);
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
    if (has_ledger) {
        ring->parts = parts;
        ring->ledger = shmb_map_address(ledger);
        ring->reservations = (struct shmb_reservation *)((char *)shmb_map_address(ledger) + parts.reservations);
    }
    ring->checksum = checksum != 0;
    ring->salt = salt;
    /* in the child of a fork it may not have been called, and the child's own children must differ */
    shmb_init_process_token();
    ring->process_token = shmb_process_token();
    shmb_tree_map(&ring->tree, &sections, base);
    shmb_gate_init(&ring->gate);
    Py_ssize_t n = PyTuple_Size(leaves);
    ring->leaves = PyMem_Calloc((size_t)(n ? n : 1), sizeof *ring->leaves);
    self->control = Py_NewRef(control);
    self->slots = Py_NewRef(slots);
    self->leaves = Py_NewRef(leaves);
    self->records = Py_NewRef(records);
    self->ledger = Py_NewRef(ledger);
    self->file = Py_NewRef(file);
    self->ready = 1;
    if (file != Py_None && !parse_presence(file, &ring->presence)) {
        Py_DECREF(self);
        return NULL;
    }
    if (ring->leaves == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    ring->n_leaves = (unsigned)n;
    if (!parse_leaves(self, own_rows) || !map_sharing(ring, own_rows, &sections, base)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void ring_dealloc(PyObject *object) {
    struct ring_object *self = (struct ring_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ready) {
        PyMem_Free(self->ring.leaves);
        PyMem_Free(self->ring.shared);
        shmb_sharing_end(&self->ring);
        free(self->ring.claim_slots);
        free(self->ring.claim_from);
        free(self->ring.masses);
        free(self->ring.touched);
    }
    Py_XDECREF(self->control);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->leaves);
    Py_XDECREF(self->records);
    Py_XDECREF(self->ledger);
    Py_XDECREF(self->file);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

struct shmb_ring *shmb_binding_ring(PyObject *object) { return &((struct ring_object *)object)->ring; }

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

static PyObject *get_drawn_from(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure)) {
    return shmb_last_draw_totals.length ? shmb_build_totals(&shmb_last_draw_totals) : Py_NewRef(Py_None);
}

#define GET_U64(name, expression)                                                                            \
    static PyObject *get_##name(PyObject *object, void *Py_UNUSED(closure)) {                                \
        const struct shmb_ring *ring = &((struct ring_object *)object)->ring;                                \
        return PyLong_FromUnsignedLongLong(expression);                                                      \
    }
GET_U64(head, atomic_load_explicit(&ring->runtime->head, memory_order_acquire))
GET_U64(write_count, atomic_load_explicit(&ring->runtime->write_count, memory_order_acquire))
/* limited to the capacity, because shared memory may be damaged */
static uint64_t length_of(const struct shmb_ring *ring) {
    uint64_t length = atomic_load_explicit(&ring->runtime->length, memory_order_acquire);
    return (length < ring->capacity ? length : ring->capacity) * ring->lanes;
}
GET_U64(length, length_of(ring))
GET_U64(state, atomic_load_explicit(&ring->runtime->state, memory_order_acquire))
GET_U64(prioritized, atomic_load_explicit(&ring->runtime->prioritized, memory_order_acquire))
GET_U64(limits, shmb_read_limits(ring->runtime))
GET_U64(queued, shmb_count_queued(ring))
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

#define ENTRY_POINT(name, items, arguments, text)                                                                   \
    static PyObject *call_##name(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {                \
        _Static_assert(sizeof arguments <= MAX_ARGUMENTS + 1, "MOST_ARGUMENTS is large enough");        \
        static const struct method method = {#name, arguments, items, shmb_ring_##name};                     \
        return shmb_call_method(object, &method, args, nargs);                                                       \
    }
METHODS(ENTRY_POINT)

#define ROW(name, items, arguments, text) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, #name text},
static PyMethodDef methods[] = {METHODS(ROW){NULL, NULL, 0, NULL}};

#define GET(name, text) {#name, get_##name, NULL, text, NULL}
static PyGetSetDef properties[] = {
    GET(blocker, "(entry, incarnation, turn, by_turn) of the client that blocked this thread's last call."),
    GET(head, "The next ticket."),
    GET(write_count, "Number of elements written so far."),
    GET(length, "Number of committed elements."),
    GET(state, "State of the buffer."),
    GET(prioritized, "1 after a prioritized sampler was bound."),
    GET(incarnation, "Incarnation of this handle."),
    GET(limits, "Limits in force: RATIO, QUEUE, MIN_SIZE."),
    GET(queued, "Elements that a queue has not handed out max_times_sampled times."),
    GET(waits_for, "Sides that this handle waits for."),
    GET(last_writer, "The last thread of this process that wrote; 0: none."),
    GET(why, "Reason of this thread's last refused call."),
    GET(bad_at, "Position of the argument for which this thread's last call was refused."),
    GET(needed, "Bytes, or elements, that this thread's last refused call needed."),
    GET(drawn_from, "(mass, least, max_priority, length) at this thread's last draw; None before the first."),
    GET(byte_head, "Position of the next record."),
    GET(byte_tail, "Position of the oldest record in use."),
    GET(max_priority, "Largest raw priority ever given; negative: none yet."),
    GET(alpha, "Priority exponent."),
    GET(eps, "Added to raw priorities."),
    GET(total, "Sum of all masses."),
    GET(least, "Smallest positive mass, 0 if there is none."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Ring(control, slots, leaves, capacity, lanes, entry, checksum, salt, records=None, file=None, own_rows=0, ledger=None): a handle of a ring."},
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
