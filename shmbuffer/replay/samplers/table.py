"""A table of priorities that belongs to one sampler: for storages that keep none for it.

It is a ring without leaves: an item of the storage has a slot of the same number here, committed
when it is marked, and the ring's tree holds its priority. One implementation of the tree serves
both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmbuffer.memory import Engine, Schema, Settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


class PriorityTable:
    """Priorities of elements ``0 .. capacity - 1``, of this process.

    Args:
        capacity: elements.
        alpha: priority exponent.
        eps: added to every priority.
    """

    def __init__(self, capacity: int, alpha: float, eps: float) -> None:
        self._engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
        self.ring: Ring = self._engine.define(Schema((), capacity, (), {"kind": "leaf"}))
        self.ring.bind_priorities(alpha, eps)

    def mark(self, elements: NDArray[np.int64]) -> None:
        """These were written: they get the default priority."""
        if len(elements):
            self.ring.place(np.unique(elements), (), in_place=False)

    def update(self, elements: NDArray[np.int64], priorities: NDArray[np.float64]) -> int:
        """Set priorities; elements that were never marked are marked. How many were set."""
        unmarked = elements[(self.ring.words[elements] & 3) != 2]  # COMMITTED
        self.mark(unmarked)
        return self.ring.update(elements, priorities)[0]

    def empty(self) -> None:
        """Forget all."""
        self.ring.empty()
