"""Copies leaves to their destinations.

A transfer first collects the destinations of all columns. Then one native call per form copies the
raw leaves, and one call of ``expand`` decompresses the others.
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
"""A function that decompresses frames to their destinations, such as `Zstd.expand`.

Its second argument names the source of the frames in error messages.
"""


class Transfer:
    """Copies pieces to their destinations, and decompresses each frame once.

    Cost: 15 µs, 2 µs per column, and the time for copying or decompressing each piece.
    """

    def __init__(
        self,
        expand: Expand | None,  # decompresses zstd frames; None if nothing is compressed
        data: Bytes,  # bytes of the batch
        where: str,  # name of the buffer in messages
    ) -> None:
        self._expand = expand
        self._data = data
        self._where = where
        self._raw: list[tuple[Ints, ...]] = []  # sources, sizes and destinations
        # Destination of each piece in each record, int64 ``[pieces, m]``, or 0 if the piece is not
        # copied. Or int64 ``[pieces]``: the destination of each piece in the first record, which is
        # followed by the same piece of the other records.
        self._stored: dict[int, tuple[Located, Ints]] = {}
        self._kept: list[Any] = []

    def add(self, column: Column, to: Ints, kept: Any) -> None:
        """Registers a column, whose row i `run` copies to the address ``to[i]``.

        ``kept`` owns the destinations, and is kept alive until then.
        """
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
        """Registers all leaves of records of one form, which `run` copies.

        Leaf k of the first record is copied to the address ``first[k]``, followed by leaf k of the
        other records. ``kept`` owns the destinations, and is kept alive until then.
        """
        self._kept.append(kept)
        self._stored[id(located)] = located, np.array(first, np.int64)

    def move(self, addresses: Ints, sizes: Ints, to: Ints, kept: Any) -> None:
        """Registers bytes that `run` copies from ``addresses`` to the addresses ``to``.

        ``sizes`` has the numbers of bytes. ``kept`` is kept alive until then.
        """
        self._kept.append(kept)
        self._raw.append((addresses, sizes, to))

    def run(self) -> None:
        """Copies or decompresses everything that was registered."""
        if self._stored:
            self._take_apart()
        if self._raw:
            record_format.move(*(np.concatenate(parts) for parts in zip(*self._raw, strict=True)))
        self._raw, self._stored, self._kept = [], {}, []

    def _take_apart(self) -> None:
        """Copies raw pieces to their destinations, and decompresses the others."""
        base = address(self._data)
        room = sum([located.offsets.size for located, _ in self._stored.values()])
        out = np.empty((len(Places._fields), room), np.int64)
        frames = parts = 0
        for located, to in self._stored.values():
            rows, pieces = located.offsets.shape
            frames, parts = _core.distribute_pieces(
                base,
                address(located.form.columns.storage),
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
    """Returns offsets of n adjacent blocks of these sizes, int64 ``[n]``, and their total size."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0
