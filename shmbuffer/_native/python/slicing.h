/* Methods of Follower and Trajectories that draw slices, and functions that following.c needs, too. */
#ifndef SHMB_SLICING_H
#define SHMB_SLICING_H

#include "python/following.h"

/* Builds (restarted, gone, changed), the result of a poll. */
PyObject *shmb_build_changes(const struct shmb_follower *f, bool restarted);
/* Returns `before`, the slot that the item in `slot` follows. Returns -1 if it is more than `reach` places back,
 * because there may be a hole between them. */
int64_t shmb_accept_predecessor(uint64_t capacity, int64_t before, uint64_t slot, uint64_t reach);

/* Stores each element preceded by the previous steps of its trajectory, and their tickets. If there are too few
 * steps, the first one is repeated. `drawn`: the tickets that the elements themselves must have, or NULL. Without a
 * follower no tickets are stored. False: an item is missing. */
bool shmb_read_histories(const struct shmb_trajectories *all, const struct shmb_follower *f, const int64_t *at, const int64_t *drawn,
                    uint64_t count, uint64_t steps, int64_t *out, int64_t *tickets);

PyObject *shmb_trajectories_follow(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_read_windows(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_draw_slices(PyObject *trajectories, PyObject *args);
PyObject *shmb_trajectories_read_histories(PyObject *trajectories, PyObject *args);
PyObject *shmb_follower_read_flags(PyObject *follower, PyObject *args);

#endif
