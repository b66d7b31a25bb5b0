/* The weights for Python. Positions are checked against the map. Addresses are passed as integers, as in
 * arguments.c. */
#include "python/module.h"

#include <unistd.h>

#include "core/ring.h"

static int weights_at(PyObject *map, unsigned long long copies, unsigned long long bytes, struct shmb_weights_map *out) {
    if (!PyObject_TypeCheck(map, shmb_map_type)) {
        PyErr_Format(PyExc_TypeError, "The weights must be a Map of their file.");
        return -1;
    }
    unsigned long long size = (unsigned long long)shmb_map_bytes(map);
    if (size < SHMB_PAGE || copies < SHMB_PAGE || copies > size || bytes > (size - copies) / 2) {
        PyErr_Format(PyExc_ValueError, "The weights file does not fit its header: two copies of %llu bytes at %llu are not within %llu bytes.", bytes, copies, size);
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
            return PyErr_Format(PyExc_ValueError, "publish(): piece %llu is not within a copy of the weights.", (unsigned long long)i);
    uint64_t version;
    Py_BEGIN_ALLOW_THREADS
    version = shmb_publish(&weights, &pieces, step, (uint64_t)getpid());
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(version);
}

PyObject *shmb_core_read_newest(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *map;
    unsigned long long copies, bytes, known_version;
    Py_buffer out;
    struct shmb_weights_map weights;
    struct shmb_weights_info info = {0};
    if (!PyArg_ParseTuple(args, "OKKKw*:read_newest", &map, &copies, &bytes, &known_version, &out)) return NULL;
    int status = weights_at(map, copies, bytes, &weights);
    if (status == 0 && (unsigned long long)out.len != bytes) {
        PyErr_Format(PyExc_ValueError, "read_newest(): a copy has %llu bytes, but the buffer has %zd. Pass a buffer of the size of a copy.", bytes, out.len);
        status = -1;
    }
    if (status == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = shmb_read_newest(&weights, known_version, out.buf, &info);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    if (status < 0) return NULL;
    if (status != SHMB_OK) return PyLong_FromLong(status);
    return Py_BuildValue("(KLKK)", (unsigned long long)info.version, (long long)info.step,
                         (unsigned long long)info.time_ns, (unsigned long long)info.pid);
}
