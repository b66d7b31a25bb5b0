"""The priority tree of a ring: exponents, masses and raw priorities.

The raw priorities are stored in addition to the masses, so that the masses can be recomputed
exactly when alpha or eps changes. The C core maintains the tree. The module `priorities` describes
its invariants.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.mapped.slots_file import SlotsFile


class PriorityTree:
    """Access to the priorities in a handle's ring. Available as `Ring.tree`."""

    def __init__(self, calls: Calls, live: SlotsFile) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._live = live
        # Function that returns the default priority of new items. Its argument is the array of
        # their slots, or None if the slots are already claimed. If there is no function, the
        # default is the largest priority that was ever set.
        self.initial: Callable[[Ints | None], float] | None = None

    # The properties up to `p_min` read one value, without a lock.

    @property
    def prioritized(self) -> bool:
        """True if the ring has priorities."""
        return bool(self._seat.native.prioritized)

    @property
    def alpha(self) -> float:
        """The priority exponent."""
        return float(self._seat.native.alpha)

    @property
    def eps(self) -> float:
        """The constant that is added to raw priorities."""
        return float(self._seat.native.eps)

    @property
    def max_priority(self) -> float | None:
        """The largest raw priority that was ever set, or None if no priority was set."""
        greatest = float(self._seat.native.max_priority)
        return greatest if greatest >= 0 else None

    @property
    def default_priority(self) -> float:
        """The default priority of a new item: the largest priority ever set, but at least 1."""
        return max(1.0, float(self._seat.native.max_priority))

    @property
    def p_sum(self) -> float:
        """The sum of all masses."""
        return float(self._seat.native.total)

    @property
    def p_min(self) -> float:
        """The smallest positive mass, or 0 if no mass is positive."""
        return float(self._seat.native.least)

    @property
    def updates(self) -> int:
        """A number that increases with every priority update, for the detection of changes.

        It is the sum of counted updates and deaths of clients. A client may die after an update and
        before it counts the update.
        """
        control = self._seat.control
        deaths = control.runtime["reaped"][0] + control.runtime["repairs"][0]
        return int(control.entries["updates_applied"].sum() + deaths)

    def priorities(self, elements: Ints | slice | None = None) -> Floats:
        """Returns the raw priorities of these elements, or of all elements if None is passed.

        An element without a priority has NaN. For a slice, the result is a view in shared memory.
        Otherwise it is a copy.
        """
        return self._live.raw.copy() if elements is None else self._live.raw[elements]

    def mass(self, elements: Ints | slice | None = None) -> Floats:
        """Returns the masses of these elements, or of all elements if None is passed.

        For a slice, the result is a view in shared memory. Otherwise it is a copy.
        """
        return self._live.mass.copy() if elements is None else self._live.mass[elements]

    def choose_priorities(self, taken: Ints | None, count: int) -> Floats | None:
        """Returns default priorities for ``count`` new elements, or None if the core chooses them.

        Args:
            taken: The slots of the new items, or None if they are already claimed.
            count: Number of elements.
        """
        return None if self.initial is None else np.full(count, self.initial(taken))

    # Exponents.

    def bind(self, alpha: float, eps: float) -> None:
        """Enables priorities, and computes the masses of all items. Costs O(capacity) once."""
        self._set(alpha, eps, f"bind_priorities({alpha}, {eps})", bind=True)

    def set_alpha(self, alpha: float | None, eps: float | None = None) -> None:
        """Changes the exponents, and recomputes all masses from the raw priorities. O(capacity).

        If None, keeps the current value of ``alpha`` or ``eps``.
        """
        self._set(alpha, eps, f"set_alpha({alpha}, {eps})", bind=False)

    def _set(self, alpha: float | None, eps: float | None, what: str, *, bind: bool) -> None:
        """Sets the exponents in the C core. ``what`` describes the call for messages."""
        self._calls.ask("set_alpha", alpha, eps, bind, what=what)
