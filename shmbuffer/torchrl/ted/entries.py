"""Entries of episode data by path, their roles, and their names in the compact forms.

A path is a tuple of nested keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor

from shmbuffer.memory.format.dtypes import require_dtypes
from shmbuffer.memory.format.leaf import KeyPath, key_of
from shmbuffer.tensors.form.tensor_nodes import fields, is_collection
from shmbuffer.tensors.form.tensors import dtype_name

NestedKey = str | tuple[Any, ...]
"""A key, or a tuple of nested keys."""

STORAGE_SHAPE: KeyPath = ("_storage_shape",)
"""Shape of the ring, with slots first."""

CUTS: KeyPath = ("_cuts",)
"""Positions of cuts, where an item does not continue the previous one although no episode ended.
In the flat form they are row numbers, and in a nested form one flag per trajectory. The entry is
written only if there are cuts.
"""

CUT_SHAPE: KeyPath = ("_cut_storage_shape",)
"""Replaces `STORAGE_SHAPE` if there are cuts, which TorchRL does not support. Because
`STORAGE_SHAPE` is missing, TorchRL raises an error instead of joining the observations incorrectly.
"""

ROOT: KeyPath = ("_root",)
"""Contains the flags and rewards at the root of the items. It is written only if they differ from
TorchRL's defaults, which are False for each flag that is also under ``"next"``, and no reward.
"""

LENGTH: KeyPath = ("_len",)
"""Number of elements that contain an item. Used in HDF5 files."""

NEXT = "next"
DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)


def flat_path(key: str | Sequence[Any]) -> KeyPath:
    """Converts a key or nested key to a tuple of names."""
    if isinstance(key, str):
        return (key,)
    return tuple(name for part in key for name in flat_path(part))


def dotted(path: KeyPath) -> str:
    """Formats a path for an error message."""
    return ".".join(path)


def entries(data: Any) -> dict[KeyPath, Any]:
    """Returns the leaves of a TensorDict, a tensorclass or a dict of these, by path.

    Tensors are not copied.
    """
    found: dict[KeyPath, Any] = {}
    for name, value in (data if isinstance(data, dict) else fields(data)).items():
        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            found[(name,)] = value
        elif is_collection(value):
            found.update({(name, *path): leaf for path, leaf in entries(value).items()})
        else:  # some versions of tensordict return the object without its NonTensorData
            found[(name,)] = NonTensorData(value)
    return found


def require_loadable(found: Mapping[KeyPath, Any], where: str) -> None:
    """Raises TypeError for a tensor that `TensorDict.load_memmap` could not read from a file."""
    tensors = {path: leaf for path, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    require_dtypes(
        [(dotted(path), dtype_name(leaf.dtype)) for path, leaf in tensors.items()],
        lambda dtype: dtype.tensordict,
        where,
        "TensorDict.load_memmap",
        "convert it, or use a TensorStorageCheckpointer",
    )


def assemble(found: Mapping[KeyPath, Any], batch: Sequence[int]) -> TensorDict:
    """Creates a TensorDict of batch size ``batch`` from leaves by path."""
    data = TensorDict(batch_size=torch.Size(batch))
    for path, value in found.items():
        data[path] = value
    return data


def constant(found: Mapping[KeyPath, Any], path: KeyPath, hook: str) -> Any:
    """Returns a constant of the ring that was stored next to the items.

    Raises:
        ValueError: the entry is missing. The message starts with ``hook``, the name of the hook.
    """
    value = found.get(path)
    if value is None:
        raise ValueError(
            f"{hook}: the data have no entry {dotted(path)!r}, so they were written by another "
            f"class or with another key. They have {names(found)}"
        )
    while isinstance(value, NonTensorStack):  # equal values, one per trajectory
        value = value[0]
    return value.data if isinstance(value, NonTensorData) else value


def shape_of(found: Mapping[KeyPath, Any], hook: str) -> list[int]:
    """Returns the shape of the ring from which the items were saved."""
    path = CUT_SHAPE if CUT_SHAPE in found else STORAGE_SHAPE
    return [int(size) for size in constant(found, path, hook)]


def names(found: Iterable[KeyPath]) -> str:
    """Formats several paths for an error message."""
    return ", ".join(sorted(dotted(path) for path in found))


class Roles:
    """Base class for hooks that stores which entries are flags, rewards and the ring's state."""

    def __init__(
        self,
        done_key: NestedKey = "done",
        shift_key: NestedKey = "shift",
        is_full_key: NestedKey = "is_full",
        done_keys: Iterable[NestedKey] = DONE_KEYS,
        reward_keys: Iterable[NestedKey] = REWARD_KEYS,
    ) -> None:
        self.done_key = done_key
        self.shift_key = shift_key
        self.is_full_key = is_full_key
        self.done_keys: set[Any] = _unravelled(done_keys)
        self.reward_keys: set[Any] = _unravelled(reward_keys)
        self._done = flat_path(done_key)
        self._shift_path = flat_path(shift_key)
        self._is_full_path = flat_path(is_full_key)
        # Path of the done flag in the compact form.
        self._end = self._done[1:] if self._done[0] == NEXT else self._done
        self._flags = {flat_path(key) for key in self.done_keys} | {self._end}
        self._rewards = {flat_path(key) for key in self.reward_keys}

    @property
    def _reserved_paths(self) -> set[KeyPath]:
        return {self._shift_path, self._is_full_path, STORAGE_SHAPE, CUT_SHAPE, CUTS, LENGTH}


def _unravelled(keys: Iterable[NestedKey]) -> set[Any]:
    given = (keys,) if isinstance(keys, str) else keys
    return {key_of(flat_path(key)) for key in given}
