/* The part of DLPack 1 that is needed to read a tensor in place and to return one. It is the C exchange API, a table
 * of functions that a tensor class offers (github.com/dmlc/dlpack, include/dlpack/dlpack.h). The layouts are those
 * of DLPack, fixed for a major version. */
#ifndef SHMB_DLPACK_H
#define SHMB_DLPACK_H

#include <stdint.h>

#define DL_ATTRIBUTE "__dlpack_c_exchange_api__" /* attribute of the class; a capsule */
#define DL_CAPSULE "dlpack_exchange_api"
#define DL_MAJOR 1u

enum dl_device { DL_CPU = 1 };
enum dl_code { DL_INT = 0, DL_FLOAT = 2, DL_COMPLEX = 5 };

struct dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
};

struct dl_tensor {
    void *data;
    int32_t device, device_number;
    int32_t rank;
    struct dl_dtype dtype;
    int64_t *shape, *strides; /* strides NULL: contiguous */
    uint64_t byte_offset;
};

struct dl_version {
    uint32_t major, minor;
};

struct dl_managed {
    struct dl_version version;
    void *context;
    void (*release)(struct dl_managed *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

struct dl_table {
    struct dl_version version;
    struct dl_table *before; /* table of an older major version */
    int (*allocate)(struct dl_tensor *like, struct dl_managed **out, void *context,
                    void (*refuse)(void *context, const char *kind, const char *message));
    int (*share)(void *object, struct dl_managed **out);
    int (*wrap)(struct dl_managed *tensor, void **object); /* takes ownership of the tensor */
    int (*borrow)(void *object, struct dl_tensor *out);      /* borrows; may be NULL */
    int (*stream)(int32_t device, int32_t number, void **out);
};

/* The table of a tensor class; NULL: none of a known version. Include Python.h first. */
#ifdef Py_PYTHON_H
const struct dl_table *shmb_find_dl_table(PyTypeObject *kind);
#endif

#endif
