"""A sampler's own table of priorities, for storages that do not store priorities.

The table is a ring without leaves, so that the priority tree of the C core can be used. To mark an
element, so that it can be drawn, its slot is committed.
"""

from __future__ import annotations

import numpy as np

from shmbuffer.memory import Engine, Ring, Schema, Settings
from shmbuffer.memory.format.array_types import Floats, Ints


class PriorityTable:
    """Priorities of the elements ``0 .. capacity - 1``, in the memory of this process."""

    def __init__(self, capacity: int, alpha: float, eps: float) -> None:
        self._engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
        self.ring: Ring = self._engine.define(Schema((), capacity, (), {"kind": "leaf"}))
        self.ring.tree.bind(alpha, eps)

    def mark(self, elements: Ints) -> None:
        """Marks the elements, and sets their priority to the default."""
        if len(elements):
            self.ring.place(np.unique(elements), (), in_place=False)

    def add(self, elements: Ints) -> None:
        """Marks those of the elements that are not marked yet, with the default priority."""
        self.mark(elements[~self.ring.live.holds(elements)])

    def update(self, elements: Ints, priorities: Floats) -> int:
        """Sets the priorities of elements, and marks those that are not marked yet.

        Returns the number of priorities that were set.
        """
        self.add(elements)
        return self.ring.update(elements, priorities)[0]

    def fit(self, count: int) -> None:
        """Marks exactly the elements ``0 .. count - 1``, which are in use in a list of items."""
        if self.ring.length == count:
            return
        kept = self.ring.live.committed()
        kept = kept[kept < count]
        if len(kept) < self.ring.length:
            priorities = self.ring.tree.priorities(kept)
            self.ring.empty()
            self.update(kept, priorities)
        if len(kept) < count:
            self.add(np.arange(count))

    def load(self, priorities: Floats, largest: float | None) -> None:
        """Replaces all priorities, and the largest priority that was ever set.

        Args:
            priorities: float64 ``[elements]``, with NaN for elements without an item.
            largest: the largest priority that was ever set, or None.
        """
        self.ring.empty()
        known = np.nonzero(~np.isnan(priorities[: self.ring.elements]))[0]
        self.update(known, priorities[known])
        self.ring.restore(0, 0, largest)


def raw_of(ring: Ring) -> Floats:
    """Returns the raw priorities in a ring, float64 ``[elements]``.

    Elements without an item have NaN.
    """
    raw = np.full(ring.elements, np.nan)
    present = ring.live.committed()
    raw[present] = ring.tree.priorities(present)
    return raw
