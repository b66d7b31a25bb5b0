/* Calls of Follower and Trajectories that draw slices, and what following.c needs of them. */
#ifndef SHMB_SLICING_H
#define SHMB_SLICING_H

#include "python/following.h"

/* Builds (restarted, gone, changed): what a poll has seen. */
PyObject *shmb_build_changes(const struct shmb_follower *f, bool restarted);
/* The slot `before` that the item in `slot` follows, or -1 if it is further away than `reach` places, so that a hole may be
 * between them. */
int64_t shmb_accept_predecessor(uint64_t capacity, int64_t before, uint64_t slot, uint64_t reach);

/* Each element after the steps before it in its trajectory, the first of which is repeated where there are too few, and their
 * tickets. `drawn`: the tickets that the elements themselves have to have, or NULL. Without a follower there are no tickets.
 * False: one of the items is not there. */
bool shmb_histories(const struct shmb_trajectories *all, const struct shmb_follower *f, const int64_t *at, const int64_t *drawn,
                    uint64_t count, uint64_t steps, int64_t *out, int64_t *tickets);

PyObject *shmb_trajectories_follow(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_windows(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_slices(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_histories(PyObject *trajectories, PyObject *args);
PyObject *shmb_follower_flags(PyObject *follower, PyObject *args);

#endif
