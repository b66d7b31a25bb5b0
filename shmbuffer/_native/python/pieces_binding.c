/* Pieces of records for Python: laid out, arranged for zstd, and exposed as buffers. Arrays are addresses of int64. */
#include "python/module.h"

#include <string.h>

#include "tables/frames.h"
#include "tables/locating.h"

#define AT(type, address) ((type *)(uintptr_t)(address))

/* locate_pieces(data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded) ->
 * whether the dims of all records are equal; None: a record does not fit, see locating.h */
PyObject *shmb_core_locate_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKK:locate_pieces", &data, &nbytes, &starts, &sizes, &count, &steps, &code, &code_bytes, &numbers,
                          &offsets, &stored, &expanded))
        return NULL;
    const struct shmb_records_read read = {AT(const unsigned char, data), nbytes, AT(const int64_t, starts), AT(const int64_t, sizes), count};
    bool same_dims, right = shmb_locate_pieces(&read, AT(const int64_t, steps), AT(const unsigned char, code), code_bytes, AT(int64_t, numbers),
                                           AT(int64_t, offsets), AT(int64_t, stored), AT(int64_t, expanded), &same_dims);
    return right ? PyBool_FromLong(same_dims) : Py_NewRef(Py_None);
}

/* measure_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, stored) -> bytes; -1:
 * impossible */
PyObject *shmb_core_measure_records(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, stored;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKK:measure_records", &steps, &code, &code_bytes, &numbers, &sizes, &count, &offsets, &starts, &ends,
                          &stored))
        return NULL;
    const struct shmb_records_written written = {AT(const int64_t, steps), AT(const unsigned char, code), code_bytes,
                                                 AT(const int64_t, numbers), AT(const int64_t, sizes), count};
    return PyLong_FromLongLong(shmb_measure_records(&written, AT(int64_t, offsets), AT(int64_t, starts), AT(int64_t, ends), AT(int64_t, stored)));
}

/* lay_out_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, outside, addresses, data) */
PyObject *shmb_core_lay_out_records(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, outside, addresses, data;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKK:lay_out_records", &steps, &code, &code_bytes, &numbers, &sizes, &count, &offsets, &starts,
                          &ends, &outside, &addresses, &data))
        return NULL;
    const struct shmb_records_written written = {AT(const int64_t, steps), AT(const unsigned char, code), code_bytes,
                                                 AT(const int64_t, numbers), AT(const int64_t, sizes), count};
    Py_BEGIN_ALLOW_THREADS
    shmb_lay_out_records(&written, AT(const int64_t, addresses), AT(const int64_t, offsets), AT(const int64_t, starts),
                         AT(const int64_t, ends), AT(const unsigned char, outside), AT(unsigned char, data));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Address of a piece, and its size in bytes. The size is -1 for a tensor, whose dims determine it. */
static bool piece_at(PyObject *piece, int64_t *at, int64_t *nbytes) {
    Py_buffer buffer;
    *nbytes = -1;
    if (PyObject_CheckBuffer(piece)) {
        if (PyObject_GetBuffer(piece, &buffer, PyBUF_SIMPLE) < 0) return false;
        *at = (int64_t)(uintptr_t)buffer.buf;
        *nbytes = (int64_t)buffer.len;
        PyBuffer_Release(&buffer);
        return true;
    }
    PyObject *result = PyObject_CallMethod(piece, "data_ptr", NULL);
    *at = result ? (int64_t)PyLong_AsUnsignedLongLong(result) : 0;
    Py_XDECREF(result);
    return !PyErr_Occurred();
}

/* record(steps, code, dims, pieces) -> (its bytes, its size); None: the record is impossible */
PyObject *shmb_core_build_record(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address;
    PyObject *code, *dims, *pieces, *record = NULL;
    if (!PyArg_ParseTuple(args, "KO!O!O!:record", &address, &PyBytes_Type, &code, &PyList_Type, &dims, &PyList_Type, &pieces)) return NULL;
    const int64_t *steps = AT(const int64_t, address);
    const uint64_t n_numbers = shmb_numbers_of_form(steps), n_pieces = shmb_pieces_of_form(steps);
    const uint64_t code_bytes = (uint64_t)PyBytes_Size(code), n_dims = (uint64_t)PyList_Size(dims);
    if ((uint64_t)PyList_Size(pieces) != n_pieces || n_dims > n_numbers) return Py_NewRef(Py_None);
    int64_t *numbers = PyMem_Calloc(2 * n_numbers + 5 * n_pieces + 1, sizeof *numbers);
    if (numbers == NULL) return PyErr_NoMemory();
    int64_t *dim_values = numbers + n_numbers, *sizes = dim_values + n_numbers, *offsets = sizes + n_pieces, *stored = offsets + n_pieces,
            *from = stored + n_pieces;
    const unsigned char *none = AT(const unsigned char, (uintptr_t)(from + n_pieces)); /* a zero for each piece */
    bool known = true;
    for (uint64_t i = 0; known && i < n_dims; i++) {
        dim_values[i] = PyLong_AsLongLong(PyList_GetItem(dims, (Py_ssize_t)i));
        known = dim_values[i] >= 0 || !PyErr_Occurred();
    }
    for (uint64_t p = 0; known && p < n_pieces; p++) known = piece_at(PyList_GetItem(pieces, (Py_ssize_t)p), &from[p], &sizes[p]);
    if (!known) goto done;
    const int64_t start = 0, end = (int64_t)shmb_measure_record(steps, code_bytes, dim_values, n_dims, numbers, sizes, offsets, stored);
    bool possible = end > 0;
    for (uint64_t p = 0; possible && p < n_pieces; p++) possible = from[p] || sizes[p] == 0;
    if (!possible) {
        record = Py_NewRef(Py_None);
        goto done;
    }
    PyObject *data = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)((end + 7) & ~(int64_t)7));
    if (data == NULL) goto done;
    const struct shmb_records_written written = {steps, AT(const unsigned char, PyBytes_AsString(code)), code_bytes, numbers, sizes, 1};
    shmb_lay_out_records(&written, from, offsets, &start, &end, none, AT(unsigned char, PyByteArray_AsString(data)));
    record = Py_BuildValue("NL", data, (long long)end);
done:
    PyMem_Free(numbers);
    return record;
}

/* take_apart(base, held, pieces, numbers, width, offsets, stored, expanded, count, to, of_each, out, room, frames,
 * parts) -> numbers of frames and parts: see frames.h */
PyObject *shmb_core_distribute_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long base, storage, pieces, numbers, width, offsets, stored, expanded, count, to, of_each, out, space, frames, parts;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKKKKK:take_apart", &base, &storage, &pieces, &numbers, &width, &offsets, &stored, &expanded, &count,
                          &to, &of_each, &out, &space, &frames, &parts))
        return NULL;
    const struct shmb_leaves leaves = {(int64_t)base, AT(const struct shmb_piece_storage, storage), pieces, AT(const int64_t, numbers), width,
                                       AT(const int64_t, offsets), AT(const int64_t, stored), AT(const int64_t, expanded), count};
    uint64_t n_frames = frames, n_parts = parts;
    Py_BEGIN_ALLOW_THREADS
    shmb_distribute_pieces(&leaves, AT(const int64_t, to), of_each != 0, AT(int64_t, out), space, &n_frames, &n_parts);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KK", (unsigned long long)n_frames, (unsigned long long)n_parts);
}

/* runs(whole, frames, frame, before, nbytes, to, planes, parts, most, woven, at, out) -> count: see frames.h */
PyObject *shmb_core_group_frames(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long whole, frames, frame, before, nbytes, to, planes, parts, max_bytes, interleaved, at, out;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKK:runs", &whole, &frames, &frame, &before, &nbytes, &to, &planes, &parts, &max_bytes, &interleaved, &at, &out))
        return NULL;
    const struct shmb_places places = {AT(const int64_t, whole), frames, AT(const int64_t, frame), AT(const int64_t, before),
                                       AT(const int64_t, nbytes), AT(const int64_t, to), AT(const int64_t, planes), parts};
    return PyLong_FromUnsignedLongLong(shmb_group_frames(&places, (int64_t)max_bytes, (int64_t)interleaved, AT(int64_t, at), AT(struct shmb_frame_run, out)));
}

/* unweave(into, other, half, frames): see frames.h */
PyObject *shmb_core_deinterleave(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long into, other, half, frames;
    if (!PyArg_ParseTuple(args, "KKKK:unweave", &into, &other, &half, &frames)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    shmb_deinterleave(AT(unsigned char, into), AT(unsigned char, other), half, frames);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* frames_say(at, stored, count, whole, dictionary) -> whether the frames' headers have these expanded sizes */
PyObject *shmb_core_check_frames(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long at, stored, count, whole, dictionary;
    if (!PyArg_ParseTuple(args, "KKKKK:frames_say", &at, &stored, &count, &whole, &dictionary)) return NULL;
    bool agrees = true;
    for (unsigned long long i = 0; agrees && i < count; i++)
        agrees = shmb_check_frame(AT(const unsigned char, AT(const uint64_t, at)[i]), AT(const uint64_t, stored)[i], AT(const uint64_t, whole)[i],
                                 (uint32_t)dictionary);
    return PyBool_FromLong(agrees);
}

/* bytes_of(at, sizes, first, end, step) -> the concatenation of some pieces */
PyObject *shmb_core_join_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long at, sizes, first, end, step;
    if (!PyArg_ParseTuple(args, "KKKKK:bytes_of", &at, &sizes, &first, &end, &step)) return NULL;
    int64_t total = 0;
    for (unsigned long long i = first; i < end; i += step) total += AT(const int64_t, sizes)[i];
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    char *to = result ? PyBytes_AsString(result) : NULL;
    for (unsigned long long i = first; result && i < end; i += step) {
        const size_t nbytes = (size_t)AT(const int64_t, sizes)[i];
        if (nbytes) memcpy(to, AT(const char, AT(const int64_t, at)[i]), nbytes);
        to += nbytes;
    }
    return result;
}

/* views(addresses, sizes, count) -> read-only memoryviews */
PyObject *shmb_core_make_views(PyObject *Py_UNUSED(module), PyObject *args) {
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

/* bytes_at(result, addresses, sizes): stores address and size of each buffer in a sequence, valid while the sequence
 * exists */
PyObject *shmb_core_locate_buffers(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *buffers;
    unsigned long long addresses, sizes;
    if (!PyArg_ParseTuple(args, "OKK:bytes_at", &buffers, &addresses, &sizes)) return NULL;
    Py_ssize_t count = PySequence_Size(buffers);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer buffer;
        PyObject *one = PySequence_GetItem(buffers, i);
        if (one == NULL || PyObject_GetBuffer(one, &buffer, PyBUF_SIMPLE) < 0) return Py_XDECREF(one), NULL;
        AT(int64_t, addresses)[i] = (int64_t)(uintptr_t)buffer.buf;
        AT(int64_t, sizes)[i] = (int64_t)buffer.len;
        PyBuffer_Release(&buffer);
        Py_DECREF(one);
    }
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* address(one) -> the address of a buffer or a tensor, valid while it exists; a number is returned unchanged, and
 * None gives 0 */
PyObject *shmb_core_address(PyObject *Py_UNUSED(module), PyObject *one) {
    Py_buffer buffer;
    if (PyLong_Check(one)) return Py_NewRef(one);
    if (one == Py_None) return PyLong_FromLong(0);
    if (!PyObject_CheckBuffer(one)) return PyObject_CallMethod(one, "data_ptr", NULL);
    if (PyObject_GetBuffer(one, &buffer, PyBUF_STRIDES) < 0) return NULL;
    PyObject *result = PyLong_FromVoidPtr(buffer.buf);
    PyBuffer_Release(&buffer);
    return result;
}
