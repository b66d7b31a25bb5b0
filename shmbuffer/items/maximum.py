"""Finds the largest priority of the items in a buffer, for ``max_priority_within_buffer``.

The ring itself stores only the largest priority that was ever set. `MaxPriority` finds the largest
priority of the items that are still present, in one of two ways:

* It remembers the item with the largest priority. If several items have this priority, it remembers
  the one that was written last. At each write, it checks that this item is still present, and
  compares it with the items that have been written since the previous check.
* It searches the ring if the remembered item was overwritten or its priority was reduced. It also
  does so if a process died or another process changed priorities, because the ring tells only how
  many priorities were changed. The search compares the masses of all items, because a larger
  priority has a larger mass. Then it compares the priorities of the items with the largest masses.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shmbuffer.memory import Ring
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.mapped.slots_file import PIECE

# Masses that differ by less than this fraction are treated as equal, because rounding can reverse
# their order.
_ROUNDING = 1e-9


class MaxPriority:
    """Finds the largest raw priority in a ring.

    Call `updated` after each change of priorities by this process.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._element = -1  # element number of the remembered item; -1 if there is none
        self._value = 0.0  # priority of the remembered item
        self._ticket = -1  # ticket of the remembered item
        self._below = 0  # items with smaller tickets have already been compared
        self._updates = 0  # number of priority updates in the ring that are taken into account
        self._capacity = ring.capacity  # capacity at the last call

    def default(self, leaving: Ints | None = None) -> float:
        """Returns the largest priority, or 1.0 if there are no items.

        Items in the slots ``leaving``, which are about to be overwritten, do not count. A search
        takes 1 ms per million items.
        """
        ring = self._ring
        # Read before the comparison, so that the next call notices changes made during it.
        updates, settled = ring.tree.updates, ring.seat.settled(ring.head)
        since = settled - self._below
        grown = ring.capacity != self._capacity  # growing the ring changes the tickets
        if grown or updates != self._updates or not 0 <= since < ring.capacity:
            self.forget()
        if self._element >= 0 and since:
            self._compare_slots((self._below + np.arange(since)) % ring.capacity, leaving)
        if not self._is_present(leaving):
            self.forget()
            for places in self._slots_with_largest_masses(leaving):
                self._compare_slots(places, leaving)
        self._below, self._updates, self._capacity = settled, updates, ring.capacity
        return 1.0 if self._element < 0 else self._value

    def updated(self, elements: Ints, raw: Floats, applied: int) -> None:
        """Records that this process set the priority of ``elements[i]`` to ``raw[i]``.

        ``applied`` is the number of priorities that the ring accepted.
        """
        self._updates += applied
        if self._element >= 0 and len(raw) and raw.max() >= self._value:
            at = int(raw.argmax())  # if this update was not applied, `_is_present` detects it
            self._element, self._value = int(elements[at]), float(raw[at])
            word = self._ring.live.words[self._element // self._ring.width]
            self._ticket = int(word) >> slots.STATE_BITS

    def forget(self) -> None:
        """Forgets the remembered item, because priorities were changed without `updated`."""
        self._element = -1

    def _is_present(self, leaving: Ints | None) -> bool:
        """True if the remembered item is still present and has the remembered priority."""
        if self._element < 0:
            return False
        at = np.array([self._element])
        slot = at // self._ring.width
        if leaving is not None and slot[0] in leaving:
            return False
        return bool(
            self._ring.live.holds(slot)[0] and self._ring.tree.priorities(at)[0] == self._value
        )

    def _slots_with_largest_masses(self, leaving: Ints | None) -> Iterator[Ints]:
        """Yields arrays of slots that have the largest masses.

        One of these slots contains the item with the largest priority.
        """
        width, capacity = self._ring.width, self._ring.capacity
        step = max(1, PIECE // width)
        firsts = range(0, capacity, step)
        tops = np.array([self._masses(first, step, leaving).max() for first in firsts])
        least = tops.max() * (1 - _ROUNDING)
        for first, top in zip(firsts, tops, strict=True):
            if top >= least:
                found = np.flatnonzero(self._masses(first, step, leaving) >= least) // width
                yield first + (found if width == 1 else np.unique(found))

    def _masses(self, first: int, count: int, leaving: Ints | None) -> Floats:
        """Returns the masses of all elements in ``count`` slots, starting at slot ``first``.

        The masses are 0 in the slots ``leaving``.
        """
        width, end = self._ring.width, min(first + count, self._ring.capacity)
        masses = self._ring.tree.mass(slice(first * width, end * width))
        if leaving is None:
            return masses
        here = leaving[(leaving >= first) & (leaving < end)] - first
        if len(here):
            masses = masses.copy()
            masses.reshape(-1, width)[here] = 0.0
        return masses

    def _compare_slots(self, candidates: Ints, leaving: Ints | None) -> None:
        """Compares the items in the given slots with the remembered item.

        Remembers the item with the largest priority.
        """
        ring = self._ring
        present = ring.live.holds(candidates)
        if leaving is not None:
            present[np.isin(candidates, leaving)] = False
        elements = candidates[present]
        if ring.width > 1:
            elements = (elements[:, None] * ring.width + np.arange(ring.width)).ravel()
        raw = ring.tree.priorities(elements)
        raw[np.isnan(raw)] = -1.0  # the slot has just been claimed by a writer
        greatest = raw.max(initial=-1.0)
        if greatest < (self._value if self._element >= 0 else 0.0):
            return
        equals = elements[raw == greatest]
        tickets = slots.tickets(ring.live.words[equals // ring.width])
        newest = int(tickets.argmax())
        if self._element < 0 or greatest > self._value or tickets[newest] >= self._ticket:
            self._element, self._value = int(equals[newest]), float(greatest)
            self._ticket = int(tickets[newest])
