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
from shmbuffer.numpy.records.places import Places
from shmbuffer.numpy.records.planes import joined
from shmbuffer.numpy.records.table import Column

Expand = Callable[[Sequence[memoryview], Places, str], None]
"""Decompresses each source to its places. The text is where they are from, for messages."""


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
        self._turned: list[tuple[NDArray[np.int64], ...]] = []  # from, sizes, planes, to
        self._kept: list[Any] = []

    def add(self, column: Column, out: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
        """Row i of a column goes to byte ``starts[i]`` of ``out``, in one run."""
        base = address_of(out)
        self._kept.append(out)
        for rows, codec, _, addresses, sizes, kept, frame, planar in column.pieces:
            self._kept.append(kept)
            count = addresses.shape[1]
            to = starts[rows][:, None] + base
            nbytes = column.nbytes[rows][:, None]
            planes = np.ones(len(nbytes), np.int64)
            if planar:
                planes = column.dims[rows, -1]
                if count > 1 or codec is Codec.RAW:  # together first: a plane alone is none
                    to = self._turned_to(nbytes, planes, to)
                    planes = np.ones(addresses.size, np.int64)
            nbytes = nbytes // count
            if count > 1:
                to = to + nbytes * np.arange(count)
                nbytes = np.broadcast_to(nbytes, to.shape)
            if codec is not Codec.ZSTD and frame is None:
                self.move(addresses, sizes, to)
                continue
            part, goes = nbytes.ravel(), to.ravel()
            before, whole = (np.zeros_like(part), part) if frame is None else frame
            if len(planes) < len(part):
                planes = np.ones(len(part), np.int64)
            self._packed.append(
                _Packed(addresses.ravel(), sizes.ravel(), whole, before, part, goes, planes)
            )

    def _turned_to(
        self, nbytes: NDArray[np.int64], planes: NDArray[np.int64], to: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where planes go to first, int64[m, 1], and from there joined to their places."""
        starts, total = homes(nbytes.ravel())
        memory = np.empty(total, np.uint8)
        self._kept.append(memory)
        starts += address_of(memory)
        self._turned.append((starts, nbytes.ravel(), planes, to.ravel()))
        return starts[:, None]

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
        if self._packed:
            self._decompress()
        if self._raw:
            record_format.move(*(np.concatenate(parts) for parts in zip(*self._raw, strict=True)))
        for turned in self._turned:
            joined(*turned)
        self._raw, self._packed, self._turned, self._kept = [], [], [], []

    def _decompress(self) -> None:
        if self._expand is None:
            raise RuntimeError(
                f"{self._where}: its records are compressed with zstd, and this storage reads raw "
                "ones only: open it as the CompressedListStorage that it is"
            )
        every = [np.concatenate(parts) for parts in zip(*self._packed, strict=True)]
        at, sizes, whole, before, nbytes = every[:5]
        order = np.lexsort((before, whole, sizes, at))
        order = order[nbytes[order] > 0]
        if not len(order):
            return
        at, sizes, whole, before, nbytes, to, planes = (each[order] for each in every)
        new = np.ones(len(at), np.bool_)
        new[1:] = (at[1:] != at[:-1]) | (sizes[1:] != sizes[:-1]) | (whole[1:] != whole[:-1])
        places = Places(whole[new], np.cumsum(new) - 1, before, nbytes, to, planes)
        starts = at[new] - address_of(self._data)
        ends, memory = starts + sizes[new], self._data.data
        sources = [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        self._expand(sources, places, self._where)


class _Packed(NamedTuple):
    """Compressed frames, and the parts of them that go somewhere: int64[m] each."""

    at: NDArray[np.int64]
    """The address of the frame, of which there may be several parts."""
    sizes: NDArray[np.int64]
    """Bytes of the frame."""
    whole: NDArray[np.int64]
    """Bytes that it expands to."""
    before: NDArray[np.int64]
    """Of these, those in front of the part."""
    nbytes: NDArray[np.int64]
    """Of the part."""
    to: NDArray[np.int64]
    """The address that it goes to."""
    planes: NDArray[np.int64]
    """Of the part; see `Places`."""


def homes(nbytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Places for runs of bytes one behind the other: int64[n], and where the last ends."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0
