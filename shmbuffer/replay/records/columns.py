"""Items of one kind, side by side: where each leaf of each of them lies in memory.

A batch of items is not taken apart for it: its rows lie at equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from shmbuffer.memory.bodies import Chunk
from shmbuffer.replay.form.nodes import register
from shmbuffer.replay.records.forms import (
    DTYPES,
    Described,
    Kind,
    RefusedError,
    array_token,
    describe,
    kind_of,
    plain,
)


@dataclass(frozen=True, eq=False)
class Columns:
    """n items of one kind.

    Attributes:
        kind: what they have in common.
        batch_dims: int64[n, kind.batch_dims].
        dims: int64[n, rank], one for each leaf.
        addresses: int64[n, leaves]: where the bytes of each leaf start.
        sizes: int64[n, leaves]: how many they are.
        keeps: whose memory it is; the addresses are good as long as these are there.
        leaves: where the items were apart: as `forms.Described` has them, a list for each leaf.
    """

    kind: Kind
    batch_dims: NDArray[np.int64]
    dims: tuple[NDArray[np.int64], ...]
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keeps: list[Any] = field(repr=False)
    leaves: list[list[Any]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.addresses)


def of_batch(data: Any) -> Columns | None:
    """The items of a tensor, array, TensorDict or tensorclass, along its first dimension.

    Args:
        data: a batch; not empty.

    Returns:
        None where they are no rows of one memory, or may be of several kinds (lazy stacks, objects
        that differ): then they are to be taken apart.

    Raises:
        RefusedError: something in there cannot be stored.

    Cost: 10 µs a leaf, however many items; tensors whose items are not contiguous are copied.
    """
    rows = _Rows(len(data))
    try:
        rows.add(data)
    except _ApartError:
        return None
    return rows.columns()


def of_items(items: Sequence[Any]) -> list[tuple[NDArray[np.int64], Columns]]:
    """Items by kind: their positions, ascending, and what they are.

    Raises:
        RefusedError, ValueError: as `forms.describe`.

    Cost: that of `forms.describe`, and 0.3 µs a leaf.
    """
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
    """Items of one kind, at least one.

    Raises:
        TypeError: a leaf has no memory.
    """
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
    return _columns(kind, batch_dims, dims, addresses, sizes, keeps, leaves)


def _table(rows: list[list[int]], count: int) -> NDArray[np.int64]:
    """int64[count, width] of lists of one length."""
    width = len(rows[0])
    return np.fromiter(chain.from_iterable(rows), np.int64, count * width).reshape(count, width)


def _sizes(
    chunks: Sequence[Chunk], dims: Sequence[NDArray[np.int64]], count: int
) -> NDArray[np.int64]:
    sizes = np.empty((count, len(chunks)), np.int64)
    for at, (chunk, shape) in enumerate(zip(chunks, dims, strict=True)):
        if chunk.rank < 2:
            sizes[:, at] = shape[:, 0] * chunk.itemsize if chunk.rank else chunk.itemsize
        else:
            sizes[:, at] = np.multiply.reduce(shape, axis=1) * chunk.itemsize
    return sizes


def joined(values: list[bytes], sizes: NDArray[np.int64], keeps: list[Any]) -> NDArray[np.int64]:
    """Addresses of values, one behind the other in a memory of their own.

    Args:
        values: of these sizes.
        sizes: int64[n].
        keeps: gets the memory.
    """
    whole = np.frombuffer(b"".join(values), np.uint8)
    keeps.append(whole)
    starts: NDArray[np.int64] = whole.ctypes.data + np.cumsum(sizes) - sizes
    return starts


def _columns(
    kind: Kind,
    batch_dims: NDArray[np.int64],
    dims: Sequence[NDArray[np.int64]],
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    keeps: list[Any],
    leaves: list[list[Any]] | None = None,
) -> Columns:
    if not addresses.all():
        for at in np.flatnonzero(((addresses == 0) & (sizes > 0)).any(axis=0)).tolist():
            raise TypeError(
                f"the leaf {kind.paths[at]!r} has no memory: it is a tensor that only stands for "
                "one; make a real one of it (clone it) before it is stored"
            )
    return Columns(kind, batch_dims, tuple(dims), addresses, sizes, keeps, leaves)


class _ApartError(Exception):
    """The items are to be taken apart."""


class _Rows:
    """Collects the columns of a batch: what `forms.walk` finds in an item, for all at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._at = np.arange(count)
        self._key: list[Any] = []
        self._batch_dims: list[int] = []
        self._dims: list[NDArray[np.int64]] = []
        self._addresses: list[Any] = []
        self._keeps: list[Any] = []

    def columns(self) -> Columns:
        kind, count = kind_of(tuple(self._key)), self._count
        batch_dims = np.tile(np.array(self._batch_dims, np.int64), (count, 1))
        addresses = np.empty((count, len(kind.chunks)), np.int64)
        for at, column in enumerate(self._addresses):
            addresses[:, at] = column
        sizes = _sizes(kind.chunks, self._dims, count)
        return _columns(kind, batch_dims, self._dims, addresses, sizes, self._keeps)

    def add(self, data: Any) -> None:
        if isinstance(data, torch.Tensor):
            self._tensor(data)
        elif isinstance(data, np.ndarray):
            self._array(data)
        elif isinstance(data, NonTensorStack):
            self._objects(data)
        elif isinstance(data, LazyStackedTensorDict):
            raise _ApartError
        elif isinstance(data, TensorDictBase):
            self._tensordict(data)
        elif type(data) is NonTensorData:
            self._object(data)
        elif is_tensorclass(data) and not is_non_tensor(data):
            self._key += ("tensorclass", register(type(data)))
            self.add(data._tensordict)
        else:
            raise _ApartError

    def _leaf(self, shape: Sequence[int], address: Any, keeps: Any) -> None:
        """A leaf of this shape in every item."""
        dims = np.empty((self._count, len(shape)), np.int64)
        dims[:] = shape
        self._dims.append(dims)
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
        self._key += (data.dtype, data.dim() - 1)
        step = data.stride(0) * data.itemsize
        self._leaf(data.shape[1:], data.data_ptr() + step * self._at, data)

    def _array(self, data: np.ndarray[Any, Any]) -> None:
        if data.dtype.kind in "OVSU":  # of text each has a length of its own
            raise _ApartError
        token, rank = array_token(data), data.ndim - 1
        data = np.ascontiguousarray(data)
        self._key += ("array", token, rank) if rank else ("number", token)
        self._leaf(data.shape[1:], data.ctypes.data + data.strides[0] * self._at, data)

    def _tensordict(self, data: TensorDictBase) -> None:
        batch, names = self._inner(data), data.names[1:]
        keys = tuple(data.keys())
        device = None if data.device is None else "cpu"
        self._key += (
            "tensordict",
            len(batch),
            device,
            tuple(names) if any(names) else None,
            keys,
        )
        self._batch_dims += batch
        plainly = type(data) is TensorDict
        for key in keys:
            try:
                self.add(data._tensordict[key] if plainly else data.get(key))
            except RefusedError as error:
                raise error.under(key) from None

    def _inner(self, data: Any) -> torch.Size:
        """The batch size of one item."""
        if data.batch_size[:1] != (self._count,):
            raise _ApartError
        inner: torch.Size = data.batch_size[1:]
        return inner

    def _object(self, data: Any) -> None:
        """One object for all items."""
        batch = self._inner(data)
        self._key += ("object", len(batch))
        self._batch_dims += batch
        one = describe(data.data)
        columns = of_described([one])
        self._key += one.kind.key
        self._batch_dims += one.batch_dims
        for at, dims in enumerate(columns.dims):
            self._leaf(dims[0].tolist(), int(columns.addresses[0, at]), columns.keeps)

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
        if key[0:2] != ("object", 0) or len(key) != 3 or any(one.kind.key != key for one in found):
            raise _ApartError
        columns = of_described(found)
        self._key += key
        self._dims += columns.dims
        self._addresses.append(columns.addresses[:, 0])
        self._keeps.append(columns.keeps)
