"""Frames that consecutive items have in common, so that they are stored once.

    row        0        1        2        3          pieces of a stack of three frames
    pieces     a b c    b c d    c d e    d e f
    held by    0 1 2    1 2 3    2 3 3    3 3 3      the last row that has it: a, b, c go with it

A record reaches as far as the last row that holds a piece of it, and is read as one stretch of
bytes: so that row is at most `REACH` ahead, and what is needed further ahead is stored again.

Equal means equal, byte for byte: checksums only say what is worth comparing.

A leaf ``[F, ...]`` may be a stack of F frames, or one piece, or nothing that is worth sharing:
which of them takes the fewest bytes is seen from the first items.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.record_format import Chunk
from shmbuffer.numpy.records.columns import Columns

REACH = 8
INLINE = -1
"""In place of a number of frames: the leaf lies in its record, and is not shared."""

_LEAST_BYTES = 256  # of a leaf
_LEAST_FRAME_BYTES = 64
_MOST_FRAMES = 16  # beyond, it is no stack: the rows of an image, the steps of an episode
_PLACE_BYTES = 8  # what a record says of a piece that has a place of its own
_LOOKED_ROWS = 64
_MOST_GROUPS = 32  # of a kind: leaves whose shape is never the same are not worth a look


class Cut(NamedTuple):
    """How the leaves of items are cut."""

    frames: tuple[int, ...]
    """For each leaf the number of frames, 0 for one piece, or `INLINE`."""
    heads: tuple[int, ...]
    """For each leaf the first of those that it may have frames in common with."""

    @classmethod
    def none(cls, leaves: int) -> Cut:
        """Every leaf lies in its record."""
        return cls((INLINE,) * leaves, tuple(range(leaves)))


class SharedPieces(NamedTuple):
    """The leaves of n items, cut into what is stored on its own."""

    addresses: Ints
    """int64[n, pieces]; leaf after leaf."""
    sizes: Ints
    """int64[n, pieces], bytes."""
    leaves: Ints
    """int64[pieces]: the leaf of each."""


def cut(columns: Columns, frames: Sequence[int]) -> SharedPieces:
    """Cuts leaves into frames."""
    if max(frames, default=0) <= 1:
        return SharedPieces(columns.addresses, columns.sizes, np.arange(len(frames)))
    counts = np.maximum(frames, 1)
    leaves = np.repeat(np.arange(len(frames)), counts)
    number = np.arange(len(leaves)) - (np.cumsum(counts) - counts)[leaves]  # of it in its leaf
    sizes = columns.sizes[:, leaves] // counts[leaves]
    return SharedPieces(columns.addresses[:, leaves] + number * sizes, sizes, leaves)


def find_equal(addresses: Ints, sizes: Ints, reach: int = REACH) -> Ints:
    """The piece that holds the bytes of each, int64[n, pieces]: itself, or one of its row or later.

    Pieces are numbered row after row. Cost: that of reading all twice, and 0.2 µs a piece.
    """
    count, width = addresses.shape
    at, nbytes = addresses.ravel(), sizes.ravel()
    groups = _groups(at, nbytes)
    # Of a group in the order of rows, and in a row backwards: the last one is its first there.
    backward = np.arange(count * width).reshape(count, width)[:, ::-1].ravel()
    order = backward[np.argsort(groups[backward], kind="stable")]
    of, rows = groups[order], order // max(width, 1)
    holders = np.empty(count * width, np.int64)
    left = np.arange(count * width)
    while left.size:
        # The last row of each group owns for those in reach; the rest go on without them.
        ends = np.flatnonzero(np.append(of[left][1:] != of[left][:-1], True))
        last = np.repeat(left[ends], np.diff(ends, prepend=-1))
        near = rows[left] >= rows[last] - reach
        holders[order[left[near]]] = order[last[near]]
        left = left[~near]
    return holders.reshape(count, width)


def are_held(holders: Ints) -> Flags:
    """bool[n, pieces]: those that hold their own bytes, which are all that is to be stored."""
    return np.equal(holders, np.arange(holders.size).reshape(holders.shape))


def _groups(at: Ints, nbytes: Ints) -> Ints:
    """A number for each piece, the same for equal ones."""
    groups = np.arange(at.size)
    for size in np.unique(nbytes).tolist():
        if not size:
            continue
        mine = np.flatnonzero(nbytes == size)
        from_ = np.ascontiguousarray(at[mine])
        sums = np.empty(mine.size, np.uint32)
        _core.checksum_pieces(address(from_), size, mine.size, address(sums))
        order = np.argsort(sums, kind="stable")
        ordered = sums[order]
        # Of those with one sum each is compared with the one before: what equals it, equals all
        # that it equals.
        later = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        one, other = from_[order[later - 1]], from_[order[later]]
        same = np.zeros(later.size, np.uint8)
        _core.same_pieces(address(one), address(other), size, later.size, address(same))
        first = np.arange(mine.size)
        first[later[same != 0]] = -1
        first = np.maximum.accumulate(first)  # of each run of equal ones
        groups[mine[order]] = mine[order[first]]
    return groups


@dataclass
class _Group:
    """Leaves of one dtype and shape, which may have frames in common."""

    leaves: tuple[int, ...]
    costs: dict[int, int]
    """Bytes that the items which were looked at take, by number of frames."""
    rows: int = 0

    @property
    def best(self) -> int:
        """The number of frames that takes the fewest."""
        return min(self.costs, key=lambda way: self.costs[way])


class Layout:
    """How the leaves of one kind of items are cut, as far as is known."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        # leaves that may be compressed. What is compressed is never stored as one with what is not
        compressible: Collection[int],
        # bytes that pieces take when they are compressed: called with addresses and sizes,
        # int64[m], or int64[n, leaves] of leaves that may be compressed as one; None: leaves are
        # not shared
        measure: Callable[[Ints, Ints], int] | None,
    ) -> None:
        self.whole = Cut.none(len(chunks))
        self._chunks = chunks
        self._compressible = compressible
        self._measure = measure
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._whole: set[tuple[object, ...]] = set()  # shapes of items that stay so

    def cut(self, columns: Columns, planar: Collection[int], *, look: bool) -> Cut:
        """How the leaves of these items are cut: `whole` itself where leaves are not shared.

        The first 64 items are compressed three times.
        """
        if self._measure is None:
            return self.whole
        frames, heads = map(list, self.whole)
        for signature, leaves in self._alike(columns, planar).items():
            group = self._groups.get(signature)
            if group is None:
                if len(self._groups) >= _MOST_GROUPS:
                    continue
                group = self._groups[signature] = _Group(leaves, {INLINE: 0})
            if look and group.rows < _LOOKED_ROWS:
                along = -1 if leaves[0] in planar else 0
                self._look(group, columns, int(columns.dims[leaves[0]][0, along]))
            best = group.best
            for leaf in leaves:
                frames[leaf] = best
                if best != INLINE:
                    heads[leaf] = leaves[0]
        return Cut(tuple(frames), tuple(heads))

    def stays_whole(
        self, dims: Sequence[int], sizes: Sequence[int], planar: Collection[int]
    ) -> bool:
        """Whether `cut` neither cuts one item nor learns from it; once it does not, it stays so."""
        shapes = (*dims, planar)
        if self._measure is None or shapes in self._whole:
            return True
        first = 0
        for leaf, (chunk, size) in enumerate(zip(self._chunks, sizes, strict=True)):
            shape = dims[first : first + chunk.rank]
            first += chunk.rank
            if not _is_large(chunk, size):
                continue
            group = self._groups.get(self._signature(leaf, chunk, shape, planar, alone=True))
            if group is None:
                if len(self._groups) < _MOST_GROUPS:
                    return False
            elif group.rows < _LOOKED_ROWS or group.best != INLINE:
                return False
        if len(self._whole) >= _MOST_GROUPS:
            self._whole.clear()
        self._whole.add(shapes)
        return True

    def _look(self, group: _Group, columns: Columns, stack: int) -> None:
        """Adds what some rows take, for each way to cut them."""
        rows = min(len(columns), _LOOKED_ROWS)
        first = group.leaves[0]
        ways = [INLINE, 0]
        if (
            2 <= stack <= _MOST_FRAMES
            and len(columns.dims[first][0]) > 1
            and columns.sizes[0, first] >= stack * _LEAST_FRAME_BYTES
        ):
            ways.append(stack)
        for way in ways:
            frames = [way if leaf in group.leaves else INLINE for leaf in range(len(columns.dims))]
            pieces = cut(columns, frames)
            mine = np.isin(pieces.leaves, group.leaves)
            addresses, sizes = pieces.addresses[:rows, mine], pieces.sizes[:rows, mine]
            cost = 0
            if way != INLINE:
                held = are_held(find_equal(addresses, sizes))
                cost = _PLACE_BYTES * addresses.size
                addresses, sizes = addresses[held], sizes[held]
            measure = self._measure if first in self._compressible else None
            measured = sizes.sum() if measure is None else measure(addresses, sizes)
            group.costs[way] = group.costs.get(way, 0) + cost + int(measured)
        group.rows += rows

    def _alike(
        self, columns: Columns, planar: Collection[int]
    ) -> dict[tuple[object, ...], tuple[int, ...]]:
        """Leaves that are large enough to be shared, by what they need to have in common for it."""
        found: dict[tuple[object, ...], tuple[int, ...]] = {}
        for leaf, (chunk, dims) in enumerate(zip(self._chunks, columns.dims, strict=True)):
            if _is_large(chunk, int(columns.sizes[0, leaf])) and (dims == dims[0]).all():
                alone = len(columns) == 1
                signature = self._signature(leaf, chunk, dims[0].tolist(), planar, alone)
                found[signature] = (*found.get(signature, ()), leaf)
        return found

    def _signature(
        self, leaf: int, chunk: Chunk, shape: Sequence[int], planar: Collection[int], alone: bool
    ) -> tuple[object, ...]:
        """An item that is alone has other frames in common than those of a batch."""
        compressible = leaf in self._compressible
        return (alone, chunk.kind, chunk.dtype, compressible, leaf in planar, *shape)


def _is_large(chunk: Chunk, size: int) -> bool:
    return size >= _LEAST_BYTES and chunk.rank > 0 and chunk.kind in ("tensor", "array")
