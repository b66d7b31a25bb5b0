"""Leaves that are compressed as one, because what they hold is partly the same.

The next observation of a stack of frames is the observation but for one frame. In one frame of zstd
the second says little more than where the first has it; in two, each says all.

Leaves of one dtype and size are candidates; whether it pays is seen from the first items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmbuffer.memory.bodies import Chunk

Unit = tuple[int, ...]
"""Leaves of one frame, ascending; the first is the head, the others are joined to it."""

_LEAST_BYTES = 256  # of a leaf
_LOOKED_ITEMS = 32
_WORTH = 0.9  # together they take at most so much of what they take apart: to read one expands all
_MOST_GROUPS = 32  # of a kind: sizes that are never the same are not worth a look


@dataclass
class _Seen:
    """Bytes that the items which were looked at take."""

    items: int = 0
    apart: int = 0
    together: int = 0


class Units:
    """Which leaves of one kind of items are compressed as one, as far as is known.

    Args:
        chunks: the leaves.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._seen: dict[Unit, _Seen] = {}

    def of(
        self,
        leaves: Sequence[int],
        sizes: Sequence[int],
        measure: Callable[[Unit], tuple[int, int, int]],
    ) -> list[Unit]:
        """Leaves that are to be compressed, those as one that belong together.

        Args:
            leaves: ascending.
            sizes: bytes of all leaves in an item.
            measure: compresses leaves of some items: how many items, the bytes that their leaves
                take apart and together. It is called as long as there is something to learn.
        """
        groups: dict[tuple[object, ...], Unit] = {}
        for leaf in leaves:
            chunk, size = self._chunks[leaf], sizes[leaf]
            key: tuple[object, ...] = (leaf,)
            if size >= _LEAST_BYTES and chunk.kind in ("tensor", "array"):
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
        seen = self._seen.get(group)
        if seen is None:
            if len(self._seen) >= _MOST_GROUPS:
                return False
            seen = self._seen[group] = _Seen()
        if seen.items < _LOOKED_ITEMS:
            items, apart, together = measure(group)
            seen.items += items
            seen.apart += apart
            seen.together += together
        return seen.together < _WORTH * seen.apart
