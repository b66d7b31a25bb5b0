/* See leaf.h. */
#include "leaf.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"

struct array_object {
    PyObject_HEAD
    char *data;
    int rank;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};
#define ARRAY_C_CONTIGUOUS 1
#define LARGEST_EXACT ((int64_t)1 << 53) /* integers up to here are doubles */

static int64_t product(const int64_t *shape, int rank) {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) count *= shape[i];
    return count;
}

static bool lies_in_order(const struct dl_tensor *tensor) {
    if (tensor->strides == NULL) return true;
    int64_t stride = 1;
    for (int i = tensor->rank - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride) return product(tensor->shape, tensor->rank) == 0;
        stride *= tensor->shape[i];
    }
    return true;
}

/* A tensor on the CPU, contiguous, whose bytes are its numbers: torch keeps "negative" as a flag, which a view of the
 * imaginary parts of complex numbers has; it is contiguous only where it holds one number. */
static bool look_at_tensor(const struct shmb_leaf_classes *classes, PyObject *leaf, struct dl_tensor *tensor) {
    if (classes->table->look(leaf, tensor) != 0) return PyErr_Clear(), false;
    if (tensor->device != DL_CPU || !lies_in_order(tensor)) return false;
    if (tensor->dtype.code != DL_FLOAT || product(tensor->shape, tensor->rank) != 1) return true;
    PyObject *negative = PyObject_CallMethodObjArgs(leaf, classes->is_negative, NULL);
    bool plain = negative == Py_False;
    if (negative == NULL) PyErr_Clear();
    Py_XDECREF(negative);
    return plain;
}

/* An integer becomes any float, and a float a shorter one, but not infinite. */
static bool store_float(const struct shmb_number *form, double number, void *out) {
    if (form->kind != 'f') return false;
    if (form->size == sizeof number) return memcpy(out, &number, sizeof number), true;
    if (fabs(number) > FLT_MAX && isfinite(number)) return false;
    float shorter = (float)number;
    memcpy(out, &shorter, sizeof shorter);
    return true;
}

static bool store_integer(const struct shmb_number *form, int64_t number, void *out) {
    unsigned bits = form->size * 8u;
    if (form->kind == 'f') return llabs(number) <= LARGEST_EXACT && store_float(form, (double)number, out);
    bool in_range = form->kind == 'i' ? bits == 64 || (number >> (bits - 1)) == (number < 0 ? -1 : 0)
                                      : form->kind == 'u' && number >= 0 && (bits == 64 || number >> bits == 0);
    if (in_range) memcpy(out, &number, form->size); /* little-endian */
    return in_range;
}

/* As the Python side does it where the data have to be converted: numbers take the dtype of their leaf if it can hold them. */
static const unsigned char *find_number(const struct shmb_leaf_classes *classes, const struct shmb_number *form, PyObject *leaf,
                                        uint64_t *room) {
    PyTypeObject *class = Py_TYPE(leaf);
    if (form->class == NULL || room == NULL) return NULL;
    if (class == form->class) return (const unsigned char *)leaf + form->at;
    bool stored = false;
    if (class == &PyFloat_Type || class == classes->real_numbers[1]) {
        stored = store_float(form, PyFloat_AsDouble(leaf), room);
    } else if (leaf == Py_True || leaf == Py_False) {
        *room = leaf == Py_True;
        stored = form->kind == 'b' || store_integer(form, leaf == Py_True, room);
    } else if (class == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(leaf, &overflow);
        stored = !overflow && store_integer(form, number, room);
    }
    return stored ? (const unsigned char *)room : NULL;
}

bool shmb_look_at_leaf(const struct shmb_leaf_classes *classes, const struct shmb_form *form, PyObject *leaf, uint64_t *room,
                       struct shmb_found *out) {
    if (Py_TYPE(leaf) == classes->arrays) {
        const struct array_object *array = (const struct array_object *)leaf;
        *out = (struct shmb_found){(const unsigned char *)array->data, (const int64_t *)array->shape, array->rank};
        return array->dtype == form->array_dtype && (array->flags & ARRAY_C_CONTIGUOUS);
    }
    if (Py_TYPE(leaf) == classes->tensors) {
        struct dl_tensor tensor;
        if (!look_at_tensor(classes, leaf, &tensor)) return false;
        *out = (struct shmb_found){(const unsigned char *)tensor.data + tensor.byte_offset, tensor.shape, tensor.rank};
        return form->dtype.bits && memcmp(&tensor.dtype, &form->dtype, sizeof form->dtype) == 0;
    }
    *out = (struct shmb_found){find_number(classes, &form->number, leaf, room), NULL, 0};
    return out->data != NULL;
}

/* A number as the one priority. */
static bool read_priority(const struct shmb_leaf_classes *classes, PyObject *given, double *out) {
    PyTypeObject *class = Py_TYPE(given);
    if (class != &PyFloat_Type && class != &PyLong_Type && class != classes->real_numbers[0] && class != classes->real_numbers[1])
        return false;
    *out = PyFloat_AsDouble(given);
    if (PyErr_Occurred()) return PyErr_Clear(), false;
    if (class == &PyFloat_Type) *out = (double)(float)*out; /* as a tensor of it has */
    return true;
}

/* Bits of the real numbers of a leaf; 0: it has others. */
static int real_bits_of(const struct shmb_leaf_classes *classes, const struct shmb_form *form) {
    if (form->array_dtype != NULL) return form->array_dtype == classes->reals[0] ? 32 : form->array_dtype == classes->reals[1] ? 64 : 0;
    return form->dtype.code == DL_FLOAT && form->dtype.lanes == 1 ? form->dtype.bits : 0;
}

double *shmb_read_priorities(const struct shmb_leaf_classes *classes, PyObject *given, const struct shmb_form *form,
                             const unsigned char *data, uint64_t count, double *room, uint64_t room_count) {
    const unsigned char *from;
    bool wide;
    int64_t size;
    if (form != NULL) { /* what is stored, and not what was given: it has been looked at */
        int bits = real_bits_of(classes, form);
        wide = bits == 64;
        if (!wide && bits != 32) return NULL;
        from = data;
        size = (int64_t)count * product(form->shape, form->rank);
    } else if (Py_TYPE(given) == classes->arrays) {
        const struct array_object *array = (const struct array_object *)given;
        wide = array->dtype == classes->reals[1];
        if (!wide && array->dtype != classes->reals[0]) return NULL;
        if (!(array->flags & ARRAY_C_CONTIGUOUS)) return NULL;
        from = (const unsigned char *)array->data;
        size = product((const int64_t *)array->shape, array->rank);
    } else if (Py_TYPE(given) == classes->tensors) {
        struct dl_tensor tensor;
        if (!look_at_tensor(classes, given, &tensor)) return NULL;
        wide = tensor.dtype.bits == 64;
        if (tensor.dtype.code != DL_FLOAT || tensor.dtype.lanes != 1 || (!wide && tensor.dtype.bits != 32)) return NULL;
        from = (const unsigned char *)tensor.data + tensor.byte_offset;
        size = product(tensor.shape, tensor.rank);
    } else {
        return count == 1 && read_priority(classes, given, room) ? room : NULL;
    }
    if ((uint64_t)size != count) return NULL;
    double *out = count <= room_count ? room : malloc(count * sizeof *out);
    if (out == NULL) return NULL;
    if (wide) return memcpy(out, from, count * sizeof *out);
    for (uint64_t i = 0; i < count; i++) {
        float real;
        memcpy(&real, from + i * sizeof real, sizeof real);
        out[i] = (double)real;
    }
    return out;
}

/* Whether numpy's struct is the one that we know: the buffer protocol has to say the same of an example. */
static bool is_as_known(PyObject *example, PyObject *dtype) {
    const struct array_object *array = (const struct array_object *)example;
    PyObject *turned = PyObject_GetAttrString(example, "T");
    Py_buffer view;
    bool known = turned != NULL && PyObject_GetBuffer(example, &view, PyBUF_STRIDES) == 0;
    if (known) {
        known = view.ndim == 2 && view.buf == array->data && array->rank == 2 && array->dtype == dtype &&
                memcmp(view.shape, array->shape, 2 * sizeof *view.shape) == 0 &&
                memcmp(view.strides, array->strides, 2 * sizeof *view.strides) == 0 &&
                (array->flags & ARRAY_C_CONTIGUOUS) &&
                !(((const struct array_object *)turned)->flags & ARRAY_C_CONTIGUOUS);
        PyBuffer_Release(&view);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(turned);
    return known;
}

/* The bytes of numpy's scalars lie in their objects; where, the buffer protocol says. */
static void find_in_number(struct shmb_number *form, PyObject *example) {
    Py_buffer view;
    if (PyObject_GetBuffer(example, &view, PyBUF_FORMAT) != 0) return PyErr_Clear();
    char code = view.format && view.format[0] && !view.format[1] ? view.format[0] : 0;
    Py_ssize_t at = (const char *)view.buf - (const char *)example;
    bool inside = at >= (Py_ssize_t)sizeof(PyObject) && at <= (Py_ssize_t)(sizeof(PyObject) + sizeof(uint64_t));
    if (code != 0 && inside && view.len > 0 && view.len <= (Py_ssize_t)sizeof(uint64_t)) {
        char kind = code == '?' ? 'b' : strchr("bhilq", code) ? 'i' : strchr("BHILQ", code) ? 'u' : strchr("fd", code) ? 'f' : 0;
        *form = (struct shmb_number){(PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(example)), at, kind, (uint8_t)view.len};
    }
    PyBuffer_Release(&view);
}

bool shmb_form_of(struct shmb_form *form, PyObject *said, struct shmb_leaf_classes *classes) {
    PyObject *shape, *array, *number, *tensor;
    if (!PyTuple_Check(said)) return PyErr_Format(PyExc_TypeError, "Intake: %R should be a tuple", said), false;
    if (!PyArg_ParseTuple(said, "O!OOO:Intake", &PyTuple_Type, &shape, &array, &number, &tensor)) return false;
    Py_ssize_t rank = PyTuple_Size(shape);
    if (rank > SHMB_MOST_DIMS) return PyErr_Format(PyExc_ValueError, "Intake: a leaf of %zd dimensions", rank), false;
    form->rank = (int)rank;
    for (Py_ssize_t i = 0; i < rank; i++) form->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred()) return false;
    if (array != Py_None) {
        PyObject *dtype = PyObject_GetAttrString(array, "dtype");
        if (dtype == NULL) return false;
        if (is_as_known(array, dtype)) form->array_dtype = Py_NewRef(dtype);
        if (form->array_dtype != NULL && classes->arrays == NULL)
            classes->arrays = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(array));
        Py_DECREF(dtype);
    }
    if (number != Py_None) find_in_number(&form->number, number);
    struct dl_tensor example;
    if (tensor == Py_None || Py_TYPE(tensor) != classes->tensors) return true;
    if (classes->table->look(tensor, &example) != 0) PyErr_Clear();
    else if (example.dtype.code != DL_COMPLEX) form->dtype = example.dtype; /* complex ones have a flag, see look_at_tensor */
    return true;
}

void shmb_form_forget(struct shmb_form *form) {
    Py_XDECREF(form->array_dtype);
    Py_XDECREF((PyObject *)form->number.class);
}

const struct dl_table *shmb_dl_table(PyTypeObject *kind) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)kind, DL_ATTRIBUTE);
    const struct dl_table *table = capsule ? PyCapsule_GetPointer(capsule, DL_CAPSULE) : NULL;
    Py_XDECREF(capsule);
    if (PyErr_Occurred()) PyErr_Clear();
    while (table != NULL && table->version.major != DL_MAJOR) table = table->before;
    return table != NULL && table->look != NULL ? table : NULL;
}

bool shmb_leaf_classes_of(struct shmb_leaf_classes *classes, PyTypeObject *tensors, PyObject *single, PyObject *wide) {
    PyObject *reals[2] = {single, wide};
    if (tensors != NULL) {
        classes->tensors = (PyTypeObject *)Py_NewRef((PyObject *)tensors);
        classes->table = shmb_dl_table(tensors);
    }
    for (int i = 0; i < 2; i++) {
        classes->reals[i] = Py_NewRef(reals[i]);
        PyObject *class = PyObject_GetAttrString(reals[i], "type");
        if (class == NULL) PyErr_Clear();
        classes->real_numbers[i] = (PyTypeObject *)class;
    }
    classes->is_negative = PyUnicode_InternFromString("is_neg");
    return classes->is_negative != NULL;
}

void shmb_leaf_classes_forget(struct shmb_leaf_classes *classes) {
    Py_XDECREF((PyObject *)classes->arrays);
    Py_XDECREF((PyObject *)classes->tensors);
    Py_XDECREF(classes->is_negative);
    for (int i = 0; i < 2; i++) {
        Py_XDECREF(classes->reals[i]);
        Py_XDECREF((PyObject *)classes->real_numbers[i]);
    }
}
