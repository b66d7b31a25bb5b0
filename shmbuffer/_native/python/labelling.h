/* The Python object Labels, and its methods in label_columns.c that follow a ring. */
#ifndef SHMB_LABELLING_H
#define SHMB_LABELLING_H

#include "python/module.h"

#include "tables/labels.h"

struct labels_object {
    PyObject_HEAD
    struct shmb_labels all;
};

static inline struct shmb_labels *shmb_labels_in(PyObject *labels) { return &((struct labels_object *)labels)->all; }

PyObject *shmb_labels_follow(PyObject *labels, PyObject *args);
PyObject *shmb_labels_settle_all(PyObject *labels, PyObject *follower);

#endif
