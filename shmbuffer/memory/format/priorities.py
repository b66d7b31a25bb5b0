"""Masses of priorities, and the rules of the tree that sums them.

    level 3                       sum, min                          one node: the root
    level 2            sum, min            sum, min   ...
    level 1      sum, min  sum, min  ...                            16 children each
    level 0      mass of each element: (raw + eps) ** alpha, 0 unless its slot is COMMITTED

Always true while the mutex is free
  1. A parent is the sum of its children. It is recomputed from all 16 children in a fixed order,
     and never adjusted by a difference. There is no drift, and stored sums are equal, bit for bit,
     to those that a check recomputes.
  2. ``min`` is the smallest positive value below a node, or 0 if there is none.
  3. A mass is positive only if the slot's word is COMMITTED.
If a process dies during a change, a repair recomputes the leaves from the words and raw
priorities, and then the parents from the leaves.

Proportional prioritization is described in Schaul et al., "Prioritized Experience Replay", ICLR
2016, section 3.3. The C core maintains the tree (``_native/core/tree.c``).
Python computes only the mass of a single priority.
"""

from __future__ import annotations

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.format.array_types import Flags, Floats


def mass_of(raw: Floats, alpha: float, eps: float) -> Floats:
    """Returns (raw + eps) ** alpha, which is equation (1) of the paper before normalisation."""
    raw = np.ascontiguousarray(raw, np.float64)
    mass: Floats = np.empty_like(raw)
    _core.powers(raw, eps, alpha, mass)
    return mass


def largest_mass(elements: int) -> float:
    """Returns the largest valid mass or priority, which keeps the sum of all masses finite."""
    return 1e300 / elements


def are_priorities(raw: Floats, alpha: float, eps: float, elements: int) -> Flags:
    """Returns which raw priorities are valid: they and their masses are in the range of a ring."""
    most = largest_mass(elements)
    return (raw >= 0) & (raw <= most) & (mass_of(raw, alpha, eps) <= most)
