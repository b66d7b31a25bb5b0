/* The part of DLPack 1 that it takes to read a tensor where it is and to hand one out: its C exchange API, a table of
 * functions that a class of tensors offers (github.com/dmlc/dlpack, include/dlpack/dlpack.h). The
 * layouts are DLPack's own, fixed for a major version. */
#ifndef SHMB_DLPACK_H
#define SHMB_DLPACK_H

#include <stdint.h>

#define DL_ATTRIBUTE "__dlpack_c_exchange_api__" /* of the class: a capsule */
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
    int64_t *shape, *strides; /* no strides: contiguous */
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
    struct dl_table *before; /* of an older major version */
    int (*allocate)(struct dl_tensor *like, struct dl_managed **out, void *context,
                    void (*refuse)(void *context, const char *kind, const char *message));
    int (*share)(void *object, struct dl_managed **out);
    int (*wrap)(struct dl_managed *tensor, void **object); /* takes the tensor over */
    int (*look)(void *object, struct dl_tensor *out);      /* borrows; may be NULL */
    int (*stream)(int32_t device, int32_t number, void **out);
};

/* Of a class of tensors; NULL: it has none that we know. Needs Python.h before this. */
#ifdef Py_PYTHON_H
const struct dl_table *shmb_dl_table(PyTypeObject *kind);
#endif

#endif
