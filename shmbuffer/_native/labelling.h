/* What labelling.c and label_columns.c share. */
#ifndef SHMB_LABELLING_H
#define SHMB_LABELLING_H

#include "module.h"

#include "labels.h"

struct shmb_labels *shmb_labels_in(PyObject *labels);
PyObject *shmb_labels_follow(PyObject *labels, PyObject *args);
PyObject *shmb_labels_settle_all(PyObject *labels, PyObject *follower);

#endif
