/* Locates the bytes of a leaf, which is an array, a tensor or, in a single item, a number.
 *
 *   arrays    NumPy's own struct, whose layout is part of NumPy's ABI (PyArrayObject_fields in ndarraytypes.h)
 *   numbers   NumPy's scalars, which contain their bytes, and Python's numbers, which are converted as Python does
 *   tensors   by functions that their class offers (dlpack.h)
 *
 * None of them needs a call of Python code. NumPy's layout is trusted only after an example has agreed with the
 * buffer protocol. */
#ifndef SHMB_LEAF_H
#define SHMB_LEAF_H

#include <stdbool.h>

#include "python/dlpack.h"
#include "python/module.h"

#define SHMB_MAX_DIMS 32

/* The numbers that a leaf accepts. */
struct shmb_number {
    /* NumPy's class for the dtype of the leaf; NULL: numbers are handled in Python */
    PyTypeObject *class;
    Py_ssize_t at;       /* offset of the bytes in such an object */
    char kind;           /* b, i, u or f: Python's numbers are accepted, too */
    uint8_t size;
};

/* The required form of a leaf. */
struct shmb_form {
    /* the dtype object, which is unique; NULL: arrays are handled in Python */
    PyObject *array_dtype;
    struct shmb_number number;
    struct dl_dtype dtype; /* dtype of tensors; bits 0: tensors are handled in Python */
    int rank;              /* of an item */
    int64_t shape[SHMB_MAX_DIMS];
};

/* Address of the bytes of a leaf, and its dimensions. */
struct shmb_leaf_data {
    const unsigned char *data;
    const int64_t *shape;
    int rank;
};

/* A contiguous array of numbers. */
enum shmb_number_kind { SHMB_SINGLE, SHMB_DOUBLE, SHMB_INTEGER, SHMB_NUMBER_KINDS };
struct shmb_numbers {
    const unsigned char *data;
    uint64_t count;
    int rank;
    enum shmb_number_kind kind; /* float32, float64, int64 */
};

/* Register the classes that are handled here. Until then all leaves are handled in Python. know_arrays takes example
 * arrays of float32, float64 and int64. They return None. */
PyObject *shmb_core_register_arrays(PyObject *module, PyObject *examples);
PyObject *shmb_core_register_tensors(PyObject *module, PyObject *kind);
const struct dl_table *shmb_tensor_table(void); /* NULL: none registered */

/* From (shape, example array or None, example number or None, example tensor or None). */
bool shmb_parse_form(struct shmb_form *form, PyObject *description);
void shmb_release_form(struct shmb_form *form);

/* `buffer` receives a converted Python number; NULL: numbers are handled in Python. */
bool shmb_locate_leaf(const struct shmb_form *form, PyObject *leaf, uint64_t *buffer, struct shmb_leaf_data *out);
bool shmb_locate_numbers(PyObject *object, struct shmb_numbers *out);
/* Reals as float64: in `buffer` if they fit, else in memory that the caller frees. NULL: out of memory. */
double *shmb_convert_to_double(const struct shmb_numbers *numbers, double *buffer, uint64_t buffer_count);
/* Priorities as float64[count], in `buffer` if they fit. NULL: they need conversion in Python. `form` and `data` are
 * those of the leaf that contains the priorities; NULL: they are an entry that is not a leaf. */
double *shmb_read_priorities(PyObject *object, const struct shmb_form *form, const unsigned char *data, uint64_t count, double *buffer,
                             uint64_t buffer_count);

#endif
