"""Decides once for all items of a kind which leaves are compressed, and how.

Leaves may be compressed as one, because they hold partly the same: the next observation of a stack
of frames is the observation but for one frame. Candidates have one dtype and size; whether it pays
is seen from the first items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shmbuffer.items.kept import Kept
from shmbuffer.items.records.forms import Kind, TreePath
from shmbuffer.items.records.planes import Planes, Trial
from shmbuffer.memory.record_format import Chunk, Codec, Form, encode_form

_LEAST_BYTES = 64  # of a leaf that is compressed without being named
_LOOKED_PIECES = 32  # after so many it is known whether a leaf gets smaller
_KEPT_FORMS = 64

#: Kinds of leaves that can be compressed. Numbers that are one with their item are too small.
COMPRESSIBLE = {
    Codec.RAW: (),
    Codec.ZSTD: ("tensor", "array", "number", "bytes", "str"),
    Codec.OWN: ("tensor", "array", "number", "bytes"),
}


Unit = tuple[int, ...]
"""Leaves of one frame, ascending; the first is the head, the others are joined to it."""

_LEAST_UNIT_BYTES = 256  # of a leaf
_WORTH = 0.9  # together they take at most so much of what they take apart: to read one expands all
_MOST_GROUPS = 32  # of a kind: sizes that are never the same are not worth a look


class Units:
    """Which leaves of one kind of items are compressed as one, as far as is known."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._seen: dict[Unit, Trial] = {}

    def of(
        self,
        leaves: Sequence[int],
        sizes: Sequence[int],
        measure: Callable[[Unit], tuple[int, int, int]],
    ) -> list[Unit]:
        """Leaves that are to be compressed, those as one that belong together."""
        groups: dict[tuple[object, ...], Unit] = {}
        for leaf in leaves:
            chunk, size = self._chunks[leaf], sizes[leaf]
            key: tuple[object, ...] = (leaf,)
            if size >= _LEAST_UNIT_BYTES and chunk.kind in ("tensor", "array"):
                key = (chunk.kind, chunk.dtype, size)
            groups[key] = (*groups.get(key, ()), leaf)
        units: list[Unit] = []
        for group in groups.values():
            if len(group) > 1 and self._pays(group, measure):
                units.append(group)
            else:
                units += [(leaf,) for leaf in group]
        return units

    def _pays(self, group: Unit, measure: Callable[[Unit], tuple[int, int, int]]) -> bool:
        if group not in self._seen and len(self._seen) >= _MOST_GROUPS:
            return False
        return self._seen.setdefault(group, Trial(_WORTH)).pays(lambda: measure(group))


class EncodingPlan:
    """How items of one kind are stored; ``units`` and ``planes`` say more about their leaves."""

    def __init__(
        self,
        kind: Kind,  # of the items
        codec: Codec,  # of what is compressed; RAW: nothing is
        # which leaves are compressed: paths that lead to them; None: with zstd those of 64 bytes
        # and more that it makes smaller, with the user's functions all
        keys: frozenset[TreePath] | None,
    ) -> None:
        self.kind = kind
        self.codec = codec
        self.compressible = tuple(
            leaf
            for leaf, (chunk, path) in enumerate(zip(kind.chunks, kind.paths, strict=True))
            if chunk.kind in COMPRESSIBLE[codec] and (keys is None or _leads_to(keys, path))
        )
        self._sure = keys is not None or codec is Codec.OWN
        self._saved = dict.fromkeys(self.compressible, 0)
        self._looked = dict.fromkeys(self.compressible, 0)
        self.units = Units(kind.chunks)
        self.planes = Planes(kind.chunks, self.compressible if codec is Codec.ZSTD else ())
        self._forms = Kept(self._form, _KEPT_FORMS)

    def tried(self, leaf: int, largest: float = math.inf) -> bool:
        """True if a leaf is compressed; ``largest`` is the size of its largest piece in bytes."""
        if self._sure or self._saved[leaf] > 0:
            return True
        return self._looked[leaf] < _LOOKED_PIECES and largest >= _LEAST_BYTES

    def learn(self, unit: Unit, saved: int, pieces: int) -> bool:
        """Note how many bytes compression has saved; True if the compressed pieces are stored."""
        for leaf in () if self._sure else unit:
            if self._looked[leaf] < _LOOKED_PIECES:
                self._saved[leaf] += saved
                self._looked[leaf] += pieces
        return self._sure or all(self._saved[leaf] > 0 for leaf in unit)

    def form(self, units: Iterable[Unit], planar: Unit) -> Form:
        """Returns the form of items of which these leaves are compressed, and these planar."""
        return self._forms[tuple(units), planar]

    def _form(self, key: tuple[tuple[Unit, ...], Unit]) -> Form:
        units, planar = key
        heads = {leaf: unit[0] for unit in units for leaf in unit}
        chunks = []
        for leaf, chunk in enumerate(self.kind.chunks):
            head = heads.get(leaf, leaf)
            codec = self.codec if leaf in heads else Codec.RAW
            chunks.append(
                replace(
                    chunk,
                    codec=codec if head == leaf else Codec.JOINED,
                    joined=None if head == leaf else head,
                    planar=leaf in planar,
                )
            )
        return encode_form(self.kind.tree, chunks)


def _leads_to(keys: frozenset[TreePath], path: TreePath) -> bool:
    return any(path[:length] in keys for length in range(1, len(path) + 1))
