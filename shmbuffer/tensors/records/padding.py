"""Pads leaves of different shapes to one shape, and makes masks of the original elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_non_tensor

from shmbuffer.items.records.decoding.table import Column, Table
from shmbuffer.items.records.decoding.transfer import homes
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, path_of
from shmbuffer.memory.record_format.bounds import MAX_RAW_BYTES
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.objects import Objects, non_tensor, objects_in
from shmbuffer.tensors.records.joining import Joining, Later, Leaf
from shmbuffer.tensors.records.layers import Tensors, has, name_of
from shmbuffer.tensors.records.tensor_decoder import TensorReading
from shmbuffer.tensors.records.tensor_memory import empty, torch_dtype_of

_MAX_HOLLOW_STEPS = 2**20


class Padding(Joining):
    """Joins leaves of different shapes by padding them, as described in `pad`."""

    def __init__(
        self,
        table: Table,
        reading: TensorReading,
        value: float | Mapping[Key, float],
        mask_key: Key | Mapping[Key, Key] | None,
    ) -> None:
        by_leaf = value if isinstance(value, Mapping) else {}
        self._value = 0.0 if isinstance(value, Mapping) else value
        self._values = {path_of(leaf): one for leaf, one in by_leaf.items()}
        self._named: dict[KeyPath, KeyPath] | None = None
        self._mask_key: KeyPath | None = None
        if isinstance(mask_key, Mapping):
            self._named = {path_of(leaf): path_of(mask) for leaf, mask in mask_key.items()}
        elif mask_key is not None:
            self._mask_key = path_of(mask_key)
        super().__init__(table, reading, [*self._values, *(self._named or ())])
        masks = set((self._named or {}).values()) | ({self._mask_key} if self._mask_key else set())
        for path in masks:
            if has(self.tree, path):
                raise KeyError(
                    f"the items already have an entry {name_of(path)}; choose another name for the "
                    "mask with mask_key"
                )
        inner = self.tree[2] if self.tree[0] == "tensorclass" else self.tree
        if masks:
            self.tree = inner
        self._rank = inner[1][1]
        self._any_ragged = any(leaf.ragged for leaf in self.leaves.values())
        devices = (one.tensors[0].device for one in self.leaves.values() if type(one) is Tensors)
        self._mask_device = reading.device or next(devices, None)
        self._masks: list[tuple[KeyPath, Ints]] = []

    def size(self, dims: Ints) -> list[int]:
        """Returns the largest size of each batch dimension."""
        longest: list[int] = dims.max(axis=0).tolist()
        return longest

    def listed(self, values: list[Any], dims: Ints) -> Any:
        """Joins one value per item, and pads arrays of objects with None to the same shape."""
        if not (dims != dims[:1]).any():
            return super().listed(values, dims)
        if not all(map(is_non_tensor, values)):
            raise RuntimeError(
                "lazy stacks in TensorDicts whose batch sizes differ cannot be padded; read the "
                "items one by one, or stack the entries before writing them"
            )
        longest = self.size(dims)
        parts = []
        for value in values:
            array = objects_in(value).array
            padded = np.full((*longest, *array.shape[len(longest) :]), None, dtype=object)
            padded[tuple(map(slice, array.shape))] = array
            parts.append(padded)
        return non_tensor(Objects(np.stack(parts)))

    def _leaf(self, leaf: Leaf, path: KeyPath) -> Later:
        ragged, masked = leaf.ragged, False
        if self._named is not None:
            masked = path in self._named
            if ragged and not masked:
                raise RuntimeError(
                    f"{name_of(path)} differs in shape between the items, but mask_key does not "
                    "contain it; add a key for its mask"
                )
            if masked and not leaf.dims.shape[1]:
                raise RuntimeError(
                    f"{name_of(path)} has no dimensions that could be masked; leave it out of "
                    "mask_key"
                )
        elif self._mask_key:
            masked = bool(ragged) or (not self._any_ragged and leaf.dims.shape[1] > 0)
        last = ragged[-1] if ragged else 0
        if masked:
            rank = max(last + 1, self._rank)
            if not leaf.dims[:, rank:].all():
                _require_few(path, leaf.dims[:, :rank].max(axis=0).tolist())
            self._masks.append((path, leaf.dims[:, :rank]))
        return self._padded(leaf, last, path) if ragged else self._stack(leaf)

    def _padded(self, leaf: Leaf, last: int, path: KeyPath) -> Later:
        """Returns a function that pads a leaf whose values differ in shape.

        ``last`` is the last dimension in which they differ. If it is 0, the values are copied
        directly to their places in the batch. Otherwise torch copies them one by one.
        """
        value = self._values.get(path, self._value)
        count, shape = len(leaf.dims), leaf.dims.max(axis=0).tolist()
        dtype = leaf.dtype if isinstance(leaf, Tensors) else torch_dtype_of(leaf.chunk)
        assert dtype is not None  # the leaf is a tensor
        row_bytes = math.prod(shape) * dtype.itemsize
        _require_possible(path, shape, row_bytes)
        if last or not (isinstance(leaf, Column) or leaf.is_plain):
            rows = self._rows(leaf)
            return lambda: _filled(rows(), shape, value)
        starts = np.arange(count) * row_bytes
        out = empty((count, *shape), dtype)
        transfer = self.reading.transfer
        if isinstance(leaf, Column):
            transfer.add(leaf, starts + out.data_ptr(), out)
        else:
            whole = torch.cat(leaf.tensors)
            sources = homes(leaf.nbytes)[0] + whole.data_ptr()
            transfer.move(sources, leaf.nbytes, starts + out.data_ptr(), whole)
        rest = row_bytes - leaf.nbytes
        filler = cpu.full((int(rest.max()) // dtype.itemsize,), value, dtype=dtype)
        from_filler = np.full(count, filler.data_ptr(), np.int64)
        transfer.move(from_filler, rest, starts + leaf.nbytes + out.data_ptr(), filler)
        return self.reading.to_device(out)

    def join(self) -> Any:
        """Returns the batch with its masks."""
        batch = super().join()
        by_dims: dict[bytes, torch.Tensor] = {}  # from the bytes of the lengths to the mask
        masks: dict[KeyPath, torch.Tensor] = {}
        for path, dims in self._masks:
            mask = by_dims.get(dims.tobytes())
            if mask is None:
                mask = by_dims[dims.tobytes()] = self._mask(path, dims)
            masks[path] = mask
        if self._named is not None:
            for path, mask in masks.items():
                key = self._named[path]
                if batch.get(key, mask) is not mask:
                    raise RuntimeError(
                        f"{name_of(path)} shares the mask {name_of(key)} with another leaf, but "
                        "their lengths differ; use a separate mask for each leaf"
                    )
                batch.set(key, mask)
        elif len(by_dims) == 1:
            batch.set(self._mask_key, next(iter(masks.values())))
        elif masks:
            assert self._mask_key is not None
            group = TensorDict(batch_size=batch.batch_size, device=batch.device)
            for path, mask in masks.items():
                group.set(path, mask)
            batch.set(self._mask_key, group)
        return batch

    def _mask(self, path: KeyPath, dims: Ints) -> torch.Tensor:
        """Returns a mask, bool ``[n, *longest]``, that is True for the elements of each item.

        ``dims`` contains the shape of each item, int64 ``[n, rank]``.
        """
        shape: list[int] = dims.max(axis=0).tolist()
        _require_possible(path, shape, math.prod(shape))
        found = np.ones((len(dims), *shape), np.bool_)
        for dim, size in enumerate(shape):
            numbers = np.arange(size, dtype=np.uint32)  # 32 bits are enough and twice as fast as 64
            inside = numbers < dims[:, dim, None].astype(np.uint32)
            where = [1] * len(shape)
            where[dim] = size
            found &= inside.reshape(len(dims), *where)
        out = torch.from_numpy(found)
        return out if self._mask_device is None else out.to(self._mask_device)


def _filled(tensors: Sequence[torch.Tensor], shape: list[int], value: float) -> torch.Tensor:
    whole = tensors[0].new_full((len(tensors), *shape), value, requires_grad=False)
    for row, tensor in enumerate(tensors):
        whole[row][tuple([slice(size) for size in tensor.shape])] = tensor
    return whole


def _require_possible(path: KeyPath, shape: list[int], nbytes: int) -> None:
    """Raises RuntimeError if a padded item would be too large.

    The size of the items does not limit it, because an item without bytes, whose shape contains a
    0, can have any length in the other dimensions.
    """
    if nbytes > MAX_RAW_BYTES:
        raise RuntimeError(
            f"{name_of(path)} would be padded to {shape}, which is {nbytes} bytes per item; the "
            f"limit is {MAX_RAW_BYTES}. Nest it, or write shorter items"
        )


def _require_few(path: KeyPath, shape: list[int]) -> None:
    """Raises RuntimeError if the mask of a leaf without bytes would be too large.

    The number of steps in such a leaf is not limited by its size in bytes.
    """
    if math.prod(shape) > _MAX_HOLLOW_STEPS:
        raise RuntimeError(
            f"{name_of(path)} contains no numbers, but a mask for it would have the shape {shape} "
            "per item; read it without a mask, or leave it out of mask_key"
        )
