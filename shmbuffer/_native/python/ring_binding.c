/* Ring for Python: construction, destruction, attributes, and the entry points of its methods. */
#include <stdlib.h>

#include "python/methods.h"

/* From (descriptor of the directory, name of the control file, its device, its inode). */
static bool to_look_for(PyObject *file, struct shmb_presence *presence) {
    unsigned long long device, inode;
    if (!PyArg_ParseTuple(file, "isKK:Ring", &presence->folder, &presence->name, &device, &inode)) return false;
    presence->device = device;
    presence->inode = inode;
    return true;
}

/* A leaf is (map, bytes of an element). For next observations that are stored once, it is (map, bytes, leaf number
 * of the observation). */
static bool to_leaf(struct ring_object *self, Py_ssize_t i, uint64_t wholes, long *root) {
    struct shmb_ring *ring = &self->ring;
    PyObject *map;
    unsigned long long bytes;
    *root = -1;
    if (!PyArg_ParseTuple(PyTuple_GetItem(self->leaves, i), "O!K|l", shmb_map_type, &map, &bytes, root)) return false;
    uint64_t rows = *root < 0 ? ring->elements : wholes;
    if ((uint64_t)shmb_map_bytes(map) != bytes * rows || (*root >= 0 && !(bytes && rows)))
        return PyErr_Format(PyExc_ValueError, "Ring: leaf %zd has %zd bytes, %llu are needed", i, shmb_map_bytes(map), bytes * rows), false;
    unsigned char *base = shmb_map_address(map);
    if (*root < 0)
        ring->leaves[i] = (struct shmb_leaf){base, bytes, bytes};
    else
        ring->leaves[i] = (struct shmb_leaf){NULL, 0, bytes};
    if (*root >= 0) ring->once[ring->n_once++] = (struct shmb_once){(unsigned)i, (unsigned)*root, base, bytes};
    self->ring.row_bytes += bytes * ring->lanes;
    return true;
}

static bool to_rows(struct ring_object *self, uint64_t wholes) {
    struct shmb_ring *ring = &self->ring;
    long root;
    ring->once = PyMem_Calloc(ring->n_leaves + 1, sizeof *ring->once);
    if (ring->once == NULL) return (void)PyErr_NoMemory(), false;
    for (unsigned i = 0; i < ring->n_leaves; i++)
        if (!to_leaf(self, i, wholes, &root)) return false;
    for (unsigned which = 0; which < ring->n_once; which++) {
        const struct shmb_once *once = &ring->once[which];
        if (once->root >= ring->n_leaves || ring->leaves[once->root].element_bytes != once->bytes)
            return PyErr_Format(PyExc_ValueError, "Ring: leaf %u cannot be the observation of leaf %u", once->root, once->leaf), false;
    }
    if ((wholes != 0) != (ring->n_once != 0))
        return PyErr_Format(PyExc_ValueError, "Ring: %llu wholes for %u leaves", (unsigned long long)wholes, ring->n_once), false;
    return true;
}

static bool to_share(struct shmb_ring *ring, uint64_t wholes, const struct shmb_sections *sections, unsigned char *base) {
    if (wholes == 0) return true;
    ring->wholes = wholes;
    ring->nexts = (_Atomic uint64_t *)(base + sections->nexts);
    ring->holders = (_Atomic uint32_t *)(base + sections->holders);
    return shmb_sharing_begin(ring) || PyErr_NoMemory() != NULL;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "slots", "leaves", "capacity", "lanes", "entry", "checksum", "salt", "records", "file", "wholes", "ledger", NULL};
    PyObject *control, *slots, *leaves, *records = Py_None, *file = Py_None, *given = Py_None;
    unsigned long long capacity, lanes, wholes = 0;
    unsigned int entry, salt;
    int checksum;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!KKIpI|OOKO:Ring", names, shmb_map_type, &control, shmb_map_type,
                                     &slots, &PyTuple_Type, &leaves, &capacity, &lanes, &entry, &checksum, &salt, &records, &file, &wholes, &given))
        return NULL;
    bool has_records = records != Py_None;
    if (has_records && (!PyObject_TypeCheck(records, shmb_map_type) || !shmb_map_is_twice(records) || lanes != 1 ||
                        shmb_map_bytes(records) < (Py_ssize_t)SHMB_PAGE || PyTuple_Size(leaves) != 0))
        return PyErr_Format(PyExc_ValueError, "Ring: records need a Map of them twice in a row, no leaves and one lane");
    if (capacity == 0 || lanes == 0 || capacity > ((uint64_t)1 << 40) / lanes || entry >= SHMB_ENTRIES)
        return PyErr_Format(PyExc_ValueError, "Ring: capacity %llu, lanes %llu, entry %u", capacity, lanes, entry);
    if (wholes && (has_records || lanes != 1 || capacity >= SHMB_NEXT_LIMIT || wholes >= SHMB_NEXT_LIMIT))
        return PyErr_Format(PyExc_ValueError, "Ring: %llu wholes need rows, one lane and fewer than 2 ** %d slots", wholes, SHMB_NEXT_BITS);
    struct shmb_sections sections;
    shmb_sections_of(capacity, lanes, has_records, wholes, &sections);
    if (shmb_map_bytes(control) != (Py_ssize_t)SHMB_CONTROL_BYTES || shmb_map_bytes(slots) != (Py_ssize_t)sections.bytes)
        return PyErr_Format(PyExc_ValueError, "Ring: the slots file has %zd bytes, %llu are needed", shmb_map_bytes(slots),
                            (unsigned long long)sections.bytes);
    struct shmb_parts parts;
    shmb_parts_of(capacity, &parts);
    bool has_ledger = given != Py_None;
    if (has_ledger && (!PyObject_TypeCheck(given, shmb_map_type) || shmb_map_bytes(given) != (Py_ssize_t)parts.bytes))
        return PyErr_Format(PyExc_ValueError, "Ring: the ledger of %llu slots is a Map of %llu bytes", capacity, (unsigned long long)parts.bytes);
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
        ring->ledger = shmb_map_address(given);
        ring->reservations = (struct shmb_reservation *)((char *)shmb_map_address(given) + parts.reservations);
    }
    ring->checksum = checksum != 0;
    ring->salt = salt;
    /* in the child of a fork it may not have been called, and the child's own children must differ */
    shmb_life_begin();
    ring->life = shmb_life();
    shmb_tree_map(&ring->tree, &sections, base);
    shmb_gate_init(&ring->gate);
    Py_ssize_t n = PyTuple_Size(leaves);
    ring->leaves = PyMem_Calloc((size_t)(n ? n : 1), sizeof *ring->leaves);
    self->control = Py_NewRef(control);
    self->slots = Py_NewRef(slots);
    self->leaves = Py_NewRef(leaves);
    self->records = Py_NewRef(records);
    self->ledger = Py_NewRef(given);
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
    ring->n_leaves = (unsigned)n;
    if (!to_rows(self, wholes) || !to_share(ring, wholes, &sections, base)) {
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
        PyMem_Free(self->ring.once);
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
    return shmb_drawn_from.length ? shmb_build_totals(&shmb_drawn_from) : Py_NewRef(Py_None);
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

#define DOOR(name, items, arguments, text)                                                                   \
    static PyObject *call_##name(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {                \
        _Static_assert(sizeof arguments <= MOST_ARGUMENTS + 1, "there is a place for each argument");        \
        static const struct method method = {#name, arguments, items, shmb_ring_##name};                     \
        return shmb_ask(object, &method, args, nargs);                                                       \
    }
METHODS(DOOR)

#define ROW(name, items, arguments, text) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, #name text},
static PyMethodDef methods[] = {METHODS(ROW){NULL, NULL, 0, NULL}};

#define GET(name, text) {#name, get_##name, NULL, text, NULL}
static PyGetSetDef properties[] = {
    GET(blocker, "(entry, incarnation, turn, by_turn) of the client that blocked this thread's last call."),
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
    GET(needed, "Bytes, or elements of a limited call, that this thread's last call needed."),
    GET(drawn_from, "(mass, least, max_priority, length) that this thread's last draw was from; None before the first."),
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
    {Py_tp_doc, "Ring(control, slots, leaves, capacity, lanes, entry, checksum, salt, records=None, file=None, wholes=0, ledger=None)"},
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
