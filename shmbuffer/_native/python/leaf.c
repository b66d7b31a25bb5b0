/* See leaf.h. */
#include "python/leaf.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "python/module.h"

struct array_object {
    PyObject_HEAD
    char *data;
    int rank;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};
#define ARRAY_C_CONTIGUOUS 1
#define LARGEST_EXACT ((int64_t)1 << 53) /* integers up to here are exact as float64 */

/* References that the process holds until its end. */
static struct {
    PyTypeObject *arrays, *tensors; /* exactly these classes; NULL: handled in Python */
    const struct dl_table *table;
    PyObject *is_negative;                           /* the interned name of a tensor's method */
    PyObject *dtypes[SHMB_NUMBER_KINDS];             /* of arrays */
    PyTypeObject *number_classes[SHMB_NUMBER_KINDS]; /* NumPy's scalar classes */
} classes;

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

/* Locates a contiguous tensor on the CPU whose bytes are its numbers. torch stores negation as a flag, which a view
 * of the imaginary parts of complex numbers can have. Such a view is contiguous only if it has one number. */
static bool locate_tensor(PyObject *leaf, struct dl_tensor *tensor) {
    if (classes.table->borrow(leaf, tensor) != 0) return PyErr_Clear(), false;
    if (tensor->device != DL_CPU || !lies_in_order(tensor)) return false;
    /* Its storage was freed, or never existed. */
    if (tensor->data == NULL && product(tensor->shape, tensor->rank) != 0) return false;
    if (tensor->dtype.code != DL_FLOAT || product(tensor->shape, tensor->rank) != 1) return true;
    PyObject *negative = PyObject_CallMethodObjArgs(leaf, classes.is_negative, NULL);
    bool plain = negative == Py_False;
    if (negative == NULL) PyErr_Clear();
    Py_XDECREF(negative);
    return plain;
}

/* Integers are converted to any float, and floats to shorter ones, unless they would become infinite. */
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

/* Converts in the same way as the Python code: a number takes the dtype of its leaf if that can hold it. */
static const unsigned char *find_number(const struct shmb_number *form, PyObject *leaf,
                                        uint64_t *buffer) {
    PyTypeObject *class = Py_TYPE(leaf);
    if (form->class == NULL || buffer == NULL) return NULL;
    if (class == form->class) return (const unsigned char *)leaf + form->at;
    bool stored = false;
    if (class == &PyFloat_Type || class == classes.number_classes[1]) {
        stored = store_float(form, PyFloat_AsDouble(leaf), buffer);
    } else if (leaf == Py_True || leaf == Py_False) {
        *buffer = leaf == Py_True;
        stored = form->kind == 'b' || store_integer(form, leaf == Py_True, buffer);
    } else if (class == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(leaf, &overflow);
        stored = !overflow && store_integer(form, number, buffer);
    }
    return stored ? (const unsigned char *)buffer : NULL;
}

bool shmb_locate_leaf(const struct shmb_form *form, PyObject *leaf, uint64_t *buffer,
                       struct shmb_leaf_data *out) {
    if (Py_TYPE(leaf) == classes.arrays) {
        const struct array_object *array = (const struct array_object *)leaf;
        *out = (struct shmb_leaf_data){(const unsigned char *)array->data, (const int64_t *)array->shape, array->rank};
        return array->dtype == form->array_dtype && (array->flags & ARRAY_C_CONTIGUOUS);
    }
    if (Py_TYPE(leaf) == classes.tensors) {
        struct dl_tensor tensor;
        if (!locate_tensor(leaf, &tensor)) return false;
        *out = (struct shmb_leaf_data){(const unsigned char *)tensor.data + tensor.byte_offset, tensor.shape, tensor.rank};
        return form->dtype.bits && memcmp(&tensor.dtype, &form->dtype, sizeof form->dtype) == 0;
    }
    *out = (struct shmb_leaf_data){find_number(&form->number, leaf, buffer), NULL, 0};
    return out->data != NULL;
}

/* A single priority. */
static bool read_priority(PyObject *object, double *out) {
    PyTypeObject *class = Py_TYPE(object);
    if (class != &PyFloat_Type && class != &PyLong_Type && class != classes.number_classes[0] && class != classes.number_classes[1])
        return false;
    *out = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) return PyErr_Clear(), false;
    if (class == &PyFloat_Type) *out = (double)(float)*out; /* as in a tensor made of it */
    return true;
}

static enum shmb_number_kind number_kind_of(const struct dl_dtype *dtype) {
    if (dtype->lanes != 1 || (dtype->bits != 32 && dtype->bits != 64)) return SHMB_NUMBER_KINDS;
    if (dtype->code == DL_FLOAT) return dtype->bits == 32 ? SHMB_SINGLE : SHMB_DOUBLE;
    return dtype->code == DL_INT && dtype->bits == 64 ? SHMB_INTEGER : SHMB_NUMBER_KINDS;
}

static enum shmb_number_kind number_kind_in(const PyObject *dtype) {
    enum shmb_number_kind kind = 0;
    while (kind < SHMB_NUMBER_KINDS && dtype != classes.dtypes[kind]) kind++;
    return kind;
}

bool shmb_locate_numbers(PyObject *object, struct shmb_numbers *out) {
    struct dl_tensor tensor;
    if (Py_TYPE(object) == classes.arrays) {
        const struct array_object *array = (const struct array_object *)object;
        *out = (struct shmb_numbers){(const unsigned char *)array->data, (uint64_t)product((const int64_t *)array->shape, array->rank),
                                     array->rank, number_kind_in(array->dtype)};
        return out->kind != SHMB_NUMBER_KINDS && (array->flags & ARRAY_C_CONTIGUOUS);
    }
    if (Py_TYPE(object) != classes.tensors || !locate_tensor(object, &tensor)) return false;
    *out = (struct shmb_numbers){(const unsigned char *)tensor.data + tensor.byte_offset,
                                 (uint64_t)product(tensor.shape, tensor.rank), tensor.rank, number_kind_of(&tensor.dtype)};
    return out->kind != SHMB_NUMBER_KINDS;
}

double *shmb_convert_to_double(const struct shmb_numbers *numbers, double *buffer, uint64_t buffer_count) {
    double *out = numbers->count <= buffer_count ? buffer : malloc(numbers->count * sizeof *out);
    if (out == NULL) return NULL;
    if (numbers->kind == SHMB_DOUBLE) return memcpy(out, numbers->data, numbers->count * sizeof *out);
    for (uint64_t i = 0; i < numbers->count; i++) {
        float real;
        memcpy(&real, numbers->data + i * sizeof real, sizeof real);
        out[i] = (double)real;
    }
    return out;
}

double *shmb_read_priorities(PyObject *object, const struct shmb_form *form, const unsigned char *data, uint64_t count, double *buffer,
                             uint64_t buffer_count) {
    struct shmb_numbers numbers;
    if (form != NULL) { /* the stored leaf, which was validated, instead of the argument */
        numbers.kind = form->array_dtype != NULL ? number_kind_in(form->array_dtype) : number_kind_of(&form->dtype);
        numbers.data = data;
        numbers.count = count * (uint64_t)product(form->shape, form->rank);
    } else if (!shmb_locate_numbers(object, &numbers)) {
        return count == 1 && read_priority(object, buffer) ? buffer : NULL;
    }
    if (numbers.kind > SHMB_DOUBLE || numbers.count != count) return NULL;
    return shmb_convert_to_double(&numbers, buffer, buffer_count);
}

/* True if NumPy's struct has the expected layout, according to the buffer protocol of an example. */
static bool has_known_layout(PyObject *example, PyObject *dtype) {
    const struct array_object *array = (const struct array_object *)example;
    PyObject *transposed = PyObject_GetAttrString(example, "T");
    Py_buffer view;
    bool known = transposed != NULL && PyObject_GetBuffer(example, &view, PyBUF_STRIDES) == 0;
    if (known) {
        known = view.ndim == 2 && view.buf == array->data && array->rank == 2 && array->dtype == dtype &&
                memcmp(view.shape, array->shape, 2 * sizeof *view.shape) == 0 &&
                memcmp(view.strides, array->strides, 2 * sizeof *view.strides) == 0 &&
                (array->flags & ARRAY_C_CONTIGUOUS) &&
                !(((const struct array_object *)transposed)->flags & ARRAY_C_CONTIGUOUS);
        PyBuffer_Release(&view);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    Py_XDECREF(transposed);
    return known;
}

/* NumPy's scalars contain their bytes. The buffer protocol tells at which offset. */
static void find_number_layout(struct shmb_number *form, PyObject *example) {
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

bool shmb_parse_form(struct shmb_form *form, PyObject *description) {
    PyObject *shape, *array, *number, *tensor;
    if (!PyTuple_Check(description)) return PyErr_Format(PyExc_TypeError, "Intake: the form of a leaf must be a tuple, but it is %R.", description), false;
    if (!PyArg_ParseTuple(description, "O!OOO:Intake", &PyTuple_Type, &shape, &array, &number, &tensor)) return false;
    Py_ssize_t rank = PyTuple_Size(shape);
    if (rank > SHMB_MAX_DIMS) return PyErr_Format(PyExc_ValueError, "Intake: a leaf has %zd dimensions, but at most %d are supported.", rank, SHMB_MAX_DIMS), false;
    form->rank = (int)rank;
    for (Py_ssize_t i = 0; i < rank; i++) form->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred()) return false;
    if (Py_TYPE(array) == classes.arrays) form->array_dtype = Py_NewRef(((const struct array_object *)array)->dtype);
    if (number != Py_None) find_number_layout(&form->number, number);
    struct dl_tensor example;
    if (Py_TYPE(tensor) != classes.tensors) return true;
    if (classes.table->borrow(tensor, &example) != 0) PyErr_Clear();
    /* complex tensors can have a flag, see locate_tensor */
    else if (example.dtype.code != DL_COMPLEX) form->dtype = example.dtype;
    return true;
}

void shmb_release_form(struct shmb_form *form) {
    Py_XDECREF(form->array_dtype);
    Py_XDECREF((PyObject *)form->number.class);
}

const struct dl_table *shmb_find_dl_table(PyTypeObject *kind) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)kind, DL_ATTRIBUTE);
    const struct dl_table *table = capsule ? PyCapsule_GetPointer(capsule, DL_CAPSULE) : NULL;
    Py_XDECREF(capsule);
    if (PyErr_Occurred()) PyErr_Clear();
    while (table != NULL && table->version.major != DL_MAJOR) table = table->before;
    return table != NULL && table->borrow != NULL ? table : NULL;
}

const struct dl_table *shmb_tensor_table(void) { return classes.table; }

PyObject *shmb_core_register_tensors(PyObject *Py_UNUSED(module), PyObject *kind) {
    const struct dl_table *table = PyType_Check(kind) ? shmb_find_dl_table((PyTypeObject *)kind) : NULL;
    if (table == NULL) return PyErr_Format(PyExc_TypeError, "register_tensors(): %R is not a tensor class with " DL_ATTRIBUTE ". Pass one, such as torch.Tensor.", kind);
    if (classes.is_negative == NULL && (classes.is_negative = PyUnicode_InternFromString("is_neg")) == NULL) return NULL;
    classes.tensors = (PyTypeObject *)Py_NewRef(kind);
    classes.table = table;
    Py_RETURN_NONE;
}

PyObject *shmb_core_register_arrays(PyObject *Py_UNUSED(module), PyObject *examples) {
    PyObject *example[SHMB_NUMBER_KINDS];
    if (!PyArg_ParseTuple(examples, "OOO:register_arrays", &example[0], &example[1], &example[2])) return NULL;
    for (int kind = 0; kind < SHMB_NUMBER_KINDS; kind++) {
        PyObject *dtype = PyObject_GetAttrString(example[kind], "dtype");
        PyObject *class = dtype == NULL ? NULL : PyObject_GetAttrString(dtype, "type");
        if (class == NULL) return Py_XDECREF(dtype), NULL;
        if (has_known_layout(example[kind], dtype)) classes.arrays = Py_TYPE(example[kind]);
        classes.dtypes[kind] = dtype, classes.number_classes[kind] = (PyTypeObject *)class;
    }
    Py_XINCREF((PyObject *)classes.arrays);
    Py_RETURN_NONE;
}
