/* What following.c and slicing.c share. */
#ifndef SHMB_SLICING_H
#define SHMB_SLICING_H

#include "module.h"

#include "trajectories.h"

struct shmb_follower;

struct shmb_trajectories *shmb_trajectories_in(PyObject *trajectories);
/* (restarted, gone, changed): what a look has seen. */
PyObject *shmb_told_of(const struct shmb_follower *f, bool restarted);
int64_t shmb_within(uint64_t capacity, int64_t before, uint64_t slot, uint64_t reach);

PyObject *shmb_trajectories_follow(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_windows(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_slices(PyObject *trajectories, PyObject *args);
PyObject *shmb_follower_flags(PyObject *follower, PyObject *args);

#endif
