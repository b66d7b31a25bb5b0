"""Copies leaves to their destinations.

A transfer first collects the destinations of columns. Then one native call per form copies the raw
leaves, and one call of ``expand`` decompresses the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.decoding.table import Column, Raw
from shmbuffer.items.records.places import Places
from shmbuffer.memory import record_format
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.record_format import Located

Expand = Callable[[Places, str], None]
"""Decompresses frames to their places. The text names the source in messages."""


class Transfer:
    """Copies pieces to their destinations, and decompresses each frame once.

    Cost: 15 µs, 2 µs per column, and the copy or decompression of each piece.
    """

    def __init__(
        self,
        expand: Expand | None,  # decompresses zstd; None: nothing is compressed
        data: Bytes,  # bytes of the batch with all compressed pieces
        where: str,  # name of the buffer in messages
    ) -> None:
        self._expand = expand
        self._data = data
        self._where = where
        self._raw: list[tuple[Ints, ...]] = []  # sources, sizes, destinations
        # Destination of each piece of each record, int64 ``[pieces, m]`` (0: none), or int64
        # ``[pieces]``: that of the first row of each piece, with the others after it.
        self._stored: dict[int, tuple[Located, Ints]] = {}
        self._kept: list[Any] = []

    def add(self, column: Column, to: Ints, kept: Any) -> None:
        """Copies row i of a column to address ``to[i]``; ``kept`` owns the destinations."""
        self._kept.append(kept)
        for part in column.parts:
            goes = to[part.rows]
            if isinstance(part, Raw):
                self.move(part.addresses, part.sizes, goes, part.kept)
                continue
            found = self._stored.get(id(part.located))
            if found is None:
                shape = part.located.offsets.shape[::-1]
                found = self._stored[id(part.located)] = part.located, np.zeros(shape, np.int64)
            found[1][part.number] = goes

    def add_alike(self, located: Located, first: list[int], kept: list[Any]) -> None:
        """Copies all leaves to these addresses, row after row; ``kept`` owns the destinations."""
        self._kept.append(kept)
        self._stored[id(located)] = located, np.array(first, np.int64)

    def move(self, addresses: Ints, sizes: Ints, to: Ints, kept: Any) -> None:
        """Copies bytes between addresses in `run`. ``kept`` owns the memory of both."""
        self._kept.append(kept)
        self._raw.append((addresses, sizes, to))

    def run(self) -> None:
        """Copies all bytes to their destinations."""
        if self._stored:
            self._take_apart()
        if self._raw:
            record_format.move(*(np.concatenate(parts) for parts in zip(*self._raw, strict=True)))
        self._raw, self._stored, self._kept = [], {}, []

    def _take_apart(self) -> None:
        """Copies raw pieces, and decompresses the others."""
        base = address(self._data)
        room = sum([located.offsets.size for located, _ in self._stored.values()])
        out = np.empty((len(Places._fields), room), np.int64)
        frames = parts = 0
        for located, to in self._stored.values():
            rows, pieces = located.offsets.shape
            frames, parts = _core.distribute_pieces(
                base,
                address(located.form.columns.held),
                pieces,
                address(located.numbers),
                located.numbers.shape[1],
                address(located.offsets),
                address(located.sizes),
                address(located.expanded),
                rows,
                address(to),
                to.ndim == 2,
                address(out),
                room,
                frames,
                parts,
            )
        if not parts:
            return
        if self._expand is None:
            raise RuntimeError(
                f"{self._where}: the records are compressed with zstd, but this storage only reads "
                "uncompressed ones; open it as a CompressedListStorage"
            )
        self._expand(Places(*out[:3, :frames], *out[3:, :parts]), self._where)


def homes(nbytes: Ints) -> tuple[Ints, int]:
    """Returns offsets for consecutive runs of bytes, int64 ``[n]``, and the end of the last."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0
