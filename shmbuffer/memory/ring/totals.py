"""The total weight of the items of a ring, for draws from several rings.

A draw records it in the locked section in which it draws its first rows. The shares of several
rings can therefore use numbers from the moments of their draws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS


class Totals(NamedTuple):
    """Totals of all items of a ring, at one moment under its mutex.

    Each item weighs 1 if the ring keeps no priorities, if all masses are zero, and in a draw
    without priorities. In these cases ``mass`` is ``length``, and ``least`` is 1.
    """

    mass: float
    """The sum of all masses, ``(priority + eps) ** alpha`` each.

    An item is drawn with the probability mass / sum.
    """
    least: float
    """The smallest positive mass; its importance weight is the largest."""
    max_priority: float | None
    """The largest raw priority ever given, even in a uniform draw; None before the first."""
    length: int
    """The number of elements that contain an item."""
    is_uniform: bool = False
    """True if each item weighs 1."""


class HasTotals:
    """The methods of `Ring` that exchange totals with other rings."""

    _calls: Calls

    def totals(self) -> Totals:
        """Returns the current totals for a draw by priority. Takes the mutex for one read."""
        seat = self._calls.seat
        return _parse_totals(
            self._calls.answer(lambda: seat.native.read_totals(LOCK_TIMEOUT_NS), "totals")
        )

    def drawn_from(self) -> Totals | None:
        """Returns the totals of this thread's last draw; None before its first one. No lock.

        It is the last draw of `sample`, `draw`, ``records.sample`` or the core's ``Outtake`` from
        any ring, so call this before the next draw. An empty draw, or one that raises because the
        ring is empty, does not change it. Rows from the 513th on, and rows that are drawn again
        because they were overwritten, are drawn at later moments, which are not recorded.
        """
        found = self._calls.seat.native.drawn_from
        return None if found is None else _parse_totals(found)

    def raise_max_priority(self, value: float) -> None:
        """Raises the largest priority ever given to at least ``value``, seen in another ring.

        New items without a priority start from it; see `PriorityTree.default_priority`. It is kept
        until `empty` or `restore`, even if the ring keeps no priorities yet.

        Args:
            value: A raw priority. If a larger one was given, nothing changes.

        Raises:
            ValueError: It is NaN, infinite, negative or too large; nothing was changed.
        """
        shown = np.array([value], np.float64)
        self._calls.ask("raise_max_priority", value, priorities=shown)


def _parse_totals(found: tuple[float, float, float, int]) -> Totals:
    """Converts the totals of the core; a sum of zero means a uniform draw."""
    mass, least, greatest, length = found
    is_uniform = mass == 0
    if is_uniform:
        mass, least = float(length), 1.0
    return Totals(mass, least, greatest if greatest >= 0 else None, length, is_uniform)
