"""The largest priority of what is in a buffer: for ``max_priority_within_buffer``.

The ring itself knows the largest priority that was ever given. What is still there is found by a
look at all items; how often that is needed depends on who else writes.

    alone     the item with the largest priority is remembered, of equals the one written last. A
              write looks at what was written since, and at everything only when that item has gone
              or was given less.
    others    where a second handle is open, in any process, priorities change without a word, so
              every write looks at everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmbuffer.memory import slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


class Greatest:
    """The largest raw priority among the items of a ring.

    Args:
        ring: whose priorities are kept; what this handle changes is told to `updated`.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._alone = False  # when it was last asked
        self._element = -1  # the item that is remembered; -1: none
        self._value = 0.0  # its priority
        self._head = 0  # of the ring, when it was found
        self._capacity = ring.capacity  # then

    def default(self, leaving: NDArray[np.int64] | None = None) -> float:
        """The priority of a new item: the largest that is there; 1.0 where nothing is.

        Args:
            leaving: int64, slots that the new items take; what is in them does not count.

        Cost: O(items written since the last call), or O(capacity); see the module.
        """
        ring, head, alone = self._ring, self._ring.head, self._ring.is_alone
        since = head - self._head
        grown = ring.capacity != self._capacity  # its tickets are others then
        if grown or not (alone and self._alone) or since >= ring.capacity:
            self.forget()
        if self._element >= 0:
            self._look_at((self._head + np.arange(since)) % ring.capacity, leaving)
        if not self._is_there(leaving):
            self.forget()
            self._look_at(None, leaving)
        self._head, self._alone, self._capacity = head, alone, ring.capacity
        return 1.0 if self._element < 0 else self._value

    def updated(self, elements: NDArray[np.int64], raw: NDArray[np.float64]) -> None:
        """Priorities were set: ``raw[i]`` of ``elements[i]``."""
        if self._element >= 0 and len(raw) and raw.max() >= self._value:
            at = int(raw.argmax())  # if that was not kept, it is seen when it is looked at
            self._element, self._value = int(elements[at]), float(raw[at])

    def forget(self) -> None:
        """Priorities were changed in another way."""
        self._element = -1

    def _is_there(self, leaving: NDArray[np.int64] | None) -> bool:
        """Whether the item that is remembered stays, with the priority that it had."""
        if self._element < 0:
            return False
        at = np.array([self._element])
        slot = at // self._ring.width
        if leaving is not None and slot[0] in leaving:
            return False
        held = slots.committed(self._ring.words[slot])[0]
        return bool(held and self._ring.priorities(at)[0] == self._value)

    def _look_at(self, places: NDArray[np.int64] | None, leaving: NDArray[np.int64] | None) -> None:
        """Remember the item with the largest priority, if these slots (None: all) have it."""
        ring = self._ring
        held = slots.committed(ring.words if places is None else ring.words[places])
        if leaving is not None:
            held[leaving if places is None else np.isin(places, leaving)] = False
        elements = held.nonzero()[0] if places is None else places[held]
        if ring.width > 1:
            elements = (elements[:, None] * ring.width + np.arange(ring.width)).ravel()
        raw = ring.priorities(elements)
        raw[np.isnan(raw)] = -1.0  # taken by a writer since
        greatest = raw.max(initial=-1.0)
        if greatest >= (self._value if self._element >= 0 else 0.0):
            equals = elements[raw == greatest]
            newest = int(slots.tickets(ring.words[equals // ring.width]).argmax())
            self._element, self._value = int(equals[newest]), float(greatest)
