"""The way of leaves to their places.

A transfer collects where the columns go. Then one native call a form moves what is stored raw, and
one call of ``expand`` decompresses the rest to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.places import Places
from shmbuffer.items.records.table import Column, Raw
from shmbuffer.memory import record_format
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.record_format import Located

Expand = Callable[[Places, str], None]
"""Decompresses frames to their places. The text is where they are from, for messages."""


class Transfer:
    """Pieces on their way to their places; each frame is decompressed once.

    Cost: 15 µs, and 2 a column; beyond that a copy of each piece, or its decompression.
    """

    def __init__(
        self,
        expand: Expand | None,  # decompresses what is stored with zstd; None: nothing is
        data: Bytes,  # the bytes of the batch, in which all compressed pieces lie
        where: str,  # the buffer's name in messages
    ) -> None:
        self._expand = expand
        self._data = data
        self._where = where
        self._raw: list[tuple[Ints, ...]] = []  # from, sizes, to
        # Where each piece of each record goes, int64[pieces, m], 0: nowhere; or int64[pieces]: the
        # first of each, and the others behind it.
        self._stored: dict[int, tuple[Located, Ints]] = {}
        self._kept: list[Any] = []

    def add(self, column: Column, to: Ints, kept: Any) -> None:
        """Row i of a column goes to address ``to[i]``, in one run; ``kept`` owns it."""
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
        """Row 0 of the leaves of all pieces goes to these addresses, the next ones behind it."""
        self._kept.append(kept)
        self._stored[id(located)] = located, np.array(first, np.int64)

    def move(self, addresses: Ints, sizes: Ints, to: Ints, kept: Any) -> None:
        """So many bytes go from address to address. What is in ``kept`` is there until then."""
        self._kept.append(kept)
        self._raw.append((addresses, sizes, to))

    def run(self) -> None:
        """Everything goes to its place."""
        if self._stored:
            self._take_apart()
        if self._raw:
            record_format.move(*(np.concatenate(parts) for parts in zip(*self._raw, strict=True)))
        self._raw, self._stored, self._kept = [], {}, []

    def _take_apart(self) -> None:
        """Moves what is stored raw, and decompresses the rest."""
        base = address(self._data)
        room = sum([located.offsets.size for located, _ in self._stored.values()])
        out = np.empty((len(Places._fields), room), np.int64)
        frames = parts = 0
        for located, to in self._stored.values():
            rows, pieces = located.offsets.shape
            frames, parts = _core.take_apart(
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
                f"{self._where}: its records are compressed with zstd, and this storage reads raw "
                "ones only: open it as the CompressedListStorage that it is"
            )
        self._expand(Places(*out[:3, :frames], *out[3:, :parts]), self._where)


def homes(nbytes: Ints) -> tuple[Ints, int]:
    """Places for runs of bytes one behind the other: int64[n], and where the last ends."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0
