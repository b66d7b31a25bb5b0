/* Shared parts of the Python binding. It uses only the stable ABI (PEP 384, CPython 3.11). */
#ifndef SHMB_MODULE_H
#define SHMB_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

struct shmb_ring;

extern PyType_Spec shmb_map_spec, shmb_ring_spec, shmb_intake_spec, shmb_outtake_spec, shmb_descriptor_spec, shmb_follower_spec,
    shmb_trajectories_spec, shmb_labels_spec, shmb_windows_spec;
extern PyTypeObject *shmb_map_type, *shmb_ring_type;

void *shmb_map_address(PyObject *map);
Py_ssize_t shmb_map_bytes(PyObject *map);
int shmb_map_is_twice(PyObject *map);

/* Closes the parent's locks in the child of a fork. */
void shmb_close_parent_descriptors(void);

/* weights_binding.c */
PyObject *shmb_core_publish(PyObject *module, PyObject *args);
PyObject *shmb_core_read_newest(PyObject *module, PyObject *args);

/* pieces_binding.c */
PyObject *shmb_core_measure_records(PyObject *module, PyObject *args);
PyObject *shmb_core_lay_out_records(PyObject *module, PyObject *args);
PyObject *shmb_core_build_record(PyObject *module, PyObject *args);
PyObject *shmb_core_locate_pieces(PyObject *module, PyObject *args);
PyObject *shmb_core_distribute_pieces(PyObject *module, PyObject *args);
PyObject *shmb_core_group_frames(PyObject *module, PyObject *args);
PyObject *shmb_core_deinterleave(PyObject *module, PyObject *args);
PyObject *shmb_core_check_frames(PyObject *module, PyObject *args);
PyObject *shmb_core_join_pieces(PyObject *module, PyObject *args);
PyObject *shmb_core_make_views(PyObject *module, PyObject *args);
PyObject *shmb_core_locate_buffers(PyObject *module, PyObject *args);
PyObject *shmb_core_address(PyObject *module, PyObject *one);

struct shmb_windows;

/* NULL: the object is not a Windows, and the exception is set. */
struct shmb_windows *shmb_windows_in(PyObject *windows);

struct shmb_ring *shmb_binding_ring(PyObject *ring);
/* Claims, fills and commits. If it returns SHMB_INTERRUPTED, the exception is set. */
int shmb_binding_write(PyObject *ring, const unsigned char *const *from, uint64_t count, const double *priorities,
                       const uint32_t *streams, int64_t timeout_ns, uint64_t *first);
/* Withdraws a refused call that is not repeated, so that no counter shows it as waiting. */
int shmb_binding_stop_waiting(PyObject *ring, int64_t timeout_ns);
/* Draws, copies, validates and weighs. If it returns SHMB_INTERRUPTED, the exception is set. */
int shmb_binding_sample(PyObject *ring, uint64_t count, uint64_t key, unsigned char *const *out, int64_t *index, int64_t *tickets,
                        float *weights, double beta, _Bool prioritized, int64_t timeout_ns, uint64_t *redrawn);
/* Copies items by index, and validates the copies. */
int shmb_binding_read(PyObject *ring, const int64_t *index, uint64_t count, unsigned char *const *out, int64_t *tickets,
                      uint64_t *missing, int64_t timeout_ns);
/* Copies stacks by index, and validates the copies. SHMB_LAPPED: one of the items was overwritten. */
struct shmb_stacks;
int shmb_binding_stacks(PyObject *ring, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t bytes,
                        int64_t timeout_ns);

#endif
