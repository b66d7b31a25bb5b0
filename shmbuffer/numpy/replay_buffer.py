"""The buffer of a directory, for processes with arrays and without torch."""

from __future__ import annotations

from shmbuffer.numpy.sampling import Sampling
from shmbuffer.numpy.writing import Writing


class ReplayBuffer(Writing, Sampling):
    """A handle on a buffer for NumPy arrays, returned by `shmbuffer.numpy.attach`.

    Clients with and without torch read each other's items: the engine, the schema, priorities, the
    limiter and the errors are those of `shmbuffer.attach`.

    A batch is a dict of arrays, nested like the items, or a list of items. Objects with
    ``__array__`` or DLPack, lists and numbers are converted to arrays. Tuples and lists represent
    those of a PyTree; a TensorDict or a tensorclass is represented by a dict.

    A sample is a dict of new arrays. In addition to the data it has

    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one array | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | always |

    NumPy has no bfloat16, float8 and complex32: their bytes are passed in unsigned integers of the
    same size; `dtypes` has the dtype of each leaf. Arrays of ml_dtypes and tensors have these
    dtypes and need no conversion.

    Threads may share a handle. It cannot be pickled: attach in the other process.
    """
