"""Priorities that a ring can keep: looked at before anything is claimed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


def require_masses(ring: Ring, priorities: NDArray[np.float64]) -> None:
    """ValueError where one of them is no priority, as the ring itself says it at commit."""
    with np.errstate(over="ignore", invalid="ignore"):
        mass = (priorities + ring.eps) ** ring.alpha
    limit = 1e300 / ring.elements
    fits = (priorities >= 0) & (priorities <= limit) & (mass <= limit)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(
            f"priority {priorities[at]} at position {at} is not a number from 0 to {limit:.0e} "
            "(also after ** alpha); nothing was changed"
        )
