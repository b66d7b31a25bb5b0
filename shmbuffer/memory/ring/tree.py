"""The priority tree of a ring, as one handle sees it: exponents, masses, and who gets which.

Raw priorities are kept as they were given, beside their masses, so that alpha and eps can be
changed exactly. The tree itself is the C core's; see `priorities` for what it always is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.mapped.slots_file import SlotsFile


class PriorityTree:
    """Priorities of one handle's ring. Use `Ring.tree`."""

    def __init__(self, calls: Calls, live: SlotsFile) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._live = live
        # asked for the priority of new items that come without one, with the slots that they take
        # (None: they are taken already). None: it is the largest ever given
        self.initial: Callable[[Ints | None], float] | None = None

    # One load each; no lock.

    @property
    def prioritized(self) -> bool:
        """True if the tree is kept."""
        return bool(self._seat.native.prioritized)

    @property
    def alpha(self) -> float:
        """Priority exponent."""
        return float(self._seat.native.alpha)

    @property
    def eps(self) -> float:
        """The constant added to a raw priority."""
        return float(self._seat.native.eps)

    @property
    def max_priority(self) -> float | None:
        """The largest raw priority ever given; None before the first."""
        greatest = float(self._seat.native.max_priority)
        return greatest if greatest >= 0 else None

    @property
    def default_priority(self) -> float:
        """The priority of a new item: the largest ever given, or 1 before the first."""
        return max(1.0, float(self._seat.native.max_priority))

    @property
    def p_sum(self) -> float:
        """Sum of all masses."""
        return float(self._seat.native.total)

    @property
    def p_min(self) -> float:
        """Smallest positive mass; 0 if there is none."""
        return float(self._seat.native.least)

    @property
    def updates(self) -> int:
        """Grows with every priority set, and with every death: a dead one may not have counted."""
        control = self._seat.control
        deaths = control.runtime["reaped"][0] + control.runtime["repairs"][0]
        return int(control.entries["updates_applied"].sum() + deaths)

    def priorities(self, elements: Ints | slice | None = None) -> Floats:
        """Raw priorities of all or some elements, a copy; of a slice a view. NaN: none is known."""
        return self._live.raw.copy() if elements is None else self._live.raw[elements]

    def mass(self, elements: Ints | slice | None = None) -> Floats:
        """Returns the tree's leaves, or some of them, a copy; of a slice the ring's own."""
        return self._live.mass.copy() if elements is None else self._live.mass[elements]

    def of_new(self, taken: Ints | None, count: int) -> Floats | None:
        """Priorities of ``count`` new elements that come without; None: the core knows."""
        return None if self.initial is None else np.full(count, self.initial(taken))

    # Exponents.

    def bind(self, alpha: float, eps: float) -> None:
        """Switches the tree on; what is committed gets its mass. O(capacity), once."""
        self._set(alpha, eps, f"bind_priorities({alpha}, {eps})", bind=True)

    def set_alpha(self, alpha: float | None, eps: float | None = None) -> None:
        """Recomputes the masses from raw priorities, O(capacity); None keeps that exponent."""
        self._set(alpha, eps, f"set_alpha({alpha}, {eps})", bind=False)

    def _set(self, alpha: float | None, eps: float | None, what: str, *, bind: bool) -> None:
        self._calls.ask("set_alpha", alpha, eps, bind, what=what)
