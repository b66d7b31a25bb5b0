"""The tickets of saved items, which are restored when the items are loaded.

Thus a sample has the same generations before and after the save. A ring uses each ticket only once.
If it has already used these tickets, all of them are increased by multiples of the capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints

_MOST_RUNS = 64  # plus one per this many items; each run needs a separate claim
_ITEMS_A_RUN = 64


class Tickets(NamedTuple):
    """The tickets of the items to load."""

    of_items: Ints
    """Tickets of the items, int64 ``[n]``."""
    head: int
    """The next ticket."""

    def for_ring(self, ring: Ring) -> Tickets:
        """Returns these tickets, raised by a multiple of the capacity if they were used."""
        first = int(self.of_items.min()) if len(self.of_items) else self.head
        laps = max(0, -(-(ring.head - first) // ring.capacity))
        return Tickets(self.of_items + laps * ring.capacity, self.head + laps * ring.capacity)

    def runs(self) -> list[Ints] | None:
        """Returns the runs of consecutive tickets, oldest first; None if there are too many."""
        order = np.argsort(self.of_items, kind="stable")
        cuts = np.flatnonzero(np.diff(self.of_items[order]) != 1) + 1
        if len(cuts) >= _MOST_RUNS + len(order) // _ITEMS_A_RUN:
            return None
        return np.split(order, cuts) if len(order) else []
