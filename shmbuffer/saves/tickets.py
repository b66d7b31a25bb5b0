"""The tickets of saved items, which are restored when the items are loaded.

An item therefore has the same generation before and after the save. A ring uses each ticket only
once. If the ring has already used these tickets, they are all increased by a multiple of the
capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints

# A load may need _MOST_RUNS claims, and one more per _ITEMS_PER_RUN items. Each run of consecutive
# tickets needs its own claim.
_MOST_RUNS = 64
_ITEMS_PER_RUN = 64


class Tickets(NamedTuple):
    """The tickets of the items that are loaded."""

    of_items: Ints
    """Ticket of each item, int64 ``[n]``."""
    head: int
    """Head of the ring after the load, which is the ticket of the next write."""

    def for_ring(self, ring: Ring) -> Tickets:
        """Returns tickets that a ring has not used yet.

        These are the same tickets, or all of them increased by a multiple of the capacity.
        """
        first = int(self.of_items.min()) if len(self.of_items) else self.head
        passes = max(0, -(-(ring.head - first) // ring.capacity))
        return Tickets(self.of_items + passes * ring.capacity, self.head + passes * ring.capacity)

    def runs(self) -> list[Ints] | None:
        """Groups the items into runs with consecutive tickets.

        Returns the indices of the items in each run, oldest first, or None if there are too many
        runs.
        """
        order = np.argsort(self.of_items, kind="stable")
        cuts = np.flatnonzero(np.diff(self.of_items[order]) != 1) + 1
        if len(cuts) >= _MOST_RUNS + len(order) // _ITEMS_PER_RUN:
            return None
        return np.split(order, cuts) if len(order) else []
