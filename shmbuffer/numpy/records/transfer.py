"""The way of leaves to their places.

A transfer collects the pieces of all columns. Then one native call moves those that are stored raw,
and one call of ``expand`` decompresses the others to where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory import record_format
from shmbuffer.memory.record_format import Codec
from shmbuffer.numpy.arrays import address_of
from shmbuffer.numpy.records.compression import Destination
from shmbuffer.numpy.records.table import Column
from shmbuffer.numpy.records.views import writable

Expand = Callable[[Sequence[memoryview], Sequence[Destination], str], None]
"""Decompresses each source into the destination beside it, which has just its size. The text is
where they are from, for messages."""


class Transfer:
    """Pieces on their way to their places; equal bytes are decompressed once.

    Cost: 15 µs, and 4 a column; beyond that a copy of each piece, or its decompression.
    """

    def __init__(
        self,
        expand: Expand | None,  # decompresses what is stored with zstd; None: nothing is
        data: NDArray[np.uint8],  # the bytes of the batch, in which all compressed pieces lie
        where: str,  # the buffer's name in messages
    ) -> None:
        self._expand = expand
        self._data = data
        self._where = where
        self._raw: list[tuple[NDArray[np.int64], ...]] = []  # from, sizes, to
        self._packed: list[_Packed] = []
        self._joined: list[_Joined] = []
        self._kept: list[Any] = []

    def add(self, column: Column, out: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
        """Row i of a column goes to byte ``starts[i]`` of ``out``, in one run."""
        base = address_of(out)
        self._kept.append(out)
        for rows, codec, placed, addresses, sizes, kept, frame in column.pieces:
            self._kept.append(kept)
            if frame is not None:
                self._joined.append(
                    _Joined(
                        addresses[:, 0],
                        sizes[:, 0],
                        starts[rows] + base,
                        column.nbytes[rows],
                        *frame,
                    )
                )
                continue
            count = addresses.shape[1]
            to = starts[rows][:, None]
            nbytes = column.nbytes[rows][:, None] // count
            if count > 1:
                to = to + nbytes * np.arange(count)
                nbytes = np.broadcast_to(nbytes, to.shape)
            if codec is Codec.ZSTD:
                self._packed.append(
                    _Packed(out, placed, *map(np.ravel, (addresses, sizes, to, nbytes)))
                )
            else:
                self.move(addresses, sizes, to + base)

    def move(
        self,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        to: NDArray[np.int64],
        kept: Any = None,
    ) -> None:
        """So many bytes go from address to address. What is in ``kept`` is there until then."""
        self._kept.append(kept)
        self._raw.append((addresses.ravel(), sizes.ravel(), to.ravel()))

    def run(self) -> None:
        """Everything goes to its place."""
        if self._packed or self._joined:
            self._decompress()
        if self._raw:
            record_format.move(*(np.concatenate(parts) for parts in zip(*self._raw, strict=True)))
        self._raw, self._packed, self._joined, self._kept = [], [], [], []

    def _decompress(self) -> None:
        if self._expand is None:
            raise RuntimeError(
                f"{self._where}: its records are compressed with zstd, and this storage reads raw "
                "ones only: open it as the CompressedListStorage that it is"
            )
        sources, destinations = self._frames()
        if not self._packed:
            self._expand(sources, destinations, self._where)
            return
        at = np.concatenate([packed.addresses for packed in self._packed])
        sizes = np.concatenate([packed.sizes for packed in self._packed])
        nbytes = np.concatenate([packed.nbytes for packed in self._packed])
        to = np.concatenate([packed.to + address_of(packed.out) for packed in self._packed])
        wanted, again = nbytes > 0, np.zeros(len(at), np.bool_)
        if any(packed.placed for packed in self._packed):
            _, first, same = np.unique(at, return_index=True, return_inverse=True)
            leader = first[same]
            again = wanted & (leader != np.arange(len(at)))
            again &= (sizes == sizes[leader]) & (nbytes == nbytes[leader])
            wanted &= ~again
        at -= address_of(self._data)
        sources += _cut(self._data.data, at[wanted], sizes[wanted])
        end = 0
        for packed in self._packed:
            start, end = end, end + len(packed.to)
            chosen = wanted[start:end]
            destinations += _cut(packed.out.data, packed.to[chosen], packed.nbytes[chosen])
        self._expand(sources, destinations, self._where)
        if again.any():
            record_format.move(to[leader[again]], nbytes[again], to[again])

    def _frames(self) -> tuple[list[memoryview], list[Destination]]:
        """Frames that several columns lie in, part by part; unread parts go where nobody looks."""
        if not self._joined:
            return [], []
        every = [np.concatenate(parts) for parts in zip(*self._joined, strict=True)]
        order = np.lexsort((every[_BEFORE], every[0]))
        order = order[every[_NBYTES][order] > 0]
        at, sizes, to, nbytes, before, whole = (each[order] for each in every)
        ends = before + nbytes
        new = np.ones(len(at), np.bool_)
        new[1:] = at[1:] != at[:-1]
        reached = np.where(new, 0, np.roll(ends, 1))
        gaps = before - reached
        rests = np.where(np.roll(new, -1), whole - ends, 0)
        unwanted = np.empty(max(int(gaps.max(initial=0)), int(rests.max(initial=0))), np.uint8)
        self._kept.append(unwanted)
        destinations: list[Destination] = []
        parts: list[memoryview] = []
        for starts, place, size, gap, rest in zip(
            *(each.tolist() for each in (new, to, nbytes, gaps, rests)), strict=True
        ):
            if starts:
                parts = []
                destinations.append(parts)
            if gap:
                parts.append(unwanted.data[:gap])
            parts.append(writable(place, size))
            if rest:
                parts.append(unwanted.data[:rest])
        sources = _cut(self._data.data, at[new] - address_of(self._data), sizes[new])
        return sources, destinations


class _Joined(NamedTuple):
    """Parts of compressed frames, and the address to which each goes."""

    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    to: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    before: NDArray[np.int64]
    whole: NDArray[np.int64]


_NBYTES, _BEFORE = _Joined._fields.index("nbytes"), _Joined._fields.index("before")


class _Packed(NamedTuple):
    """Compressed pieces, and where in ``out`` they go."""

    out: NDArray[np.uint8]
    placed: bool
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    to: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def homes(nbytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Places for runs of bytes one behind the other: int64[n], and where the last ends."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0


def _cut(
    memory: memoryview, starts: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> list[memoryview]:
    ends = starts + nbytes
    return [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
