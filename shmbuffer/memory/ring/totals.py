"""Reads the total mass of the items of a ring, for samples from several rings.

Each sample records the totals in the locked section that samples its first rows. Therefore the
shares of several rings can be computed from the totals at the time of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS


class Totals(NamedTuple):
    """Totals of all items of a ring, read at one point in time under its mutex.

    Each item has mass 1 if the ring has no priorities, if all masses are zero, or if the sample is
    uniform. In these cases ``mass`` equals ``length``, and ``least`` is 1.
    """

    mass: float
    """The sum of all masses, ``(priority + eps) ** alpha`` each.

    An item is sampled with probability mass / sum.
    """
    least: float
    """The smallest positive mass, which belongs to the largest importance weight."""
    max_priority: float | None
    """The largest raw priority ever set, also for a uniform sample; None before the first."""
    length: int
    """The number of elements that contain an item."""
    is_uniform: bool = False
    """True if each item has mass 1."""


class HasTotals:
    """The methods of `Ring` that exchange totals with other rings."""

    _calls: Calls

    def totals(self) -> Totals:
        """Returns the current totals for sampling by priority. Takes the mutex for one read."""
        seat = self._calls.seat
        return _parse_totals(
            self._calls.answer(lambda: seat.native.read_totals(LOCK_TIMEOUT_NS), "totals")
        )

    def drawn_from(self) -> Totals | None:
        """Returns the totals of this thread's last sample; None before the first. Takes no lock.

        The last sample is that of `sample`, `draw`, ``records.sample`` or the core's ``Outtake``
        from any ring, so call this method before the next sample. A sample of 0 items, or one that
        raises because the ring is empty, does not change the totals. The 513th and later rows, and
        rows that are sampled again, are sampled later; the totals at that time are not recorded.
        """
        found = self._calls.seat.native.drawn_from
        return None if found is None else _parse_totals(found)

    def raise_max_priority(self, value: float) -> None:
        """Raises the largest priority to at least ``value``, the largest one of another ring.

        The largest priority is the default of new items; see `PriorityTree.default_priority`. It is
        kept until `empty` or `restore`, even if the ring has no priorities yet.

        Args:
            value: A raw priority. If a larger one was already set, nothing changes.

        Raises:
            ValueError: ``value`` is NaN, infinite, negative or too large; nothing was changed.
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
