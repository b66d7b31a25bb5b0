"""The masses of priorities, and the invariants of the tree that contains their sums.

    level 3                       sum, min                          one node: the root
    level 2            sum, min            sum, min   ...
    level 1      sum, min  sum, min  ...                            16 children each
    level 0      mass of each element: (raw + eps) ** alpha, or 0 if its slot is not COMMITTED

Always true while the mutex is not held
  1. The sum of a node is recomputed from all its 16 children in a fixed order. It is never adjusted
     by a difference, so rounding errors do not accumulate. A check that recomputes a sum gets
     exactly the stored bits.
  2. ``min`` is the smallest positive mass below a node, or 0 if all masses below it are 0.
  3. A mass is positive only if the word of the slot is COMMITTED.
If a process dies during a change, the repair recomputes the leaves of the tree from the words and
raw priorities, and then the parents from the leaves.

Proportional prioritization is described in Schaul et al., "Prioritized Experience Replay", ICLR
2016, section 3.3. The C core maintains the tree (``_native/core/tree.c``).
Python computes only the mass of a single priority.
"""

from __future__ import annotations

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.format.array_types import Flags, Floats


def mass_of(raw: Floats, alpha: float, eps: float) -> Floats:
    """Returns ``(raw + eps) ** alpha``, the numerator of equation (1) in the paper."""
    raw = np.ascontiguousarray(raw, np.float64)
    mass: Floats = np.empty_like(raw)
    _core.powers(raw, eps, alpha, mass)
    return mass


def largest_mass(elements: int) -> float:
    """Returns the largest valid mass or priority in a ring with this number of elements.

    The limit keeps the sum of all masses finite.
    """
    return 1e300 / elements


def are_priorities(raw: Floats, alpha: float, eps: float, elements: int) -> Flags:
    """Returns a mask of the raw priorities that are valid in a ring with ``elements`` elements.

    A priority is valid if it is not negative, and if neither the priority nor its mass exceeds
    `largest_mass`.
    """
    most = largest_mass(elements)
    return (raw >= 0) & (raw <= most) & (mass_of(raw, alpha, eps) <= most)
