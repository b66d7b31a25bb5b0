"""Items of one kind, side by side: where each leaf lies. A batch is not taken apart for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack

from shmbuffer.memory.record_format import Chunk, volumes
from shmbuffer.replay.form.containers import Taken, take_of
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.records.forms import (
    DTYPES,
    Described,
    Kind,
    RefusedError,
    Walk,
    array_token,
    describe,
    kind_of,
    plain,
)


@dataclass(frozen=True, eq=False)
class Columns:
    """n items of one kind. A TypeError where a leaf has no memory."""

    kind: Kind  # what they have in common
    batch_dims: NDArray[np.int64]  # int64[n, kind.batch_dims]
    dims: tuple[NDArray[np.int64], ...]  # int64[n, rank], one for each leaf
    addresses: NDArray[np.int64]  # int64[n, leaves]: where the bytes of each leaf start
    sizes: NDArray[np.int64]  # int64[n, leaves]: how many they are
    # whose memory it is; the addresses are good as long as these are there
    keeps: list[Any] = field(repr=False)
    # where the items were apart: as `forms.Described` has them, a list for each leaf
    leaves: list[list[Any]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.addresses.all():
            return
        nowhere = ((self.addresses == 0) & (self.sizes > 0)).any(axis=0)
        for at in np.flatnonzero(nowhere).tolist():
            raise TypeError(
                f"the leaf {self.kind.paths[at]!r} has no memory: it is a tensor that only stands "
                "for one; make a real one of it (clone it) before it is stored"
            )

    def __len__(self) -> int:
        return len(self.addresses)


def of_batch(data: Any) -> Columns | None:
    """The items of a tensor, array, TensorDict or tensorclass, along its first dimension.

    None where they are no rows of one memory, or may be of several kinds: take them apart. Cost: 10
    µs a leaf; tensors whose items are not contiguous are copied.
    """
    rows = _Rows(len(data))
    try:
        rows.add(data)
    except _ApartError:
        return None
    return rows.columns()


def of_items(items: Sequence[Any]) -> list[tuple[NDArray[np.int64], Columns]]:
    """Items by kind, positions ascending. Cost: that of `forms.describe`, and 0.3 µs a leaf."""
    groups: dict[tuple[Any, ...], list[Described]] = {}
    places: dict[tuple[Any, ...], list[int]] = {}
    for at, item in enumerate(items):
        one = describe(item)
        key = one.kind.key
        if key in groups:
            groups[key].append(one)
            places[key].append(at)
        else:
            groups[key], places[key] = [one], [at]
    return [(np.array(places[key], np.int64), of_described(group)) for key, group in groups.items()]


def of_described(group: list[Described]) -> Columns:
    """Items of one kind, at least one."""
    kind, count = group[0].kind, len(group)
    batch_dims = _table([one.batch_dims for one in group], count)
    numbers = _table([one.dims for one in group], count)
    dims, start = [], 0
    for chunk in kind.chunks:
        dims.append(numbers[:, start : start + chunk.rank])
        start += chunk.rank
    sizes = _sizes(kind.chunks, dims, count)
    addresses = np.zeros((count, len(kind.chunks)), np.int64)
    leaves = [list(column) for column in zip(*[one.leaves for one in group], strict=True)]
    keeps: list[Any] = [leaves]
    for at, (chunk, column) in enumerate(zip(kind.chunks, leaves, strict=True)):
        if chunk.kind == "tensor":
            found: Any = map(torch.Tensor.data_ptr, column)
            addresses[:, at] = np.fromiter(found, np.int64, count)
        elif chunk.kind in ("array", "number"):
            found = (leaf.__array_interface__["data"][0] for leaf in column)
            addresses[:, at] = np.fromiter(found, np.int64, count)
        else:
            addresses[:, at] = joined(column, sizes[:, at], keeps)
    return Columns(kind, batch_dims, tuple(dims), addresses, sizes, keeps, leaves)


def _table(rows: list[list[int]], count: int) -> NDArray[np.int64]:
    width = len(rows[0])
    return np.fromiter(chain.from_iterable(rows), np.int64, count * width).reshape(count, width)


def _sizes(
    chunks: Sequence[Chunk], dims: Sequence[NDArray[np.int64]], count: int
) -> NDArray[np.int64]:
    sizes = np.empty((count, len(chunks)), np.int64)
    for at, (chunk, shape) in enumerate(zip(chunks, dims, strict=True)):
        sizes[:, at] = volumes(chunk, shape)
    return sizes


def joined(values: list[bytes], sizes: NDArray[np.int64], keeps: list[Any]) -> NDArray[np.int64]:
    """Addresses of values, one behind the other in a memory of their own."""
    whole = np.frombuffer(b"".join(values), np.uint8)
    keeps.append(whole)
    starts: NDArray[np.int64] = whole.ctypes.data + np.cumsum(sizes) - sizes
    return starts


class _ApartError(Exception):
    """The items are to be taken apart."""


class _Rows(Walk):
    """A walk through a batch: what `Walk` finds in one item, for all of its items at once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._at = np.arange(count)
        self._shapes: list[NDArray[np.int64]] = []
        self._addresses: list[Any] = []
        self._keeps: list[Any] = []

    def columns(self) -> Columns:
        kind, count = kind_of(tuple(self.key)), self._count
        batch_dims = np.tile(np.array(self.batch_dims, np.int64), (count, 1))
        addresses = np.empty((count, len(kind.chunks)), np.int64)
        for at, column in enumerate(self._addresses):
            addresses[:, at] = column
        sizes = _sizes(kind.chunks, self._shapes, count)
        return Columns(kind, batch_dims, tuple(self._shapes), addresses, sizes, self._keeps)

    def add(self, item: Any) -> None:
        """See `Walk.add`; _ApartError where the items are no rows of one memory."""
        if isinstance(item, torch.Tensor):
            self._tensor(item)
        elif isinstance(item, np.ndarray):
            self._array(item)
        elif isinstance(item, NonTensorStack):
            self._objects(item)
        elif is_collection(item) and (take := take_of(type(item))) is not None:
            self._container(take(item))
        else:
            raise _ApartError

    def _container(self, taken: Taken) -> None:
        kind, batch, about, keys, parts = taken
        if kind == "lazy" or (kind != "tensorclass" and batch[:1] != (self._count,)):
            raise _ApartError
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
        (value,) = parts  # one object for all items
        one = describe(value)
        columns = of_described([one])
        self.key += one.kind.key
        self.batch_dims += one.batch_dims
        for at, dims in enumerate(columns.dims):
            self._leaf(dims[0].tolist(), int(columns.addresses[0, at]), columns.keeps)

    def _leaf(self, shape: Sequence[int], address: Any, keeps: Any) -> None:
        dims = np.empty((self._count, len(shape)), np.int64)
        dims[:] = shape
        self._shapes.append(dims)
        self._addresses.append(address)
        self._keeps.append(keeps)

    def _tensor(self, data: torch.Tensor) -> None:
        whole = (
            type(data) is torch.Tensor
            and data.layout is torch.strided
            and not data.is_nested
            and data.is_cpu
            and data.dtype in DTYPES
            and not (data.is_neg() or data.is_conj())
            and (data.is_contiguous() or data[0].is_contiguous())
        )
        if not whole:
            data = plain(data)
        self.key += (data.dtype, data.dim() - 1)
        step = data.stride(0) * data.itemsize
        self._leaf(data.shape[1:], data.data_ptr() + step * self._at, data)

    def _array(self, data: np.ndarray[Any, Any]) -> None:
        if data.dtype.kind in "OVSU":  # of text each has a length of its own
            raise _ApartError
        token, rank = array_token(data), data.ndim - 1
        data = np.ascontiguousarray(data)
        self.key += ("array", token, rank) if rank else ("number", token)
        self._leaf(data.shape[1:], data.ctypes.data + data.strides[0] * self._at, data)

    def _objects(self, data: Any) -> None:
        """An object for each item, where all are text, or bytes, or one kind of number."""
        parts = data.tensordicts
        if (
            data.stack_dim
            or len(parts) != self._count
            or not all(type(one) is NonTensorData for one in parts)
        ):
            raise _ApartError
        found = [describe(one) for one in parts]
        key = found[0].kind.key
        if key[0:2] != ("object", 0) or len(key) != 5 or any(one.kind.key != key for one in found):
            raise _ApartError
        columns = of_described(found)
        self.key += key
        self._shapes += columns.dims
        self._addresses.append(columns.addresses[:, 0])
        self._keeps.append(columns.keeps)
