"""Segment trees of sums and minima in the memory of this process, computed by the C core."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.items.indices import as_int
from shmbuffer.memory.format.array_types import Ints


class SegmentTree:
    """Stores numbers, and computes their sum or minimum over any range in O(log size).

    Indices and values can be numbers, arrays or tensors. Results have the type of the index. The
    tree is not shared with other processes, unlike the tree of a `PrioritizedSampler`.

    Args:
        size: number of elements, at least 1.

    Raises:
        ValueError: ``size`` is below 1.
    """

    _dtype: ClassVar[type[np.floating[Any]]]
    _least: ClassVar[bool]

    def __init__(self, size: int) -> None:
        self._size = as_int("size", size)
        if self._size < 1:
            raise ValueError(f"{type(self).__name__}: size must be at least 1, got {size}")
        sections = _core.sections(self._size, 1)
        self._nodes = np.full((sections["bytes"] - sections["mass"]) // 8, self.identity_element)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._size

    @property
    def capacity(self) -> int:
        """Smallest power of two above ``size``, as in TorchRL."""
        return 1 << self._size.bit_length()

    @property
    def identity_element(self) -> float:
        """Value of elements that were never set: 0 for sums, the largest number for minima."""
        return float(np.finfo(self._dtype).max) if self._least else 0.0

    def __len__(self) -> int:
        return self._size

    def at(self, index: Any) -> Any:
        """Returns the numbers at ``index``.

        Raises:
            IndexError: an index is out of range.
        """
        return _like(index, self._nodes[self._places(index)].astype(self._dtype))

    def update(self, index: Any, value: Any) -> None:
        """Sets the numbers at ``index``. If an index occurs twice, the last number is used.

        Args:
            index: indices, ``[n]``, or a single index.
            value: numbers, ``[n]``, or a single number for all indices.

        Raises:
            IndexError: an index is out of range. Nothing was changed.
            ValueError: a value is NaN, or there are not as many values as indices. Nothing was
                changed.
        """
        places, values = self._places(index), _numbers(value, self._dtype)
        if values.size not in (1, places.size) or np.isnan(values).any():
            raise ValueError(
                f"the value for {places.size} indices of a {type(self).__name__} must be a number "
                f"or {places.size} numbers, without NaN, got {value!r:.200}"
            )
        self._nodes[places] = values
        _core.tree_update(self._at, self._size, self._least, places.ctypes.data, places.size)

    __getitem__ = at
    __setitem__ = update

    def query(self, left: Any, right: Any) -> Any:
        """Returns the sum or minimum of the numbers from ``left`` to ``right - 1``.

        An empty range has the value `identity_element`. Indices below 0 or above `size` are
        clipped.
        """
        ends = [_numbers(end, np.int64).clip(0, self._size) for end in (left, right)]
        first, end = (np.ascontiguousarray(one) for one in np.broadcast_arrays(*ends))
        found = np.empty(first.size)
        _core.tree_query(
            *(self._at, self._size, self._least, first.ctypes.data, end.ctypes.data),
            *(found.ctypes.data, found.size),
        )
        found = np.where(first < end, found, self.identity_element)
        return _like(left, found.astype(self._dtype))

    def __getstate__(self) -> tuple[NDArray[Any]]:
        return (self._nodes[: self._size].astype(self._dtype),)

    def __setstate__(self, state: tuple[NDArray[Any]]) -> None:
        SegmentTree.__init__(self, len(state[0]))
        self.update(np.arange(self._size), state[0])

    @property
    def _at(self) -> int:
        return self._nodes.ctypes.data

    def _places(self, index: Any) -> Ints:
        """Returns a copy of the indices as an array, int64 ``[n]``.

        Raises IndexError if an index is out of range.
        """
        places = _numbers(index, np.int64).copy()
        wrong = places[(places < 0) | (places >= self._size)]
        if len(wrong):
            raise IndexError(
                f"index {wrong[0]} is out of range for a {type(self).__name__} with {self._size} "
                f"numbers; indices must be from 0 to {self._size - 1}"
            )
        return places


class _Sums(SegmentTree):
    _least = False

    def scan_lower_bound(self, value: Any) -> Any:
        """Returns the first index at which the running sum is at least ``value``.

        The result is ``size`` if the sum of all numbers is smaller than ``value``. If the tree
        contains negative numbers, the result is undefined.
        """
        values = _numbers(value, np.float64)
        found = np.empty(values.size, np.int64)
        _core.tree_lower_bound(
            self._at, self._size, values.ctypes.data, found.ctypes.data, found.size
        )
        return _like(value, found)


class SumSegmentTreeFp32(_Sums):
    """Tree of sums of float32 numbers. Sums are computed in float64; see `SegmentTree`.

    Example:
        >>> from shmbuffer import SumSegmentTreeFp32
        >>> tree = SumSegmentTreeFp32(4)
        >>> tree[0], tree[2] = 1, 3
        >>> tree.query(0, 4), tree.scan_lower_bound(1.5)
        (4.0, 2)

    Source: ``torchrl.data.replay_buffers.SumSegmentTreeFp32``.
    """

    _dtype = np.float32


class SumSegmentTreeFp64(_Sums):
    """Tree of sums of float64 numbers; see `SumSegmentTreeFp32`.

    Source: ``torchrl.data.replay_buffers.SumSegmentTreeFp64``.
    """

    _dtype = np.float64


class MinSegmentTreeFp32(SegmentTree):
    """Tree of minima of float32 numbers; see `SegmentTree`.

    Example:
        >>> from shmbuffer import MinSegmentTreeFp32
        >>> tree = MinSegmentTreeFp32(4)
        >>> tree[0], tree[2] = 1, 3
        >>> tree.query(0, 4), tree.query(1, 4)
        (1.0, 3.0)

    Source: ``torchrl.data.replay_buffers.MinSegmentTreeFp32``.
    """

    _dtype = np.float32
    _least = True


class MinSegmentTreeFp64(SegmentTree):
    """Tree of minima of float64 numbers; see `MinSegmentTreeFp32`.

    Source: ``torchrl.data.replay_buffers.MinSegmentTreeFp64``.
    """

    _dtype = np.float64
    _least = True


def _numbers(value: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Converts a number, an array or a tensor to an array ``[n]``.

    Raises TypeError if ``dtype`` is int64 and the numbers are not integers.
    """
    array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if dtype is np.int64 and array.size and array.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinity
        return np.ascontiguousarray(array.reshape(-1), dtype)


def _like(index: Any, values: NDArray[Any]) -> Any:
    """Returns values with the type, shape and device of the index ``index``."""
    if isinstance(index, torch.Tensor):
        return torch.from_numpy(values).reshape(index.shape).to(index.device)
    return values.reshape(np.shape(index)) if np.ndim(index) else values[0].item()
