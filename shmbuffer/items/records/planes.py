"""Stores leaves plane by plane if zstd then compresses them better.

    in an item   [84, 84, 4]      a0 b0 c0 d0 a1 b1 c1 d1 ...     the last dim varies fastest
    stored       four planes      a0 a1 a2 ... b0 b1 b2 ...       each plane is one image

If images are stacked along the last dimension, their bytes alternate, and zstd finds fewer
repetitions. Stored as planes, they compress as well as images that are stacked along the first
dimension. The encoder compresses the first items in both forms to find out which one is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.columns import Columns
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.record_format import Chunk

Measure = Callable[[], tuple[int, int, int]]
"""A function that compresses items in the usual form and in the other form.

It returns the number of items, and their compressed size in bytes in each of the two forms.
"""

_LEAST_PLANE_BYTES = 64  # smaller planes are not worth splitting a leaf
_MOST_PLANES = 16  # leaves with more planes are not stacks of images
_LOOKED_ITEMS = 32  # number of items that are compressed in both forms
_WORTH = 0.95  # largest accepted ratio of the sizes, because splitting takes time


class Trial:
    """Determines from the first items whether another form of storing leaves saves bytes."""

    def __init__(self, worth: float) -> None:
        self._worth = worth  # largest accepted ratio of the other size to the usual size
        self._items = self._usual = self._other = 0

    def pays(self, measure: Measure) -> bool:
        """True if the other form saves enough bytes.

        Calls ``measure`` unless enough items have been measured in earlier calls.
        """
        if self._items < _LOOKED_ITEMS:
            items, usual, other = measure()
            self._items += items
            self._usual += usual
            self._other += other
        return self._other < self._worth * self._usual


class Planes:
    """Decides which leaves are stored plane by plane, for items of one `Kind`."""

    def __init__(self, chunks: Sequence[Chunk], compressible: Collection[int]) -> None:
        self._seen = {
            leaf: Trial(_WORTH)
            for leaf in compressible
            if chunks[leaf].rank > 1 and _fits(chunks[leaf])
        }

    @property
    def leaves(self) -> Collection[int]:
        """Numbers of the leaves that can be stored plane by plane."""
        return self._seen.keys()

    def pays(self, leaf: int, planes: int, size: int, measure: Measure) -> bool:
        """True if a leaf should be stored plane by plane.

        ``planes`` is the size of its last dimension, and ``size`` its size in bytes. ``measure`` is
        passed to `Trial.pays`.
        """
        if not 1 < planes <= _MOST_PLANES or size < planes * _LEAST_PLANE_BYTES:
            return False
        return self._seen[leaf].pays(measure)


def _fits(chunk: Chunk) -> bool:
    return chunk.itemsize == 1 and chunk.kind in ("tensor", "array")


def turned(addresses: Ints, sizes: Ints, planes: Sequence[int]) -> tuple[Bytes, Ints]:
    """Splits m leaves of n items into planes in newly allocated memory.

    Args:
        addresses: address of each leaf, int64 ``[n, m]``.
        sizes: size of each leaf in bytes, int64 ``[n, m]``.
        planes: number of planes of each of the m leaves.

    Returns:
        The allocated memory, and the new address of each leaf, int64 ``[n, m]``. The leaves of one
        item are adjacent.
    """
    ends = np.cumsum(sizes).reshape(sizes.shape)
    memory = np.empty(int(ends[-1, -1]), np.uint8)
    to = address(memory) + ends - sizes
    counts = np.empty(sizes.shape, np.int64)
    counts[:] = planes
    addresses, sizes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
    _core.split_planes(address(addresses), address(sizes), address(counts), address(to), to.size)
    return memory, to


def turned_one(at: int, size: int, planes: int) -> Bytes:
    """Splits a leaf of ``size`` bytes at an address into planes, and returns these as one array."""
    memory = np.empty(size, np.uint8)
    given = address(one := np.array([at, size, planes, address(memory)]))
    _core.split_planes(given, given + 8, given + 16, given + 24, len(one) // 4)
    return memory


def as_planes(columns: Columns, leaves: Sequence[int]) -> Columns:
    """Returns a copy of the columns in which the given leaves are split into planes.

    The ``dims`` of the leaves do not change.
    """
    if not leaves:
        return columns
    addresses, which = columns.addresses.copy(), list(leaves)
    planes = [int(columns.dims[leaf][0, -1]) for leaf in leaves]
    memory, addresses[:, which] = turned(addresses[:, which], columns.sizes[:, which], planes)
    return replace(columns, addresses=addresses, keeps=[*columns.keeps, memory], leaves=None)
