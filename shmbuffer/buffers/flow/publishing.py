"""Publishes the weights of a learner for the collectors, in the directory of the buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shmbuffer.buffers.data_path.parts import ring_backed
from shmbuffer.items.form.arrays import NO_ARRAY, is_array
from shmbuffer.memory import Leaf, weights
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.weights import TIMEOUT_S, Weights
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import as_tensor, contiguous, dtype_name, torch_dtype


def publish(
    storage: Storage, state_dict: Mapping[str, Any], step: int, timeout: float = TIMEOUT_S
) -> int:
    """Publishes weights; `ReplayBuffer.publish` describes the arguments."""
    tensors = {path: _bytes(path, value) for path, value in weights.flatten(state_dict).items()}
    leaves = [Leaf(path, dtype_name(one.dtype), tuple(one.shape)) for path, one in tensors.items()]
    addresses = [one.data_ptr() for one in tensors.values()]
    return weights.publish(_seat(storage), leaves, addresses, step, timeout)


def newest(storage: Storage, than: int | None) -> Weights | None:
    """Returns the newest weights; `ReplayBuffer.newest` describes the argument."""
    found = weights.newest(_seat(storage), than)
    if found is None:
        return None
    leaves = found.form.leaves
    tensors = [
        torch.from_numpy(part).view(torch_dtype(leaf.dtype)).reshape(leaf.shape)
        if leaf.nbytes  # torch cannot view an empty tensor with another dtype
        else cpu.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
        for leaf, part in zip(leaves, found.parts(), strict=True)
    ]
    return Weights(found.version, found.step, weights.nest(leaves, tensors))


def _seat(storage: Storage) -> Seat:
    """Returns the storage's seat in the directory of the buffer.

    Raises TypeError if the storage does not belong to this package, and ShmBufferError if the
    buffer has no directory.
    """
    backed = ring_backed(storage, "publish and newest need")
    if not backed.shared:
        raise weights.no_directory_error(backed.where)
    return backed.engine().seat


def _bytes(path: tuple[str, ...], value: Any) -> torch.Tensor:
    """Converts a value to a contiguous tensor on the CPU.

    Args:
        path: keys that lead to the value in the ``state_dict``.
        value: a tensor or an array.

    Raises:
        TypeError: the value is not a tensor or an array.
    """
    try:
        if not is_array(value):
            raise TypeError("only tensors and arrays can be published")
        return contiguous(as_tensor(value))
    except NO_ARRAY as error:
        raise TypeError(
            f"publish: '{'.'.join(path)}' is a {type(value).__name__}, which cannot be stored "
            f"({error}); remove this entry, or convert it to a tensor"
        ) from error
