"""The total mass of the items in a ring, which is needed to sample from several rings as one.

Each sample records the totals in the critical section in which it samples its first rows. The
importance weights of a batch from several rings are computed from these totals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS


class Totals(NamedTuple):
    """Totals of all items in a ring, read together under its mutex.

    If the ring has no priorities, if all masses are zero, or if the sample is uniform, each item
    counts with mass 1. In these cases ``mass`` equals ``length``, and ``least`` is 1.
    """

    mass: float
    """Sum of all masses, ``(priority + eps) ** alpha``.

    An item is sampled with probability item mass / ``mass``.
    """
    least: float
    """Smallest positive mass. The item with this mass has the largest importance weight."""
    max_priority: float | None
    """Largest raw priority that was ever set, or None. Also set for a uniform sample."""
    length: int
    """Number of elements that contain an item."""
    is_uniform: bool = False
    """True if each item counts with mass 1."""


class HasTotals:
    """The methods of `Ring` that are used to sample from several rings as one."""

    _calls: Calls

    def totals(self) -> Totals:
        """Returns the current totals for prioritized sampling. Takes the mutex for the read."""
        seat = self._calls.seat
        return _parse_totals(
            self._calls.answer(lambda: seat.native.read_totals(LOCK_TIMEOUT_NS), "totals")
        )

    def drawn_from(self) -> Totals | None:
        """Returns the totals that this thread's last sample recorded, or None before the first.

        The last sample may be from any ring, so call this method before the next sample. It was
        made by `sample`, ``records.sample`` or the C core's ``Outtake``. A sample of 0 items, or a
        sample that fails because the ring is empty, does not change the totals. Takes no lock.

        The totals are those at the time when the first 512 rows were sampled. Other rows, and rows
        that had to be sampled again, were sampled later, when the totals may have been different.
        """
        found = self._calls.seat.native.drawn_from
        return None if found is None else _parse_totals(found)

    def raise_max_priority(self, value: float) -> None:
        """Raises the largest priority to at least ``value``, the largest priority of another ring.

        New items get this priority by default (`PriorityTree.default_priority`). It stays in effect
        until `empty` or `restore` is called. It can be set before the ring has priorities.

        Args:
            value: A raw priority. Nothing changes if the ring's largest priority is not smaller.

        Raises:
            ValueError: ``value`` is NaN, infinite, negative or too large. Nothing was changed.
        """
        shown = np.array([value], np.float64)
        self._calls.ask("raise_max_priority", value, priorities=shown)


def _parse_totals(found: tuple[float, float, float, int]) -> Totals:
    """Converts the totals from the C core, in which a sum of 0 means a uniform sample."""
    mass, least, greatest, length = found
    is_uniform = mass == 0
    if is_uniform:
        mass, least = float(length), 1.0
    return Totals(mass, least, greatest if greatest >= 0 else None, length, is_uniform)
