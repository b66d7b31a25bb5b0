"""Priorities that a ring can keep: looked at before anything is claimed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmbuffer.memory.priorities import are_priorities, largest_mass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


def require_masses(ring: Ring, priorities: NDArray[np.float64]) -> None:
    """ValueError where one of them is no priority, as the ring itself says it at commit."""
    fits = are_priorities(priorities, ring.alpha, ring.eps, ring.elements)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(
            f"priority {priorities[at]} at position {at} is not a number from 0 to "
            f"{largest_mass(ring.elements):.0e} "
            "(also after ** alpha); nothing was changed"
        )
