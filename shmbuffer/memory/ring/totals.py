"""The total weight of the items of a ring, for one draw from several rings.

A draw notes it in the locked section in which it draws its first rows, so that shares of several
rings can be made from numbers of the moments in which they were drawn from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS


class Totals(NamedTuple):
    """All items of a ring, at one moment under its mutex.

    Each item weighs 1 where the ring keeps no priorities, where all masses are zero, and in a draw
    that asks for no priorities: then ``mass`` is ``length``, and ``least`` 1.
    """

    mass: float
    """Sum of all masses, ``(priority + eps) ** alpha`` each: an item is drawn with the probability
    mass / sum."""
    least: float
    """The smallest positive mass; its weight is the largest."""
    max_priority: float | None
    """The largest raw priority ever given, whatever is drawn by; None before the first."""
    length: int
    """Elements that hold an item."""
    is_uniform: bool = False
    """True if each item weighs 1."""


class HasTotals:
    """The part of `Ring` that is asked for totals, and told those of others."""

    _calls: Calls

    def totals(self) -> Totals:
        """Returns the totals for a draw by priority now. Waits for the mutex, for one read."""
        seat = self._calls.seat
        return _told(self._calls.answer(lambda: seat.native.totals(LOCK_TIMEOUT_NS), "totals"))

    def drawn_from(self) -> Totals | None:
        """Returns the totals of this thread's last draw; None before its first one. No lock.

        That is any draw of `sample`, `draw`, ``records.sample`` or the core's ``Outtake``, from any
        ring: ask before the next. A draw of nothing, or one that raises because there is nothing
        to draw from, leaves it as it is. Rows from the 513th on, and those that are drawn again
        because they were written over, are of later moments, which are not told.
        """
        found = self._calls.seat.native.drawn_from
        return None if found is None else _told(found)

    def raise_max_priority(self, value: float) -> None:
        """The largest priority ever given becomes at least this one: it was seen in another ring.

        New items without a priority start from it, see `PriorityTree.default_priority`. It is kept
        until `empty` or `restore`, though the ring keeps no priorities yet.

        Args:
            value: raw. Where a larger one was given, nothing changes.

        Raises:
            ValueError: it is NaN, infinite, negative or too large; nothing was changed.
        """
        shown = np.array([value], np.float64)
        self._calls.ask("raise_max_priority", value, priorities=shown)


def _told(found: tuple[float, float, float, int]) -> Totals:
    mass, least, greatest, length = found
    is_uniform = mass == 0
    if is_uniform:
        mass, least = float(length), 1.0
    return Totals(mass, least, greatest if greatest >= 0 else None, length, is_uniform)
