/* Map: a shared or private mapping of a file, with the buffer protocol. It is unmapped when the last reference to it
 * goes. Every call into the core refers to its maps, so none is unmapped while a thread uses it. mutex.c explains why
 * that is sufficient for the page with the mutex. */
#include "python/module.h"

#include <errno.h>
#include <sys/mman.h>

#include "core/layout.h"

/* Newer than some headers that this is compiled with. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define SHMB_HUGE_PAGE ((size_t)2 << 20) /* for pages of 4 KiB */

struct map {
    PyObject_HEAD
    void *address;
    Py_ssize_t bytes;
    int writable, twice;
};

/* Maps the same bytes twice in a row, so that a ring is contiguous across its end. */
static void *map_twice(size_t bytes, int protection, int flags, int fd, off_t offset) {
    char *place = mmap(NULL, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return MAP_FAILED;
    for (int i = 0; i < 2; i++)
        if (mmap(place + i * bytes, bytes, protection, flags | MAP_FIXED, fd, offset) == MAP_FAILED) {
            int error = errno;
            munmap(place, 2 * bytes);
            errno = error;
            return MAP_FAILED;
        }
    return place;
}

/* Maps at an address that allows huge pages. The kernel chooses such an address only if the file system is mounted
 * with huge pages, but MADV_COLLAPSE creates them in any tmpfs. */
static void *map_aligned(size_t bytes, int protection, int flags, int fd, off_t offset) {
    size_t room = bytes + SHMB_HUGE_PAGE;
    char *place = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return MAP_FAILED;
    size_t before = ((uintptr_t)offset - (uintptr_t)place) % SHMB_HUGE_PAGE;
    size_t end = (before + bytes + SHMB_PAGE - 1) / SHMB_PAGE * SHMB_PAGE;
    void *mapped = mmap(place + before, bytes, protection, flags | MAP_FIXED, fd, offset);
    int error = errno;
    if (mapped == MAP_FAILED) before = end = 0;
    if (before) munmap(place, before);
    if (end < room) munmap(place + end, room - end);
    errno = error;
    return mapped;
}

static PyObject *map_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "nbytes", "writable", "offset", "twice", "aligned", "private", NULL};
    int fd, writable = 1, twice = 0, aligned = 0, private = 0;
    Py_ssize_t bytes;
    long long offset = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in|pLppp:Map", names, &fd, &bytes, &writable, &offset, &twice,
                                     &aligned, &private))
        return NULL;
    if (bytes < 0 || offset < 0) return PyErr_Format(PyExc_ValueError, "Map: nbytes is %zd and offset is %lld. Neither may be negative.", bytes, offset);
    void *address = NULL;
    if (bytes > 0) {
        int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        /* Memory is allocated only for the pages that are written, which are few. */
        int flags = private ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
        Py_BEGIN_ALLOW_THREADS
        if (twice)
            address = map_twice((size_t)bytes, protection, flags, fd, (off_t)offset);
        else if (aligned && (size_t)bytes >= SHMB_HUGE_PAGE)
            address = map_aligned((size_t)bytes, protection, flags, fd, (off_t)offset);
        else
            address = mmap(NULL, (size_t)bytes, protection, flags, fd, (off_t)offset);
        Py_END_ALLOW_THREADS
        if (address == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct map *map = (struct map *)allocate(type, 0);
    if (map == NULL) {
        if (address) munmap(address, (size_t)bytes << twice);
        return NULL;
    }
    map->address = address;
    map->bytes = bytes;
    map->writable = writable;
    map->twice = twice;
    return (PyObject *)map;
}

static void map_dealloc(PyObject *self) {
    struct map *map = (struct map *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (map->address) munmap(map->address, (size_t)map->bytes << map->twice);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int map_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    static char nothing[1];
    struct map *map = (struct map *)self;
    return PyBuffer_FillInfo(view, self, map->address ? map->address : nothing, map->bytes << map->twice, !map->writable,
                             flags);
}

static PyObject *map_sync(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct map *map = (struct map *)self;
    int error = 0;
    if (map->address == NULL) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    error = msync(map->address, (size_t)map->bytes, MS_SYNC) ? errno : 0;
    Py_END_ALLOW_THREADS
    if (error == 0) Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Reads one byte of each page, which allocates and maps the page without a write. */
static void touch(const char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += SHMB_PAGE) (void)*(const volatile char *)(at + i);
}

/* Allocates and maps pages in one system call, instead of one page fault each in the processes that use them first.
 * No byte changes, so other processes may write there meanwhile. */
static PyObject *map_populate(PyObject *self, PyObject *args) {
    struct map *map = (struct map *)self;
    Py_ssize_t start, bytes;
    int memory, error = 0;
    if (!PyArg_ParseTuple(args, "nnp:populate", &start, &bytes, &memory)) return NULL;
    if (start < 0 || start % SHMB_PAGE || bytes < 0 || start > map->bytes || bytes > map->bytes - start)
        return PyErr_Format(PyExc_ValueError, "Map.populate: %zd bytes at %zd are not within the map of %zd bytes. start must be a multiple of a page.", bytes, start, map->bytes);
    if (bytes == 0) Py_RETURN_NONE;
    char *at = (char *)map->address + start;
    Py_BEGIN_ALLOW_THREADS
    /* A file on disk is populated for reading only. Otherwise all of its zeros would be written back. */
    if (madvise(at, (size_t)bytes, memory && map->writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ)) error = errno;
    if (error == EINVAL) { /* before Linux 5.14 */
        touch(at, (size_t)bytes);
        error = 0;
    }
    /* If this fails, the range keeps its small pages: most file systems in memory are mounted without huge ones. A
     * huge page may begin in the previous range; existing ones are skipped. */
    size_t before = (size_t)start < SHMB_HUGE_PAGE ? (size_t)start : SHMB_HUGE_PAGE;
    if (error == 0 && memory) madvise(at - before, (size_t)bytes + before, MADV_COLLAPSE);
    Py_END_ALLOW_THREADS
    if (error == 0) Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *map_address(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(((struct map *)self)->address);
}

static PyObject *map_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((struct map *)self)->bytes);
}

static PyMethodDef methods[] = {
    {"sync", map_sync, METH_NOARGS, "sync(): writes dirty pages back and waits for them (msync(2), MS_SYNC)."},
    {"populate", map_populate, METH_VARARGS,
     "populate(start, nbytes, memory): allocates and maps pages before they are needed. No byte changes. `memory`: the\n"
     "file system is in memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"address", map_address, NULL, "Address of the mapping in this process, 0 if it is empty.", NULL},
    {"nbytes", map_nbytes, NULL, "Size in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Map(fd, nbytes, writable=True, offset=0, twice=False, aligned=False, private=False): a mapping of a\n"
                "file, shared or copied on write. `twice`: two mappings of the same bytes in a row."},
    {Py_tp_new, map_new},
    {Py_tp_dealloc, map_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_bf_getbuffer, map_getbuffer},
    {0, NULL},
};

PyType_Spec shmb_map_spec = {
    .name = "shmbuffer._native._core.Map",
    .basicsize = sizeof(struct map),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

void *shmb_map_address(PyObject *map) { return ((struct map *)map)->address; }
Py_ssize_t shmb_map_bytes(PyObject *map) { return ((struct map *)map)->bytes; }
int shmb_map_is_twice(PyObject *map) { return ((struct map *)map)->twice; }
