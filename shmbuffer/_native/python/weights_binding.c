/* The weights for Python. Positions are checked against the map. Addresses are passed as integers, as in
 * arguments.c. */
#include "python/module.h"

#include <unistd.h>

#include "core/ring.h"

static int weights_at(PyObject *map, unsigned long long copies, unsigned long long bytes, struct shmb_weights_map *out) {
    if (!PyObject_TypeCheck(map, shmb_map_type)) {
        PyErr_Format(PyExc_TypeError, "a Map of the weights is needed");
        return -1;
    }
    unsigned long long size = (unsigned long long)shmb_map_bytes(map);
    if (size < SHMB_PAGE || copies < SHMB_PAGE || copies > size || bytes > (size - copies) / 2) {
        PyErr_Format(PyExc_ValueError, "weights: two copies of %llu bytes at %llu of %llu", bytes, copies, size);
        return -1;
    }
    char *base = shmb_map_address(map);
    *out = (struct shmb_weights_map){(struct shmb_weights *)base, (unsigned char *)base + copies, bytes};
    return 0;
}

PyObject *shmb_core_publish(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *map;
    unsigned long long copies, bytes, address, count;
    long long step;
    struct shmb_weights_map weights;
    if (!PyArg_ParseTuple(args, "OKKKKL:publish", &map, &copies, &bytes, &address, &count, &step)) return NULL;
    if (weights_at(map, copies, bytes, &weights) < 0) return NULL;
    const uint64_t *table = (const uint64_t *)(uintptr_t)address;
    struct shmb_pieces pieces = {table, table + count, table + 2 * count, count};
    for (uint64_t i = 0; i < count; i++)
        if (pieces.places[i] > bytes || pieces.sizes[i] > bytes - pieces.places[i])
            return PyErr_Format(PyExc_ValueError, "publish: piece %llu does not lie within a copy", (unsigned long long)i);
    uint64_t version;
    Py_BEGIN_ALLOW_THREADS
    version = shmb_publish(&weights, &pieces, step, (uint64_t)getpid());
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(version);
}

PyObject *shmb_core_newest(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *map;
    unsigned long long copies, bytes, than;
    Py_buffer out;
    struct shmb_weights_map weights;
    struct shmb_weights_info found = {0};
    if (!PyArg_ParseTuple(args, "OKKKw*:newest", &map, &copies, &bytes, &than, &out)) return NULL;
    int status = weights_at(map, copies, bytes, &weights);
    if (status == 0 && (unsigned long long)out.len != bytes) {
        PyErr_Format(PyExc_ValueError, "newest: a copy has %llu bytes, the place for it %zd", bytes, out.len);
        status = -1;
    }
    if (status == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = shmb_newest(&weights, than, out.buf, &found);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    if (status < 0) return NULL;
    if (status != SHMB_OK) return PyLong_FromLong(status);
    return Py_BuildValue("(KLKK)", (unsigned long long)found.version, (long long)found.step,
                         (unsigned long long)found.time_ns, (unsigned long long)found.pid);
}
