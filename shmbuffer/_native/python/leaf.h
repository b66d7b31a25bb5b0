/* Where the bytes of a leaf lie, whether it is an array, a tensor or, in a single item, a number.
 *
 *   arrays    numpy's own struct, whose layout is part of numpy's ABI (PyArrayObject_fields in ndarraytypes.h)
 *   numbers   numpy's scalars, which hold their bytes like arrays, and Python's, which are converted as Python does it
 *   tensors   by the functions that their class offers (dlpack.h)
 *
 * None of them needs a call of Python. An example is compared with what the buffer protocol says of it before numpy's layout is
 * relied on. */
#ifndef SHMB_LEAF_H
#define SHMB_LEAF_H

#include <stdbool.h>

#include "python/dlpack.h"
#include "python/module.h"

#define SHMB_MOST_DIMS 32

/* What numbers a leaf takes. */
struct shmb_number {
    PyTypeObject *class; /* numpy's, of the leaf's dtype; NULL: numbers are left to Python */
    Py_ssize_t at;       /* of the bytes in such an object */
    char kind;           /* b, i, u or f: Python's numbers are taken too */
    uint8_t size;
};

/* What a leaf has to be. */
struct shmb_form {
    PyObject *array_dtype; /* the one object that stands for it; NULL: arrays are left to Python */
    struct shmb_number number;
    struct dl_dtype dtype; /* of a tensor; no bits: tensors are left to Python */
    int rank;              /* of an item */
    int64_t shape[SHMB_MOST_DIMS];
};

/* Where the bytes of a leaf are, and how many dimensions it has. */
struct shmb_leaf_data {
    const unsigned char *data;
    const int64_t *shape;
    int rank;
};

/* Numbers in a row. */
enum shmb_number_kind { SHMB_SINGLE, SHMB_DOUBLE, SHMB_INTEGER, SHMB_NUMBER_KINDS };
struct shmb_numbers {
    const unsigned char *data;
    uint64_t count;
    int rank;
    enum shmb_number_kind kind; /* float32, float64, int64 */
};

/* Classes that are looked at here; before Python has said them all leaves are left to it. (float32, float64, int64): an example
 * array of each. Answer None. */
PyObject *shmb_core_know_arrays(PyObject *module, PyObject *examples);
PyObject *shmb_core_know_tensors(PyObject *module, PyObject *kind);
const struct dl_table *shmb_tensors(void); /* NULL: there are none */

/* From (shape, example array or None, example number or None, example tensor or None). */
bool shmb_form_of(struct shmb_form *form, PyObject *said);
void shmb_form_forget(struct shmb_form *form);

/* `room`: where a number of Python's goes; NULL: numbers are left to Python. */
bool shmb_locate_leaf(const struct shmb_form *form, PyObject *leaf, uint64_t *room, struct shmb_leaf_data *out);
bool shmb_locate_numbers(PyObject *given, struct shmb_numbers *out);
/* Reals as float64: in `room` if they fit there, else in memory that the caller frees. NULL: out of memory. */
double *shmb_widened(const struct shmb_numbers *numbers, double *room, uint64_t room_count);
/* Priorities as float64[count], into `room` where there are as many as one. NULL: not as they have to be. `form` and `data`: of a
 * leaf that they are; NULL: of an entry that is no leaf. */
double *shmb_read_priorities(PyObject *given, const struct shmb_form *form, const unsigned char *data, uint64_t count, double *room,
                             uint64_t room_count);

#endif
