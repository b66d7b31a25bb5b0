"""Decides, once for all items of a kind, which leaves are compressed and how.

Leaves that share bytes can be compressed as one frame. For example, the next observation of a frame
stack differs from the observation in only one frame. Candidates have the same dtype and size. The
first items show whether the compressed frames become smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shmbuffer.items.kept import Kept
from shmbuffer.items.records.columns import Shapes
from shmbuffer.items.records.forms import Kind, TreePath
from shmbuffer.items.records.planes import Planes, Trial
from shmbuffer.memory.record_format import Chunk, Codec, Form, Layout, encode_form

_LEAST_BYTES = 64  # minimum size of a leaf that is compressed without being named
_LOOKED_PIECES = 32  # pieces that determine whether a leaf becomes smaller
_KEPT_FORMS = 64

#: Kinds of leaves that can be compressed. Plain numbers are too small.
COMPRESSIBLE = {
    Codec.RAW: (),
    Codec.ZSTD: ("tensor", "array", "number", "bytes", "str"),
    Codec.OWN: ("tensor", "array", "number", "bytes"),
}


Unit = tuple[int, ...]
"""Leaves of one frame, ascending. The others are joined to the first one, the head."""

_LEAST_UNIT_BYTES = 256  # minimum size of a leaf
_WORTH = 0.9  # largest ratio to separate sizes, since a read of one leaf expands all of them
_MOST_GROUPS = 32  # per kind, because a trial does not pay off if the sizes always differ


class Units:
    """Decides which leaves of one kind of items are compressed together."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._seen: dict[Unit, Trial] = {}

    def of(
        self,
        leaves: Sequence[int],
        sizes: Sequence[int],
        measure: Callable[[Unit], tuple[int, int, int]],
    ) -> list[Unit]:
        """Returns the leaves to compress, grouped into units."""
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
    """The storage form of items of one kind; ``units`` and ``planes`` refine it."""

    def __init__(
        self,
        kind: Kind,  # kind of the items
        codec: Codec,  # codec of compressed leaves; RAW: none is compressed
        # Paths that lead to the compressed leaves. None: with zstd leaves of at least 64 bytes that
        # become smaller, with the user's functions all leaves.
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
        self.layouts = Kept(self._layout, _KEPT_FORMS)  # of raw items, by their shapes

    def tried(self, leaf: int, largest: float = math.inf) -> bool:
        """True if a leaf is compressed. ``largest`` is the size of its largest piece in bytes."""
        if self._sure or self._saved[leaf] > 0:
            return True
        return self._looked[leaf] < _LOOKED_PIECES and largest >= _LEAST_BYTES

    def learn(self, unit: Unit, saved: int, pieces: int) -> bool:
        """Adds the bytes that compression saved; True if the compressed pieces should be stored."""
        for leaf in () if self._sure else unit:
            if self._looked[leaf] < _LOOKED_PIECES:
                self._saved[leaf] += saved
                self._looked[leaf] += pieces
        return self._sure or all(self._saved[leaf] > 0 for leaf in unit)

    def form(self, units: Iterable[Unit], planar: Unit) -> Form:
        """Returns the form of items with these units compressed and these leaves planar."""
        return self._forms[tuple(units), planar]

    def _layout(self, shapes: Shapes) -> Layout:
        form = self.form((), ())
        return Layout(form, shapes.batch_dims, shapes.dims, shapes.sizes, apart=True)

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
