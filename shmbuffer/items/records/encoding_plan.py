"""Decides, once for all items of a kind, which leaves are compressed and how.

Leaves with similar contents can be compressed together, in one zstd frame. For example, the stacks
of images in an observation and in the next observation differ in only one image. Candidates are
leaves of the same dtype and size. The encoder compresses them in the first items both together and
separately, to find out which result is smaller.
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

_LEAST_BYTES = 64  # minimum size of a leaf that is compressed without an explicit key
_LOOKED_PIECES = 32  # number of pieces that decide whether a leaf is compressed
_KEPT_FORMS = 64

#: Kinds of leaves that can be compressed. Plain numbers are too small.
COMPRESSIBLE = {
    Codec.RAW: (),
    Codec.ZSTD: ("tensor", "array", "number", "bytes", "str"),
    Codec.OWN: ("tensor", "array", "number", "bytes"),
}


Unit = tuple[int, ...]
"""Numbers of the leaves that are compressed in one frame, in ascending order.

The first leaf is the head. The frame is stored in place of the head.
"""

_LEAST_UNIT_BYTES = 256  # minimum size of a leaf that is compressed together with others
# Largest accepted ratio to the size of separate frames. Reading one leaf of a unit expands the
# whole unit, so small savings do not pay off.
_WORTH = 0.9
_MOST_GROUPS = 32  # limits the trials per kind, because each combination of sizes needs its own


class Units:
    """Decides which leaves are compressed together, for items of one `Kind`."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._seen: dict[Unit, Trial] = {}

    def of(
        self,
        leaves: Sequence[int],
        sizes: Sequence[int],
        measure: Callable[[Unit], tuple[int, int, int]],
    ) -> list[Unit]:
        """Groups the leaves to compress into units.

        Args:
            leaves: numbers of the leaves to compress.
            sizes: size of every leaf of the kind in bytes.
            measure: function that compresses the leaves of a unit separately and together. It
                returns the number of items, and both compressed sizes in bytes.
        """
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
    """Decides how items of one kind are stored.

    ``units`` decides which leaves are compressed together, and ``planes`` which leaves are stored
    plane by plane.
    """

    def __init__(
        self,
        kind: Kind,  # kind of the items
        codec: Codec,  # codec of compressed leaves; RAW if no leaf is compressed
        # Paths of the leaves, or of the containers of leaves, that are compressed. If None, zstd
        # compresses leaves of at least 64 bytes that become smaller, and a user's function all.
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
        self.layouts = Kept(self._layout, _KEPT_FORMS)  # layouts of raw items, by their shapes

    def tried(self, leaf: int, largest: float = math.inf) -> bool:
        """True if the encoder tries to compress a leaf.

        ``largest`` is the size of its largest piece in bytes.
        """
        if self._sure or self._saved[leaf] > 0:
            return True
        return self._looked[leaf] < _LOOKED_PIECES and largest >= _LEAST_BYTES

    def learn(self, unit: Unit, saved: int, pieces: int) -> bool:
        """Records the bytes that compression saved in ``pieces`` pieces of a unit.

        Returns True if the compressed pieces should be stored.
        """
        for leaf in () if self._sure else unit:
            if self._looked[leaf] < _LOOKED_PIECES:
                self._saved[leaf] += saved
                self._looked[leaf] += pieces
        return self._sure or all(self._saved[leaf] > 0 for leaf in unit)

    def form(self, units: Iterable[Unit], planar: Unit) -> Form:
        """Returns the form of records in which the given units are compressed.

        The leaves ``planar`` are stored plane by plane.
        """
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
