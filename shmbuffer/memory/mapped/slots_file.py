"""Views of the slots file, which contains all data of the slots except the bytes of the items.

    words | checksums | sources | raw priorities | masses | sums and minima of each level | extents
    | nexts | holders

Other processes can change every section at any time, so two reads of the same value may differ. The
offsets of the sections come from the C core (``_core.sections``). Only this module converts them to
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.format.schema import Schema

PIECE = 16384
"""Number of slots or elements that are processed at a time.

It is so small that temporary arrays fit into the L2 cache.
"""


class SlotsFile:
    """NumPy views of the sections of a slots file, or of a copy of such a file.

    Args:
        content: The map of the file, or a buffer with its content.
        schema: The schema of the buffer.
        head: Function that returns the next ticket of the ring. None if the ticket is unknown or
            unreliable.
    """

    def __init__(self, content: Any, schema: Schema, head: Callable[[], int] | None = None) -> None:
        data, at = np.frombuffer(content, np.uint8), schema.sections
        self.at = at  # offset of each section in bytes
        capacity, elements = schema.capacity, schema.elements

        def part(name: str, count: int, dtype: Any) -> NDArray[Any]:
            """Returns a view of the section ``name``, which has ``count`` values."""
            size = np.dtype(dtype).itemsize
            return data[at[name] : at[name] + size * count].view(dtype)

        self._head = head
        self.capacity = capacity
        self.width = schema.width
        # uint64[capacity]: state and ticket of each slot (`slots`)
        self.words: NDArray[np.uint64] = part("words", capacity, np.uint64)
        # uint64[capacity]: writer and stream of each slot's item (`layout`)
        self.sources: NDArray[np.uint64] = part("sources", capacity, np.uint64)
        # float64[elements]: raw priorities, NaN if no priority was set
        self.raw: Floats = part("raw", elements, np.float64)
        # float64: the leaves of the priority tree, padded to a multiple of 16
        self.masses: Floats = part("mass", _padded(elements), np.float64)
        # the sums and the minima of each level of the tree above the leaves
        self.levels: list[tuple[Floats, Floats]] = []
        for level in range(1, at["depth"] + 1):
            nodes = _padded(at[f"nodes{level}"])
            sums, least = (part(f"{name}{level}", nodes, np.float64) for name in ("sum", "min"))
            self.levels.append((sums, least))
        count = capacity if schema.record_bytes else 0
        # `layout.EXTENT` [capacity]: location of each slot's record; empty without a byte ring
        self.extents = part("extents" if count else "words", count, layout.EXTENT)
        own_rows = schema.sharing.own_rows
        # uint64[capacity]: location of each slot's next observations, and uint32[own rows]: the
        # slot that uses each own row; both are empty without `share_next`
        self.nexts = part("nexts" if own_rows else "words", capacity if own_rows else 0, np.uint64)
        self.holders = part("holders" if own_rows else "words", own_rows, np.uint32)

    @property
    def mass(self) -> Floats:
        """The masses without the padding, float64[elements]."""
        return self.masses[: len(self.raw)]

    def holds(self, where: Any = slice(None)) -> Flags:
        """Returns a mask of the slots that contain an item. ``where`` selects slots by index."""
        return slots.committed(self.words[where])

    def writing(self, where: Any = slice(None)) -> Flags:
        """Returns a mask of the slots that a client is writing, or was writing when it died.

        ``where`` selects slots by index.
        """
        found: Flags = slots.states(self.words[where]) == SlotState.WRITING
        return found

    def used(self) -> int:
        """Returns the number of slots that have been used: the words of all later slots are EMPTY.

        If the head has not passed the end of the ring, the result is the head, because a claim
        moves the head before it changes a word. Otherwise, the words are searched from the last
        slot backwards. This is also necessary after `empty()`, and after a write to an explicit
        index, because it advances the head by the capacity. The search reads all words in the worst
        case, but only one chunk if one of the last slots is in use.
        """
        if self._head is not None and (head := self._head()) <= self.capacity:
            return head
        return end_of_use(self.words, 0, self.capacity)

    def committed_slots(self) -> Ints:
        """Returns the slots that contain an item, in ascending order. Reads only used slots."""
        found: Ints = self.holds(slice(self.used())).nonzero()[0]
        return found

    def committed(self) -> Ints:
        """Returns the elements of all slots that contain an item, in ascending order."""
        found = self.committed_slots()
        if self.width == 1:
            return found
        lanes: Ints = (found[:, None] * self.width + np.arange(self.width)).ravel()
        return lanes

    def count_own_rows(self) -> int:
        """Returns the number of own rows (`sharing`) that are in use. Costs O(own rows)."""
        if not len(self.holders):
            return 0
        inside = self.holders < self.capacity
        holders = np.where(inside, self.holders, 0)
        states, nexts = slots.states(self.words[holders]), self.nexts[holders]
        held = (states == SlotState.COMMITTED) | (states == SlotState.WRITING)
        number = nexts & np.uint64(layout.NEXT_LIMIT - 1)
        own = (nexts >> np.uint64(63) == 1) & (number == np.arange(len(holders), dtype=np.uint64))
        return int(np.count_nonzero(inside & held & own))

    def tickets(self) -> Ints:
        """Returns the ticket of each slot's item, or -1 for a slot without an item. O(capacity)."""
        words = self.words[: self.used()].copy()
        found = np.where(slots.committed(words), slots.tickets(words), -1)
        return np.concatenate((found, np.full(self.capacity - len(words), -1)))


def end_of_use(words: NDArray[np.uint64], low: int, high: int) -> int:
    """Returns the slot after the last nonzero word between two slots.

    Args:
        words: The slot words.
        low: The first slot of the range. It is returned if all words in the range are zero.
        high: The slot after the range.
    """
    for end in range(high, low, -PIECE):
        first = max(low, end - PIECE)
        # The comparison makes a copy. `nonzero` on the shared words would read them twice, and
        # other processes may change them in between.
        used = (words[first:end] != 0).nonzero()[0]
        if len(used):
            return first + int(used[-1]) + 1
    return low


def _padded(nodes: int) -> int:
    """Rounds a number of tree nodes up to a multiple of the fanout, 16."""
    return -(-nodes // layout.FANOUT) * layout.FANOUT
