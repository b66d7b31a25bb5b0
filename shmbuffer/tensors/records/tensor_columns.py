"""Locates the bytes of each item within the tensors of a batch, without splitting the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from shmbuffer._native._core import address
from shmbuffer.items.kept import Kept
from shmbuffer.items.records.columns import Columns, Shapes, of_described
from shmbuffer.items.records.containers import Taken
from shmbuffer.items.records.forms import (
    RefusedError,
    Walk,
    array_token,
    describe,
    kind_of,
)
from shmbuffer.memory.record_format import volumes
from shmbuffer.tensors.form.tensor_containers import take_of
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.records.tensor_forms import NAMES, plain


def of_batch(data: Any) -> Columns | None:
    """Returns the columns of a batch whose items are the rows along its first dimension.

    ``data`` is a tensor, array, TensorDict or tensorclass. Tensors whose rows are not contiguous
    are copied. Returns None if an entry does not consist of rows of one block of memory, or if the
    items may differ in kind. The caller must then split the batch. Cost: 10 µs per leaf.
    """
    rows = _Rows(len(data))
    try:
        rows.add(data)
    except _SplitError:
        return None
    return rows.columns()


_KEPT_ROWS = 4096  # largest batch size times number of leaves for which shapes are cached
_KEPT_SHAPES = 64


def _shapes_of(count: int, key: Any, batch: Any, of_leaves: Any) -> Shapes:
    """Returns the kind and sizes of the items of a batch.

    Args:
        count: number of items.
        key: key of the items' kind (`Kind.key`).
        batch: batch sizes of one item.
        of_leaves: shape of each leaf within an item, or int64 ``[count, rank]`` if the items
            differ.
    """
    kind = kind_of(tuple(key))
    batch_dims = np.empty((count, len(batch)), np.int64)
    batch_dims[:] = batch
    dims, sizes = [], np.empty((count, len(kind.chunks)), np.int64)
    for at, (chunk, shape) in enumerate(zip(kind.chunks, of_leaves, strict=True)):
        if isinstance(shape, np.ndarray):
            dims.append(shape)
            sizes[:, at] = volumes(chunk, shape)
            continue
        table = np.empty((count, len(shape)), np.int64)
        table[:] = shape
        dims.append(table)
        sizes[:, at] = math.prod(shape) * chunk.itemsize
    return Shapes(kind, batch_dims, tuple(dims), sizes, np.arange(count)[:, None])


_SHAPES: Kept[tuple[Any, ...], Shapes] = Kept(lambda key: _shapes_of(*key), _KEPT_SHAPES)


class _SplitError(Exception):
    """Raised if the batch must be split into items."""


class _Rows(Walk):
    """Collects for a whole batch the same information that `Walk` collects for one item."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        # Each list has one element per leaf.
        self._shapes: list[Any] = []  # shape in each item, or int64 ``[n, rank]`` if they differ
        self._first: list[Any] = []  # address of the first row, or an array with that of each row
        self._steps: list[int] = []  # distance between rows in bytes
        self._keeps: list[Any] = []  # owner of the memory

    def columns(self) -> Columns:
        rows = self._count * len(self._shapes)
        keep = rows <= _KEPT_ROWS and not any(isinstance(one, np.ndarray) for one in self._shapes)
        if keep:
            shapes = tuple(map(tuple, self._shapes))
            found = _SHAPES[self._count, tuple(self.key), tuple(self.batch_dims), shapes]
        else:
            found = _shapes_of(self._count, self.key, self.batch_dims, self._shapes)
        if keep:
            addresses = found.rows * np.array(self._steps, np.int64) + np.array(self._first)
        else:  # `_first` may contain arrays
            addresses = np.empty(found.sizes.shape, np.int64)
            for at, (first, step) in enumerate(zip(self._first, self._steps, strict=True)):
                addresses[:, at] = found.rows[:, 0] * step + first
        return Columns(
            found.kind,
            found.batch_dims,
            found.dims,
            addresses,
            found.sizes,
            self._keeps,
            shapes=found if keep else None,
        )

    def add(self, item: Any) -> None:
        """Adds the leaves of a batch or of one of its entries.

        Raises:
            _SplitError: the data do not consist of rows of one block of memory.
        """
        if isinstance(item, torch.Tensor):
            self._tensor(item)
        elif isinstance(item, np.ndarray):
            self._array(item)
        elif isinstance(item, NonTensorStack):
            self._objects(item)
        elif is_collection(item) and (take := take_of(type(item))) is not None:
            self._container(take(item))
        else:
            raise _SplitError

    def _container(self, taken: Taken) -> None:
        kind, batch, about, keys, parts = taken
        if kind == "lazy" or (kind != "tensorclass" and batch[:1] != (self._count,)):
            raise _SplitError
        if kind == "tensordict" and about[1] is not None:
            inner = about[1][1:]
            about = (about[0], inner if any(inner) else None)
        self.key += (kind, max(len(batch) - 1, 0), about, keys)
        self.batch_dims += batch[1:]
        if kind != "object":
            try:
                for part in parts:
                    self.add(part)
            except RefusedError as error:
                raise error.under(keys, parts, part) from None
            return
        (value,) = parts  # all items share this object
        one = describe(value)
        columns = of_described([one])
        self.key += one.kind.key
        self.batch_dims += one.batch_dims
        for at, dims in enumerate(columns.dims):
            self._leaf(dims[0].tolist(), int(columns.addresses[0, at]), 0, columns.keeps)

    def _leaf(self, shape: Any, first: Any, step: int, keeps: Any) -> None:
        self._shapes.append(shape)
        self._first.append(first)
        self._steps.append(step)
        self._keeps.append(keeps)

    def _tensor(self, data: torch.Tensor) -> None:
        whole = (
            type(data) is torch.Tensor
            and data.layout is torch.strided
            and not data.is_nested
            and data.is_cpu
            and data.dtype in NAMES
            and not (data.is_neg() or data.is_conj())
            and (data.is_contiguous() or data[0].is_contiguous())
        )
        if not whole:
            data = plain(data)
        self.key += (data.dtype, data.dim() - 1)
        self._leaf(data.shape[1:], data.data_ptr(), data.stride(0) * data.itemsize, data)

    def _array(self, data: np.ndarray[Any, Any]) -> None:
        if data.dtype.kind in "OVSU":  # texts and objects vary in size
            raise _SplitError
        token, rank = array_token(data), data.ndim - 1
        data = np.ascontiguousarray(data)
        self.key += ("array", token, rank) if rank else ("number", token)
        self._leaf(data.shape[1:], address(data), data.strides[0], data)

    def _objects(self, data: Any) -> None:
        """Adds one object per item if all objects are text, bytes or numbers of the same kind."""
        parts = data.tensordicts
        if (
            data.stack_dim
            or len(parts) != self._count
            or not all(type(one) is NonTensorData for one in parts)
        ):
            raise _SplitError
        found = [describe(one) for one in parts]
        key = found[0].kind.key
        if key[0:2] != ("object", 0) or len(key) != 5 or any(one.kind.key != key for one in found):
            raise _SplitError
        columns = of_described(found)
        self.key += key
        self._leaf(columns.dims[0], columns.addresses[:, 0], 0, columns.keeps)
