/* Descriptor: owns an open file from the moment the kernel returns its number, and closes it with the last
 * reference. A variable with a number does not own the file: CPython checks for signals after a call returns and
 * before the number is stored. Ctrl-C at that point would leave the file open, and its lock held, for the life of
 * the process. Here one call opens and stores, and another one unlocks and closes, without bytecode in between. The
 * GIL guards all of it. */
#include "python/module.h"

#include <stddef.h>
#include <stdbool.h>
#include <sys/file.h>
#include <unistd.h>

struct descriptor {
    PyObject_HEAD
    struct descriptor *previous, *next; /* in the list of locks */
    int fd;
    pid_t owner;
    bool listed;
};

/* descriptors of locks: a forked child with a copy of one would hold its parent's lock */
static struct descriptor *locks;

static void close_file(struct descriptor *self) {
    int fd = self->fd;
    self->fd = -1;
    if (fd < 0) return;
    if (self->listed) {
        /* Unlocking also affects a copy that a fork in C made. In such a child the lock belongs to the parent. */
        if (self->owner == getpid()) flock(fd, LOCK_UN);
        close(fd);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    close(fd); /* may free the blocks of a large file that was removed */
    Py_END_ALLOW_THREADS
}

static PyObject *descriptor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct descriptor *self = (struct descriptor *)allocate(type, 0);
    if (self != NULL) self->fd = -1;
    return (PyObject *)self;
}

static int descriptor_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"inherited", NULL};
    struct descriptor *self = (struct descriptor *)object;
    int inherited = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$p:Descriptor", names, &inherited)) return -1;
    if (inherited || self->listed) return 0;
    self->listed = true;
    self->next = locks;
    if (locks != NULL) locks->previous = self;
    locks = self;
    return 0;
}

static void descriptor_dealloc(PyObject *object) {
    struct descriptor *self = (struct descriptor *)object;
    PyTypeObject *type = Py_TYPE(object);
    close_file(self);
    if (self->listed) {
        if (self->previous != NULL) self->previous->next = self->next;
        else locks = self->next;
        if (self->next != NULL) self->next->previous = self->previous;
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* take(open, *args, **kwargs) -> the number of the descriptor */
static PyObject *descriptor_take(PyObject *object, PyObject *args, PyObject *kwargs) {
    struct descriptor *self = (struct descriptor *)object;
    Py_ssize_t arguments_count = PyTuple_Size(args);
    if (arguments_count < 1) return PyErr_Format(PyExc_TypeError, "Descriptor.take() needs a function that opens the file. Pass one, such as os.open.");
    if (self->fd >= 0 && self->listed) return PyErr_Format(PyExc_ValueError, "Descriptor.take() was called while the descriptor holds a lock. Close it first.");
    PyObject *arguments = PyTuple_GetSlice(args, 1, arguments_count);
    if (arguments == NULL) return NULL;
    PyObject *number = PyObject_Call(PyTuple_GetItem(args, 0), arguments, kwargs);
    Py_DECREF(arguments);
    if (number == NULL) return NULL;
    long fd = PyLong_AsLong(number);
    if (fd == -1 && PyErr_Occurred()) {
        Py_DECREF(number);
        return NULL;
    }
    close_file(self);
    self->fd = (int)fd;
    self->owner = getpid();
    return number;
}

static PyObject *descriptor_close(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    close_file((struct descriptor *)object);
    Py_RETURN_NONE;
}

static PyObject *descriptor_enter(PyObject *object, PyObject *Py_UNUSED(ignored)) { return Py_NewRef(object); }

static PyObject *descriptor_fd(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(((struct descriptor *)object)->fd);
}

static PyObject *descriptor_fileno(PyObject *object, PyObject *Py_UNUSED(ignored)) { return descriptor_fd(object, NULL); }

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))descriptor_take, METH_VARARGS | METH_KEYWORDS,
     "take(open, *args, **kwargs): calls a function that opens a file, such as os.open, and owns the descriptor that it\n"
     "returns. Closes the previous one. Returns the number."},
    {"close", descriptor_close, METH_NOARGS, "close(): unlocks the file, if it is a lock, and closes it. Idempotent."},
    {"fileno", descriptor_fileno, METH_NOARGS, "fileno(): returns the number of the descriptor, -1 if no file is open."},
    {"__enter__", descriptor_enter, METH_NOARGS, "Returns this object."},
    {"__exit__", descriptor_close, METH_VARARGS, "Closes the file."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"fd", descriptor_fd, NULL, "Number of the descriptor, -1 if no file is open.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Descriptor(*, inherited=True): owns a file that `take` opens. inherited=False is for a lock, whose copy a forked\n"
                "child closes."},
    {Py_tp_new, descriptor_new},
    {Py_tp_init, descriptor_init},
    {Py_tp_dealloc, descriptor_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec shmb_descriptor_spec = {
    .name = "shmbuffer._native._core.Descriptor",
    .basicsize = sizeof(struct descriptor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

void shmb_close_parent_descriptors(void) {
    for (struct descriptor *each = locks; each != NULL; each = each->next) close_file(each);
}
