/* What the two halves of the Python binding share. Only the stable ABI is used (PEP 384, CPython 3.11). */
#ifndef SHMB_MODULE_H
#define SHMB_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec shmb_map_spec, shmb_ring_spec;
extern PyTypeObject *shmb_map_type;

void *shmb_map_address(PyObject *map);
Py_ssize_t shmb_map_bytes(PyObject *map);
int shmb_map_is_twice(PyObject *map);

#endif
