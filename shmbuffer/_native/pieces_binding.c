/* Pieces of records for Python: laid out, arranged for zstd, and seen as buffers. Arrays are addresses of int64. */
#include "module.h"

#include "frames.h"
#include "locating.h"

#define AT(type, address) ((type *)(uintptr_t)(address))

/* locate_pieces(data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded): see locating.h */
PyObject *shmb_core_locate_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKK:locate_pieces", &data, &nbytes, &starts, &sizes, &count, &steps, &code, &code_bytes, &numbers,
                          &offsets, &stored, &expanded))
        return NULL;
    const struct shmb_records_read read = {AT(const unsigned char, data), nbytes, AT(const int64_t, starts), AT(const int64_t, sizes), count};
    return PyBool_FromLong(shmb_locate_pieces(&read, AT(const int64_t, steps), AT(const unsigned char, code), code_bytes,
                                              AT(int64_t, numbers), AT(int64_t, offsets), AT(int64_t, stored), AT(int64_t, expanded)));
}

/* measure_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends) -> bytes; -1: not so */
PyObject *shmb_core_measure_records(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends;
    if (!PyArg_ParseTuple(args, "KKKKKKKKK:measure_records", &steps, &code, &code_bytes, &numbers, &sizes, &count, &offsets, &starts, &ends))
        return NULL;
    const struct shmb_records_written written = {AT(const int64_t, steps), AT(const unsigned char, code), code_bytes,
                                                 AT(const int64_t, numbers), AT(const int64_t, sizes), count};
    return PyLong_FromLongLong(shmb_measure_records(&written, AT(int64_t, offsets), AT(int64_t, starts), AT(int64_t, ends)));
}

/* lay_out_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, addresses, data) */
PyObject *shmb_core_lay_out_records(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, addresses, data;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKK:lay_out_records", &steps, &code, &code_bytes, &numbers, &sizes, &count, &offsets, &starts,
                          &ends, &addresses, &data))
        return NULL;
    const struct shmb_records_written written = {AT(const int64_t, steps), AT(const unsigned char, code), code_bytes,
                                                 AT(const int64_t, numbers), AT(const int64_t, sizes), count};
    Py_BEGIN_ALLOW_THREADS
    shmb_lay_out_records(&written, AT(const int64_t, addresses), AT(const int64_t, offsets), AT(const int64_t, starts),
                         AT(const int64_t, ends), AT(unsigned char, data));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* take_apart(base, held, pieces, numbers, width, offsets, stored, expanded, count, to, parts, room, at) -> where the parts end: see frames.h */
PyObject *shmb_core_take_apart(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long base, held, pieces, numbers, width, offsets, stored, expanded, count, to, parts, room, at;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKKK:take_apart", &base, &held, &pieces, &numbers, &width, &offsets, &stored, &expanded, &count,
                          &to, &parts, &room, &at))
        return NULL;
    const struct shmb_leaves leaves = {(int64_t)base, AT(const struct shmb_held, held), pieces, AT(const int64_t, numbers), width,
                                       AT(const int64_t, offsets), AT(const int64_t, stored), AT(const int64_t, expanded), count};
    uint64_t end = at;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = shmb_take_apart(&leaves, AT(const int64_t, to), AT(int64_t, parts), room, &end);
    Py_END_ALLOW_THREADS
    return done ? PyLong_FromUnsignedLongLong(end) : PyErr_NoMemory();
}

/* arrange_parts(parts, room, count, base, out) -> frames, parts that are left: see frames.h */
PyObject *shmb_core_arrange_parts(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long parts, room, count, base, out;
    uint64_t frames, left;
    if (!PyArg_ParseTuple(args, "KKKKK:arrange_parts", &parts, &room, &count, &base, &out)) return NULL;
    if (!shmb_arrange_parts(AT(const int64_t, parts), room, count, (int64_t)base, AT(int64_t, out), &frames, &left)) return PyErr_NoMemory();
    return Py_BuildValue("KK", (unsigned long long)frames, (unsigned long long)left);
}

/* runs(whole, frames, frame, before, nbytes, to, planes, parts, most, at, out) -> count: see frames.h */
PyObject *shmb_core_runs(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long whole, frames, frame, before, nbytes, to, planes, parts, most, at, out;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKK:runs", &whole, &frames, &frame, &before, &nbytes, &to, &planes, &parts, &most, &at, &out))
        return NULL;
    const struct shmb_places places = {AT(const int64_t, whole), frames, AT(const int64_t, frame), AT(const int64_t, before),
                                       AT(const int64_t, nbytes), AT(const int64_t, to), AT(const int64_t, planes), parts};
    return PyLong_FromUnsignedLongLong(shmb_runs(&places, (int64_t)most, AT(int64_t, at), AT(struct shmb_run, out)));
}

/* frames_say(frames, whole, dictionary): whether the buffers of a list are frames that expand to so many bytes each */
PyObject *shmb_core_frames_say(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *frames;
    unsigned long long whole, dictionary;
    if (!PyArg_ParseTuple(args, "O!KK:frames_say", &PyList_Type, &frames, &whole, &dictionary)) return NULL;
    bool agrees = true;
    for (Py_ssize_t i = 0; agrees && i < PyList_Size(frames); i++) {
        Py_buffer frame;
        if (PyObject_GetBuffer(PyList_GetItem(frames, i), &frame, PyBUF_SIMPLE) < 0) return NULL;
        agrees = shmb_frame_says(frame.buf, (uint64_t)frame.len, AT(const uint64_t, whole)[i], (uint32_t)dictionary);
        PyBuffer_Release(&frame);
    }
    return PyBool_FromLong(agrees);
}

/* views(addresses, sizes, count) -> memoryviews, to be read */
PyObject *shmb_core_views(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long addresses, sizes, count;
    if (!PyArg_ParseTuple(args, "KKK:views", &addresses, &sizes, &count)) return NULL;
    PyObject *views = PyList_New((Py_ssize_t)count);
    for (unsigned long long i = 0; views && i < count; i++) {
        static char nothing;
        char *at = AT(char, AT(const int64_t, addresses)[i]);
        PyObject *view = PyMemoryView_FromMemory(at ? at : &nothing, (Py_ssize_t)AT(const int64_t, sizes)[i], PyBUF_READ);
        if (view == NULL || PyList_SetItem(views, (Py_ssize_t)i, view) < 0) Py_CLEAR(views);
    }
    return views;
}

/* bytes_at(found, addresses, sizes): where each of a sequence of buffers lies, as long as the sequence is there */
PyObject *shmb_core_bytes_at(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *found;
    unsigned long long addresses, sizes;
    if (!PyArg_ParseTuple(args, "OKK:bytes_at", &found, &addresses, &sizes)) return NULL;
    Py_ssize_t count = PySequence_Size(found);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer buffer;
        PyObject *one = PySequence_GetItem(found, i);
        if (one == NULL || PyObject_GetBuffer(one, &buffer, PyBUF_SIMPLE) < 0) return Py_XDECREF(one), NULL;
        AT(int64_t, addresses)[i] = (int64_t)(uintptr_t)buffer.buf;
        AT(int64_t, sizes)[i] = (int64_t)buffer.len;
        PyBuffer_Release(&buffer);
        Py_DECREF(one);
    }
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* address(one) -> where a buffer or a tensor begins, as long as it is there; a number is an address already, and None is 0 */
PyObject *shmb_core_address(PyObject *Py_UNUSED(module), PyObject *one) {
    Py_buffer buffer;
    if (PyLong_Check(one)) return Py_NewRef(one);
    if (one == Py_None) return PyLong_FromLong(0);
    if (!PyObject_CheckBuffer(one)) return PyObject_CallMethod(one, "data_ptr", NULL);
    if (PyObject_GetBuffer(one, &buffer, PyBUF_STRIDES) < 0) return NULL;
    PyObject *found = PyLong_FromVoidPtr(buffer.buf);
    PyBuffer_Release(&buffer);
    return found;
}
