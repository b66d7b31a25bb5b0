/* Windows for Python; Trajectories cuts its runs by them. The owner of both holds a lock, as in following.c. */
#include "python/module.h"

#include "core/ring.h"
#include "tables/windows.h"

struct windows_object {
    PyObject_HEAD
    struct shmb_windows windows;
    PyObject *ring; /* must stay alive */
};

static struct shmb_windows *windows_of(PyObject *self) { return &((struct windows_object *)self)->windows; }

static PyObject *windows_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *ring;
    unsigned long long steps;
    if (!PyArg_ParseTuple(args, "O!K:Windows", shmb_ring_type, &ring, &steps)) return NULL;
    const struct shmb_ring *core_ring = shmb_binding_ring(ring);
    if (steps == 0 || steps > INT32_MAX || core_ring->elements > UINT32_MAX - 1)
        return PyErr_Format(PyExc_ValueError, "Windows: windows of %llu items in a ring of %llu elements are not supported. Use at least one item per window.", steps,
                            (unsigned long long)core_ring->elements);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self == NULL) return NULL;
    ((struct windows_object *)self)->ring = Py_NewRef(ring);
    const _Atomic uint64_t *words = core_ring->words; /* they are only read */
    if (shmb_windows_make(windows_of(self), words, core_ring->elements, (uint32_t)core_ring->lanes, (uint32_t)steps)) return self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void windows_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    shmb_windows_free(windows_of(self));
    Py_XDECREF(((struct windows_object *)self)->ring);
    release(self);
    Py_DECREF(type);
}

static PyObject *windows_take_back(PyObject *self, PyObject *args) {
    unsigned long long next, lost;
    if (!PyArg_ParseTuple(args, "KK:take_back", &next, &lost)) return NULL;
    shmb_windows_take_back(windows_of(self), next, lost);
    Py_RETURN_NONE;
}

static PyObject *windows_mark_used(PyObject *self, PyObject *args) {
    unsigned long long elements, count, below;
    if (!PyArg_ParseTuple(args, "KKK:mark_used", &elements, &count, &below)) return NULL;
    shmb_windows_mark_used(windows_of(self), (const int64_t *)(uintptr_t)elements, count, below);
    Py_RETURN_NONE;
}

static PyObject *windows_position(PyObject *self, void *Py_UNUSED(closure)) {
    const struct shmb_windows *w = windows_of(self);
    return Py_BuildValue("(KK)", (unsigned long long)w->next, (unsigned long long)w->lost);
}

static PyObject *windows_waiting(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(shmb_windows_count_waiting(windows_of(self)));
}

static int windows_see(PyObject *self, PyObject *head, void *Py_UNUSED(closure)) {
    unsigned long long seen = head ? PyLong_AsUnsignedLongLong(head) : 0;
    if (PyErr_Occurred()) return -1;
    windows_of(self)->seen = seen;
    return 0;
}

static PyMethodDef windows_methods[] = {
    {"take_back", windows_take_back, METH_VARARGS, "take_back(next, lost): takes back all deliveries since that position."},
    {"mark_used", windows_mark_used, METH_VARARGS,
     "mark_used(elements, count, below): marks items with tickets below `below`, so that they get no window."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef windows_properties[] = {
    {"position", windows_position, NULL, "(number of the next window, number of lost windows).", NULL},
    {"waiting", windows_waiting, NULL, "Number of windows that were not delivered yet.", NULL},
    {"seen", NULL, windows_see, "Tickets from this one on are processed later.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot windows_slots[] = {
    {Py_tp_doc, "Windows(ring, steps): runs of items that are cut into windows, each delivered once."},
    {Py_tp_new, windows_new},
    {Py_tp_dealloc, windows_dealloc},
    {Py_tp_methods, windows_methods},
    {Py_tp_getset, windows_properties},
    {0, NULL},
};
PyType_Spec shmb_windows_spec = {.name = "shmbuffer._native._core.Windows",
                                 .basicsize = sizeof(struct windows_object),
                                 .flags = Py_TPFLAGS_DEFAULT,
                                 .slots = windows_slots};

struct shmb_windows *shmb_windows_in(PyObject *windows) {
    PyTypeObject *type = Py_TYPE(windows);
    if ((destructor)PyType_GetSlot(type, Py_tp_dealloc) == windows_dealloc) return windows_of(windows);
    return PyErr_Format(PyExc_TypeError, "Trajectories.cut_by() needs a Windows object."), NULL;
}
