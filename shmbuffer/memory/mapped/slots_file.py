"""Maps the slots file, which contains the data of each slot except the bytes of its item.

    words | checksums | sources | raw priorities | masses | sums and minima of each level | extents
    | nexts | holders

Other processes store into every part at any time, so two reads may differ. The offsets come from
the core (``_core.sections``), and only this module turns them into arrays.
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
"""Slots or elements that are processed together, so that temporary arrays fit into the L2 cache."""


class SlotsFile:
    """A view of a slots file, or of a copy of one.

    Args:
        content: The map of the file.
        schema: The schema of the buffer.
        head: Returns the next ticket of the ring. None if it is not known or not reliable.
    """

    def __init__(self, content: Any, schema: Schema, head: Callable[[], int] | None = None) -> None:
        data, at = np.frombuffer(content, np.uint8), schema.sections
        self.at = at  # offset of each section in bytes
        capacity, elements = schema.capacity, schema.elements

        def part(name: str, count: int, dtype: Any) -> NDArray[Any]:
            size = np.dtype(dtype).itemsize
            return data[at[name] : at[name] + size * count].view(dtype)

        self._head = head
        self.capacity = capacity
        self.width = schema.width
        # uint64[capacity]: state and ticket; see `slots`
        self.words: NDArray[np.uint64] = part("words", capacity, np.uint64)
        # uint64[capacity]: the writer and its stream; see `layout`
        self.sources: NDArray[np.uint64] = part("sources", capacity, np.uint64)
        # float64[elements]: the raw priorities, NaN if none was set
        self.raw: Floats = part("raw", elements, np.float64)
        # float64, the leaves of the priority tree, padded to a multiple of 16
        self.masses: Floats = part("mass", _padded(elements), np.float64)
        # sums and minima of each level of the tree above the leaves
        self.levels: list[tuple[Floats, Floats]] = []
        for level in range(1, at["depth"] + 1):
            nodes = _padded(at[f"nodes{level}"])
            sums, least = (part(f"{name}{level}", nodes, np.float64) for name in ("sum", "min"))
            self.levels.append((sums, least))
        count = capacity if schema.record_bytes else 0
        # `layout.EXTENT` [capacity]: the places of the records; empty if items are rows
        self.extents = part("extents" if count else "words", count, layout.EXTENT)
        own_rows = schema.sharing.own_rows
        # uint64[capacity] and uint32[own rows]: the places of next observations; empty if each leaf
        # has a column
        self.nexts = part("nexts" if own_rows else "words", capacity if own_rows else 0, np.uint64)
        self.holders = part("holders" if own_rows else "words", own_rows, np.uint32)

    @property
    def mass(self) -> Floats:
        """The masses, without their padding: float64[elements]."""
        return self.masses[: len(self.raw)]

    def holds(self, where: Any = slice(None)) -> Flags:
        """Returns a mask of the slots that contain an item."""
        return slots.committed(self.words[where])

    def writing(self, where: Any = slice(None)) -> Flags:
        """Returns a mask of the slots that a client is writing, or was writing when it died."""
        found: Flags = slots.states(self.words[where]) == SlotState.WRITING
        return found

    def used(self) -> int:
        """Returns the number of slots that may contain an item; all later words are EMPTY.

        A claim moves the head before it changes a word. If the ring has not wrapped around, the
        result is therefore its head, which costs nothing. Otherwise the words are searched from the
        end. This also applies after the buffer was emptied, and after a placed write, whose tickets
        take a whole lap. The search costs O(capacity) if few slots are used, and one piece of the
        words if the last slots are.
        """
        if self._head is not None and (head := self._head()) <= self.capacity:
            return head
        return end_of_use(self.words, 0, self.capacity)

    def committed_slots(self) -> Ints:
        """Returns the slots that contain an item, in storage order. Only slots in use are read."""
        found: Ints = self.holds(slice(self.used())).nonzero()[0]
        return found

    def committed(self) -> Ints:
        """Returns the elements that contain an item, in storage order; see `committed_slots`."""
        found = self.committed_slots()
        if self.width == 1:
            return found
        lanes: Ints = (found[:, None] * self.width + np.arange(self.width)).ravel()
        return lanes

    def count_own_rows(self) -> int:
        """Returns the number of own rows in use; see `sharing`. O(own rows)."""
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
        """Returns the ticket of the item in each slot, -1 if there is none. O(capacity)."""
        words = self.words[: self.used()].copy()
        found = np.where(slots.committed(words), slots.tickets(words), -1)
        return np.concatenate((found, np.full(self.capacity - len(words), -1)))


def end_of_use(words: NDArray[np.uint64], low: int, high: int) -> int:
    """Finds the end of the words in use between two slots; returns ``low`` if all are zero."""
    for end in range(high, low, -PIECE):
        first = max(low, end - PIECE)
        # of a copy, because numpy reads the array twice
        used = (words[first:end] != 0).nonzero()[0]
        if len(used):
            return first + int(used[-1]) + 1
    return low


def _padded(nodes: int) -> int:
    return -(-nodes // layout.FANOUT) * layout.FANOUT
