"""The largest priority of what is in a buffer: for ``max_priority_within_buffer``.

The ring itself knows the largest priority that was ever given. What is still there is found by a
look at all items; how often that is needed depends on what becomes of the largest.

    remembered   the item with the largest priority, of equals the one written last. A write looks
                 at what was written since, by anybody, and finds it still there.
    looked for   where it has gone or was given less, and where others have changed priorities since
                 (they count how many, not which), or have died: a pass over the masses, which grow
                 with priorities, and a look at the items with the greatest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmbuffer.memory import slots
from shmbuffer.memory.slots_file import PIECE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shmbuffer.memory import Ring

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Of masses: two priorities may have masses that are rounded the wrong way round.
_ROUNDING = 1e-9


class MaxPriority:
    """The largest raw priority among the items of a ring; our own changes are told to `updated`."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._element = -1  # the item that is remembered; -1: none
        self._value = 0.0  # its priority
        self._ticket = -1  # and its ticket
        self._below = 0  # all items with tickets below have been looked at
        self._updates = 0  # of the ring, as far as they are taken into account
        self._capacity = ring.capacity  # when it was last asked

    def default(self, leaving: Ints | None = None) -> float:
        """The priority of a new item: the largest that is there; 1.0 where nothing is.

        Cost: O(items written since the last call), or O(capacity), a millisecond for a million.
        """
        ring = self._ring
        # Before anything is looked at.
        updates, settled = ring.tree.updates, ring.seat.settled(ring.head)
        since = settled - self._below
        grown = ring.capacity != self._capacity  # its tickets are others then
        if grown or updates != self._updates or not 0 <= since < ring.capacity:
            self.forget()
        if self._element >= 0 and since:
            self._look_at((self._below + np.arange(since)) % ring.capacity, leaving)
        if not self._is_there(leaving):
            self.forget()
            for places in self._with_greatest_masses(leaving):
                self._look_at(places, leaving)
        self._below, self._updates, self._capacity = settled, updates, ring.capacity
        return 1.0 if self._element < 0 else self._value

    def updated(self, elements: Ints, raw: Floats, applied: int) -> None:
        """Priorities were set: ``raw[i]`` of ``elements[i]``, ``applied`` of them."""
        self._updates += applied
        if self._element >= 0 and len(raw) and raw.max() >= self._value:
            at = int(raw.argmax())  # if that was not kept, it is seen when it is looked at
            self._element, self._value = int(elements[at]), float(raw[at])
            word = self._ring.live.words[self._element // self._ring.width]
            self._ticket = int(word) >> slots.STATE_BITS

    def forget(self) -> None:
        """Priorities were changed in another way."""
        self._element = -1

    def _is_there(self, leaving: Ints | None) -> bool:
        """Whether the item that is remembered stays, with the priority that it had."""
        if self._element < 0:
            return False
        at = np.array([self._element])
        slot = at // self._ring.width
        if leaving is not None and slot[0] in leaving:
            return False
        return bool(
            self._ring.live.holds(slot)[0] and self._ring.tree.priorities(at)[0] == self._value
        )

    def _with_greatest_masses(self, leaving: Ints | None) -> Iterator[Ints]:
        """Slots, some at a time, with the item that has the largest priority among them."""
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
        """Of slots from ``first`` on; 0 for those that leave."""
        width, end = self._ring.width, min(first + count, self._ring.capacity)
        masses = self._ring.tree.mass(slice(first * width, end * width))
        if leaving is None:
            return masses
        here = leaving[(leaving >= first) & (leaving < end)] - first
        if len(here):
            masses = masses.copy()
            masses.reshape(-1, width)[here] = 0.0
        return masses

    def _look_at(self, places: Ints, leaving: Ints | None) -> None:
        """Remember the item with the largest priority, if these slots have it."""
        ring = self._ring
        held = ring.live.holds(places)
        if leaving is not None:
            held[np.isin(places, leaving)] = False
        elements = places[held]
        if ring.width > 1:
            elements = (elements[:, None] * ring.width + np.arange(ring.width)).ravel()
        raw = ring.tree.priorities(elements)
        raw[np.isnan(raw)] = -1.0  # taken by a writer since
        greatest = raw.max(initial=-1.0)
        if greatest < (self._value if self._element >= 0 else 0.0):
            return
        equals = elements[raw == greatest]
        tickets = slots.tickets(ring.live.words[equals // ring.width])
        newest = int(tickets.argmax())
        if self._element < 0 or greatest > self._value or tickets[newest] >= self._ticket:
            self._element, self._value = int(equals[newest]), float(greatest)
            self._ticket = int(tickets[newest])
