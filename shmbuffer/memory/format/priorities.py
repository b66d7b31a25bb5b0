"""The priority tree: what a priority weighs, and how its sums are kept.

    level 3                       sum, min                          one node: the root
    level 2            sum, min            sum, min   ...
    level 1      sum, min  sum, min  ...                            16 children each
    level 0      mass of each element: (raw + eps) ** alpha, 0 unless its slot is COMMITTED

Always true while nobody holds the mutex
  1. A parent is the sum of its children, recomputed from all 16 in one fixed order, never adjusted
     by a difference: there is no drift, and what is written is equal bit for bit to what a check
     recomputes.
  2. ``min`` is the smallest positive value below a node, 0 if there is none.
  3. A mass is positive only if the slot's word is COMMITTED.
If a process dies in the middle: leaves are recomputed from words and raw priorities, parents
from leaves.

Proportional prioritization is Schaul et al., "Prioritized Experience Replay", ICLR 2016, section
3.3. The tree is the core's (``_native/core/tree.c``); Python only has to know what a priority
weighs.
"""

from __future__ import annotations

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.format.array_types import Flags, Floats


def mass_of(raw: Floats, alpha: float, eps: float) -> Floats:
    """(raw + eps) ** alpha: equation (1) of the paper before normalisation."""
    raw = np.ascontiguousarray(raw, np.float64)
    mass: Floats = np.empty_like(raw)
    _core.powers(raw, eps, alpha, mass)
    return mass


def largest_mass(elements: int) -> float:
    """The largest mass, and priority, of an element: the sum over all elements stays finite."""
    return 1e300 / elements


def are_priorities(raw: Floats, alpha: float, eps: float, elements: int) -> Flags:
    """Which of them a ring keeps: neither they nor their masses are negative, NaN or too large."""
    most = largest_mass(elements)
    return (raw >= 0) & (raw <= most) & (mass_of(raw, alpha, eps) <= most)
