"""The tickets of saved items, which the items get again when they are loaded.

Thus a sample has the same generations before a save and after it. A ring uses each ticket once: if
it has used these already, all of them move on by whole laps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints

_MOST_RUNS = 64  # and one more for so many items: each is a claim of its own
_ITEMS_A_RUN = 64


class Tickets(NamedTuple):
    """The tickets of the items that are going to be loaded."""

    of_items: Ints
    """int64 ``[n]``."""
    head: int
    """The next ticket."""

    def for_ring(self, ring: Ring) -> Tickets:
        """Returns these tickets, moved on by whole laps if the ring is past them."""
        first = int(self.of_items.min()) if len(self.of_items) else self.head
        laps = max(0, -(-(ring.head - first) // ring.capacity))
        return Tickets(self.of_items + laps * ring.capacity, self.head + laps * ring.capacity)

    def runs(self) -> list[Ints] | None:
        """Returns the runs of consecutive tickets, the oldest first; None if there are too many."""
        order = np.argsort(self.of_items, kind="stable")
        cuts = np.flatnonzero(np.diff(self.of_items[order]) != 1) + 1
        if len(cuts) >= _MOST_RUNS + len(order) // _ITEMS_A_RUN:
            return None
        return np.split(order, cuts) if len(order) else []
