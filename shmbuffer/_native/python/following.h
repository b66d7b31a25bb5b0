/* The Python objects Follower and Trajectories of following.c, and their contents. */
#ifndef SHMB_FOLLOWING_H
#define SHMB_FOLLOWING_H

#include "python/module.h"

#include "tables/follower.h"
#include "tables/trajectories.h"

extern PyTypeObject *shmb_follower_type, *shmb_trajectories_type;

struct follower_object {
    PyObject_HEAD
    struct shmb_follower follower;
    PyObject *ring; /* must stay alive */
};

static inline struct shmb_follower *shmb_follower_in(PyObject *follower) {
    return &((struct follower_object *)follower)->follower;
}

struct trajectories_object {
    PyObject_HEAD
    struct shmb_trajectories all;
    PyObject *windows; /* must stay alive */
};

static inline struct shmb_trajectories *shmb_trajectories_in(PyObject *trajectories) {
    return &((struct trajectories_object *)trajectories)->all;
}

#endif
