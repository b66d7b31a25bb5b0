"""Replay buffer for processes that use NumPy arrays and do not import torch."""

from __future__ import annotations

from shmbuffer.numpy.sampling import Sampling
from shmbuffer.numpy.writing import Writing


class ReplayBuffer(Writing, Sampling):
    """A handle to a buffer for NumPy arrays, returned by `shmbuffer.numpy.attach`.

    Clients with and without torch can read each other's items, because both use the same engine,
    schema, priorities, rate limiter and errors.

    A batch is a dict of arrays, nested like the items, or a list of items. Numbers, lists, and
    objects with ``__array__`` or DLPack are converted to arrays. Tuples and lists represent tuples
    and lists of a PyTree. A dict represents a TensorDict or a tensorclass.

    A sample is a dict of new arrays. In addition to the data, it has these entries:

    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one array | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | always |

    NumPy has no bfloat16, float8 or complex32. The bytes of these dtypes are passed as unsigned
    integers of the same size, and `dtypes` contains the dtype of each leaf. Tensors and arrays of
    ml_dtypes can have these dtypes and need no conversion.

    Threads can share a handle. A handle cannot be pickled. Call ``attach`` in the other process
    instead.
    """
