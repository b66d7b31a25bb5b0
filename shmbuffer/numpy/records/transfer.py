"""The way of leaves to their places.

A transfer collects the pieces of all columns. Then one native call moves those that are stored raw,
and one call of ``expand`` decompresses the others to where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory import record_format
from shmbuffer.memory.record_format import Codec
from shmbuffer.memory.record_format.pieces import address
from shmbuffer.numpy.arrays import address_of
from shmbuffer.numpy.records.places import Places
from shmbuffer.numpy.records.planes import joined
from shmbuffer.numpy.records.table import Column, TablePieces

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
        self._packed: list[NDArray[np.int64]] = []
        self._turned: list[tuple[NDArray[np.int64], ...]] = []  # from, sizes, planes, to
        self._kept: list[Any] = []

    def add(self, column: Column, to: NDArray[np.int64], kept: Any) -> None:
        """Row i of a column goes to address ``to[i]``, in one run; ``kept`` owns it."""
        self._kept.append(kept)
        for part in column.pieces:
            self._kept.append(part.kept)
            nbytes, goes, planes = column.nbytes[part.rows], to[part.rows], 1
            if part.planar or part.addresses.shape[1] > 1:
                nbytes, goes, planes = self._apart(part, nbytes, goes, column.dims[part.rows, -1])
            if part.codec is not Codec.ZSTD and part.frame is None:
                self.move(part.addresses, part.sizes, goes)
                continue
            before, whole = (0, nbytes) if part.frame is None else part.frame
            self._packed.append(
                _packed(
                    part.addresses.ravel(),
                    part.sizes.ravel(),
                    whole,
                    before,
                    nbytes,
                    goes,
                    planes,
                )
            )

    def _apart(
        self,
        part: TablePieces,
        nbytes: NDArray[np.int64],
        to: NDArray[np.int64],
        last: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
        """Bytes, addresses and planes of all pieces of rows that are stored in several, or turned.

        ``last`` are the last dims of the rows.
        """
        count, planes = part.addresses.shape[1], np.ones_like(last)
        if part.planar and (count > 1 or part.codec is Codec.RAW):
            to = self._turned_to(nbytes, last, to)  # together first: a plane alone is none
        elif part.planar:
            planes = last
        each = nbytes // count
        goes = to[:, None] + each[:, None] * np.arange(count)
        return np.repeat(each, count), goes.ravel(), planes if count == 1 else 1

    def _turned_to(
        self, nbytes: NDArray[np.int64], planes: NDArray[np.int64], to: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where planes go to first, and from there joined to their places."""
        starts, total = homes(nbytes)
        memory = np.empty(total, np.uint8)
        self._kept.append(memory)
        starts += address_of(memory)
        self._turned.append((starts, nbytes, planes, to))
        return starts

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
        parts = np.concatenate(self._packed, axis=1)
        count = parts.shape[1]
        out = np.empty((_ARRANGED, count), np.int64)
        arrange = (address(parts), count, address_of(self._data), address(out))
        frames, left = _core.arrange_parts(*arrange)
        if not frames:
            return
        starts, ends, whole = out[:3, :frames]
        memory = self._data.data
        sources = [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        self._expand(sources, Places(whole, *out[3:, :left]), self._where)


_ARRANGED = 3 + len(Places._fields) - 1
"""Rows of what `_core.arrange_parts` gives: three of frames, then those of their parts."""


def _packed(*columns: Any) -> NDArray[np.int64]:
    """Parts of compressed frames as `_core.arrange_parts` takes them: int64[7, m].

    The address of the frame, the bytes of it and those that it expands to; of these those in front
    of the part, its own, the address that it goes to, and its planes (see `Places`).
    """
    parts = np.empty((len(columns), columns[0].size), np.int64)
    for row, column in zip(parts, columns, strict=True):
        row[:] = column
    return parts


def homes(nbytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Places for runs of bytes one behind the other: int64[n], and where the last ends."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0
