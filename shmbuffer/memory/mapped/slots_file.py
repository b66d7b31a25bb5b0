"""The slots file, live: the data of each slot besides the bytes of its item.

    words | checksums | sources | raw priorities | masses | sums and minima of each level | extents
    | nexts | holders

Live: other processes store into every part at any time, so two looks may differ. Offsets are the
core's (``_core.sections``); here they become arrays, and nowhere else.
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
"""Slots or elements to look at together: what is made of them stays in the second cache."""


class SlotsFile:
    """A view of a slots file, or of a copy of one.

    Args:
        content: the map of the file.
        schema: of the buffer.
        head: returns the next ticket of the ring; None: it is not known or not to be believed.
    """

    def __init__(self, content: Any, schema: Schema, head: Callable[[], int] | None = None) -> None:
        data, at = np.frombuffer(content, np.uint8), schema.sections
        self.at = at  # where each section begins, in bytes
        capacity, elements = schema.capacity, schema.elements

        def part(name: str, count: int, dtype: Any) -> NDArray[Any]:
            size = np.dtype(dtype).itemsize
            return data[at[name] : at[name] + size * count].view(dtype)

        self._head = head
        self.capacity = capacity
        self.width = schema.width
        # uint64[capacity]: state and ticket; see `slots`
        self.words: NDArray[np.uint64] = part("words", capacity, np.uint64)
        # uint64[capacity]: who wrote the item, in which stream; see `layout`
        self.sources: NDArray[np.uint64] = part("sources", capacity, np.uint64)
        # float64[elements]: priorities as they were given, NaN where none was
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
        # `layout.EXTENT` [capacity]: where the records lie; empty where items are rows
        self.extents = part("extents" if count else "words", count, layout.EXTENT)
        wholes = schema.sharing.wholes
        # uint64[capacity], uint32[wholes]: where next observations are; empty where each leaf has
        # a column
        self.nexts = part("nexts" if wholes else "words", capacity if wholes else 0, np.uint64)
        self.holders = part("holders" if wholes else "words", wholes, np.uint32)

    @property
    def mass(self) -> Floats:
        """float64[elements]: the masses, without their padding."""
        return self.masses[: len(self.raw)]

    def holds(self, where: Any = slice(None)) -> Flags:
        """Which of these slots hold an item."""
        return slots.committed(self.words[where])

    def writing(self, where: Any = slice(None)) -> Flags:
        """Which of these slots a client is writing, or was writing when it died."""
        found: Flags = slots.states(self.words[where]) == SlotState.WRITING
        return found

    def used(self) -> int:
        """Number of slots to look at for items: the words of all later slots are EMPTY.

        A claim moves the head before it changes a word, so a ring that has not gone around once
        ends at its head, and the look costs nothing. After that, or after an emptying or a placed
        write, whose tickets are a whole lap, the words are searched from the end: O(capacity) if
        few slots are used, and one piece of the words if the last ones are.
        """
        if self._head is not None and (head := self._head()) <= self.capacity:
            return head
        return end_of_use(self.words, 0, self.capacity)

    def committed_slots(self) -> Ints:
        """Slots that hold an item, in storage order. Its cost is that of the slots in use."""
        found: Ints = self.holds(slice(self.used())).nonzero()[0]
        return found

    def committed(self) -> Ints:
        """Elements that hold an item, in storage order; see `committed_slots`."""
        found = self.committed_slots()
        if self.width == 1:
            return found
        lanes: Ints = (found[:, None] * self.width + np.arange(self.width)).ravel()
        return lanes

    def wholes_used(self) -> int:
        """Next observations that have a row of their own, as `sharing` says. O(wholes)."""
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
        """Ticket of the item in each slot, -1 where there is none. O(capacity)."""
        words = self.words[: self.used()].copy()
        found = np.where(slots.committed(words), slots.tickets(words), -1)
        return np.concatenate((found, np.full(self.capacity - len(words), -1)))


def end_of_use(words: NDArray[np.uint64], low: int, high: int) -> int:
    """Finds the end of the words in use from ``low`` to ``high``; ``low`` if all are zero."""
    for end in range(high, low, -PIECE):
        first = max(low, end - PIECE)
        used = (words[first:end] != 0).nonzero()[0]  # of a copy: numpy looks twice
        if len(used):
            return first + int(used[-1]) + 1
    return low


def _padded(nodes: int) -> int:
    return -(-nodes // layout.FANOUT) * layout.FANOUT
