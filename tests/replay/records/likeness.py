"""What two things must have in common to be the same, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase, is_tensorclass

from shmbuffer.memory.format.record_batch import RecordBatch


def as_read(batch: RecordBatch) -> RecordBatch:
    """A batch that was written, each record for itself, as the ring gives it back."""
    strides = (batch.sizes + 7) & ~7
    starts = np.cumsum(strides) - strides
    data = np.zeros(int(strides.sum()), np.uint8)
    for start, origin, size in zip(starts, batch.starts, batch.sizes, strict=True):
        data[start : start + size] = batch.data[origin : origin + size]
    return RecordBatch(data, starts, batch.sizes)


def joined(*batches: RecordBatch) -> RecordBatch:
    """The records of several batches, one batch after the other."""
    ends = np.cumsum([len(batch.data) for batch in batches])
    return RecordBatch(
        np.concatenate([batch.data for batch in batches]),
        np.concatenate(
            [batch.starts + end - len(batch.data) for batch, end in zip(batches, ends, strict=True)]
        ),
        np.concatenate([batch.sizes for batch in batches]),
    )


def picked(batch: RecordBatch, rows: list[int]) -> RecordBatch:
    """Some records of a batch, in this order."""
    return as_read(RecordBatch(batch.data, batch.starts[rows], batch.sizes[rows]))


def alike(found: Any, given: Any) -> bool:
    """Whether two things are the same: the class, dtype, shape, and every bit."""
    if type(found) is not type(given):
        return False
    if isinstance(given, torch.Tensor):
        if found.is_nested or given.is_nested:
            return (
                found.is_nested == given.is_nested
                and found.layout == given.layout
                and alike(list(found.unbind()), list(given.unbind()))
            )
        return (found.dtype, found.shape, raw(found)) == (given.dtype, given.shape, raw(given))
    if isinstance(given, (np.ndarray, np.generic)):
        return (found.dtype, found.shape, found.tobytes()) == (
            given.dtype,
            given.shape,
            given.tobytes(),
        )
    if isinstance(given, LazyStackedTensorDict):
        return found.stack_dim == given.stack_dim and alike(found.tensordicts, given.tensordicts)
    if isinstance(given, TensorDictBase):
        return (
            (found.batch_size, found.names, found.device)
            == (given.batch_size, given.names, given.device)
            and list(found.keys()) == list(given.keys())
            and all(alike(found.get(key), given.get(key)) for key in given.keys())  # noqa: SIM118
        )
    if isinstance(given, NonTensorData):
        return found.batch_size == given.batch_size and alike(found.data, given.data)
    if is_tensorclass(given):
        return alike(found._tensordict, given._tensordict)
    if isinstance(given, dict):
        return list(map(repr, found)) == list(map(repr, given)) and all(
            alike(one, other) for one, other in zip(found.values(), given.values(), strict=True)
        )
    if isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(map(alike, found, given))
    return repr(found) == repr(given)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in C order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
