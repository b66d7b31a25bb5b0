"""Gives a handle access to the priority tree of a ring: exponents, masses and priorities.

The raw priorities are stored in addition to the masses, so the masses can be recomputed exactly if
alpha or eps is changed. The C core maintains the tree; `priorities` lists its invariants.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.mapped.slots_file import SlotsFile


class PriorityTree:
    """The priorities of one handle's ring. Available as `Ring.tree`."""

    def __init__(self, calls: Calls, live: SlotsFile) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._live = live
        # returns the default priority of new items; the argument is their slots, or None if the
        # slots are already claimed. None: the largest priority ever set
        self.initial: Callable[[Ints | None], float] | None = None

    # Each property is one load, without a lock.

    @property
    def prioritized(self) -> bool:
        """True if the ring keeps priorities."""
        return bool(self._seat.native.prioritized)

    @property
    def alpha(self) -> float:
        """The priority exponent."""
        return float(self._seat.native.alpha)

    @property
    def eps(self) -> float:
        """The constant added to a raw priority."""
        return float(self._seat.native.eps)

    @property
    def max_priority(self) -> float | None:
        """The largest raw priority ever set; None before the first."""
        greatest = float(self._seat.native.max_priority)
        return greatest if greatest >= 0 else None

    @property
    def default_priority(self) -> float:
        """The default priority of a new item: the largest ever set, or 1 before the first."""
        return max(1.0, float(self._seat.native.max_priority))

    @property
    def p_sum(self) -> float:
        """The sum of all masses."""
        return float(self._seat.native.total)

    @property
    def p_min(self) -> float:
        """The smallest positive mass; 0 if no mass is positive."""
        return float(self._seat.native.least)

    @property
    def updates(self) -> int:
        """Number of updates plus deaths, because a client may die before it counts its update."""
        control = self._seat.control
        deaths = control.runtime["reaped"][0] + control.runtime["repairs"][0]
        return int(control.entries["updates_applied"].sum() + deaths)

    def priorities(self, elements: Ints | slice | None = None) -> Floats:
        """Returns a copy of raw priorities, or a view for a slice; NaN without a priority."""
        return self._live.raw.copy() if elements is None else self._live.raw[elements]

    def mass(self, elements: Ints | slice | None = None) -> Floats:
        """Returns a copy of the tree's leaves, or a live view for a slice."""
        return self._live.mass.copy() if elements is None else self._live.mass[elements]

    def choose_priorities(self, taken: Ints | None, count: int) -> Floats | None:
        """Returns priorities for ``count`` new elements; None if the core chooses them."""
        return None if self.initial is None else np.full(count, self.initial(taken))

    # Exponents.

    def bind(self, alpha: float, eps: float) -> None:
        """Enables the tree, and computes the masses of all items. O(capacity), once."""
        self._set(alpha, eps, f"bind_priorities({alpha}, {eps})", bind=True)

    def set_alpha(self, alpha: float | None, eps: float | None = None) -> None:
        """Recomputes the masses from the raw priorities. O(capacity). None keeps the old value."""
        self._set(alpha, eps, f"set_alpha({alpha}, {eps})", bind=False)

    def _set(self, alpha: float | None, eps: float | None, what: str, *, bind: bool) -> None:
        self._calls.ask("set_alpha", alpha, eps, bind, what=what)
