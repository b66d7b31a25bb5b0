"""Joins leaves of different shapes to one batch.

`Joining` is the base class. `Nesting` creates jagged tensors, and `padding.Padding` pads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, is_non_tensor, lazy_stack

from shmbuffer.items.records.decoding.building import built
from shmbuffer.items.records.decoding.table import Column, Table
from shmbuffer.items.records.decoding.transfer import homes
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, path_of
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.records.layers import Tensors, name_of
from shmbuffer.tensors.records.tensor_building import SEPARATE, Batch, chunks_at, chunks_under
from shmbuffer.tensors.records.tensor_decoder import TensorReading
from shmbuffer.tensors.records.tensor_memory import empty, torch_dtype_of

Leaf = Column | Tensors
Later = Callable[[], Any]
"""Function that returns a result. It is called after `TensorReading.read` has copied all bytes."""


class Joining(Batch):
    """Base class that builds one batch from the leaves of items that differ in shape.

    Subclasses implement `_leaf`, which joins the values of one leaf.

    Raises:
        KeyError: no item has a leaf in ``requested``.
    """

    def __init__(
        self, table: Table, reading: TensorReading, requested: Collection[KeyPath]
    ) -> None:
        super().__init__(table.batch_dims, list(table.columns), reading.device)
        self.tree = table.tree
        self.reading = reading
        self._numbers = {
            path: number
            for path, number in chunks_at(table.tree).items()
            if not isinstance(self.columns[number], list)
        }
        self.leaves: dict[KeyPath, Leaf] = {
            path: self.columns[number] for path, number in self._numbers.items()
        }
        for path in requested:
            if path not in self.leaves:
                raise KeyError(
                    f"{name_of(path)} is not a tensor in the items. Their tensors are "
                    f"{', '.join(map(name_of, self.leaves)) or 'none'}"
                )

    def join(self) -> Any:
        """Returns the batch."""
        later: dict[int, Later] = {
            number: self._leaf(self.leaves[path], path) for path, number in self._numbers.items()
        }
        for number in chunks_under(self.tree, SEPARATE):
            later[number] = self.reading.rows(self.columns[number])
        for number, result in zip(later, self.reading.read([*later.values()]), strict=True):
            self.columns[number] = result
        return self.build(self.tree)

    def leaf(self, column: Any, dims: Ints) -> Any:
        """Converts a column to a leaf of the batch."""
        return self.listed(column, dims) if isinstance(column, list) else column

    def build_each(self, tree: Any, dims: Ints) -> Any:
        """Builds the objects or lazy stack of each item separately and joins them."""
        return self.listed(built(lambda: list(self.rows(tree)), self.reading.where), dims)

    def listed(self, values: list[Any], dims: Ints) -> Any:
        """Joins one value per item: objects to a NonTensorStack, other values to a lazy stack.

        ``dims`` are the batch sizes of the TensorDicts that contain them, int64 ``[n, rank]``.
        """
        if all(map(is_non_tensor, values)):
            return NonTensorStack(*values)
        return lazy_stack(values)

    def _leaf(self, leaf: Leaf, path: KeyPath) -> Later:
        """Returns a function that joins the values of the leaf at ``path``."""
        raise NotImplementedError

    def _stack(self, leaf: Leaf) -> Later:
        """Returns a function that stacks the values of a leaf, which have the same shape."""
        if isinstance(leaf, Tensors):
            return lambda: torch.stack(leaf.tensors)
        return self.reading.batch(leaf)

    def _rows(self, leaf: Leaf) -> Callable[[], Sequence[torch.Tensor]]:
        """Returns a function that returns the values of a leaf as a sequence of tensors."""
        return (lambda: leaf.tensors) if isinstance(leaf, Tensors) else self.reading.rows(leaf)


class Nesting(Joining):
    """Joins leaves of different shapes to jagged nested tensors, as described in `densify`."""

    def __init__(self, table: Table, reading: TensorReading, keys: Collection[Key]) -> None:
        self._keys = {path_of(key) for key in ([keys] if isinstance(keys, str) else keys)}
        super().__init__(table, reading, self._keys)
        self._offsets: dict[tuple[bytes, torch.device], torch.Tensor] = {}

    def size(self, dims: Ints) -> list[int]:
        """Returns the batch size of a TensorDict, with -1 for sizes that differ between items."""
        sizes: list[int] = np.where((dims != dims[:1]).any(axis=0), -1, dims[0]).tolist()
        return sizes

    def _leaf(self, leaf: Leaf, path: KeyPath) -> Later:
        ragged = leaf.ragged or ([0] if path in self._keys else [])
        if not ragged:
            return self._stack(leaf)
        if not leaf.dims.shape[1]:
            raise RuntimeError(
                f"{name_of(path)} has no dimension along which it could be nested; leave it out of "
                "keys"
            )
        if len(ragged) > 1:
            raise RuntimeError(
                f"the items differ in dimensions {ragged} of {name_of(path)}, but torch's jagged "
                "tensors can differ in only one dimension; pad the items instead"
            )
        (dim,) = ragged
        lengths = np.ascontiguousarray(leaf.dims[:, dim])
        if dim or isinstance(leaf, Tensors):
            rows = self._rows(leaf)
            return lambda: self._nest(torch.cat([*rows()], dim), lengths, dim)
        starts, _ = homes(leaf.nbytes)
        dtype = torch_dtype_of(leaf.chunk)
        assert dtype is not None  # the leaf is a tensor
        out = empty((int(lengths.sum()), *leaf.dims[0, 1:].tolist()), dtype)
        self.reading.transfer.add(leaf, starts + out.data_ptr(), out)
        ready = self.reading.to_device(out)
        return lambda: self._nest(ready(), lengths, dim)

    def _nest(self, values: torch.Tensor, lengths: Ints, dim: int) -> torch.Tensor:
        """Returns a nested tensor with these values, which differ in length along ``dim``.

        Tensors with the same lengths share one tensor of offsets. torch requires this for
        operations on several nested tensors.
        """
        key = (lengths.tobytes(), values.device)
        offsets = self._offsets.get(key)
        if offsets is None:
            ends = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=ends[1:])
            with cpu.without_inference_mode():
                offsets = self._offsets[key] = torch.from_numpy(ends).to(values.device)
        with cpu.as_default():
            result: torch.Tensor = torch.nested.nested_tensor_from_jagged(
                values,
                offsets,
                jagged_dim=dim + 1,
                min_seqlen=int(lengths.min()),
                max_seqlen=int(lengths.max()),
            )
        return result
