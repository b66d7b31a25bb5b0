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
3.3. This file is the tree as Python reads it, for `check`; the C core has the calls that change it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.layout import FANOUT
from shmbuffer.memory.slots_file import SlotsFile

Floats = NDArray[np.float64]


def sums_of(children: Floats) -> Floats:
    """Parents of a level, in the C core's order of summation.

    Args:
        children: float64, a multiple of 16.
    """
    c = children.reshape(-1, 4, 4)
    quarters = (c[:, :, 0] + c[:, :, 1]) + (c[:, :, 2] + c[:, :, 3])
    total: Floats = ((quarters[:, 0] + quarters[:, 1]) + quarters[:, 2]) + quarters[:, 3]
    return total


def least_of(children: Floats) -> Floats:
    """Smallest positive value of each group of 16, 0 where there is none."""
    positive = np.where(children > 0, children, np.inf).reshape(-1, FANOUT)
    least: Floats = positive.min(axis=1)
    least[np.isinf(least)] = 0.0
    return least


def mass_of(raw: Floats, alpha: float, eps: float) -> Floats:
    """(raw + eps) ** alpha: equation (1) of the paper before normalisation."""
    mass: Floats = np.power(raw + eps, alpha)
    return mass


def largest_mass(elements: int) -> float:
    """Of one element, and its largest priority: their sum stays finite with every one full."""
    return 1e300 / elements


def are_priorities(raw: Floats, alpha: float, eps: float, elements: int) -> NDArray[np.bool_]:
    """Which of them a ring keeps: neither they nor their masses are negative, NaN or too large."""
    most = largest_mass(elements)
    with np.errstate(over="ignore", invalid="ignore"):
        return (raw >= 0) & (raw <= most) & (mass_of(raw, alpha, eps) <= most)


def differences(live: SlotsFile) -> int:
    """Number of nodes that are not what their children say, bit for bit."""
    sums = least = live.masses
    wrong = 0
    for found_sums, found_least in live.levels:
        nodes = len(sums) // FANOUT
        wrong += int(np.count_nonzero(found_sums[:nodes] != sums_of(sums)))
        wrong += int(np.count_nonzero(found_least[:nodes] != least_of(least)))
        sums, least = found_sums, found_least
    return wrong


def wrong_leaves(live: SlotsFile, items: NDArray[np.bool_], alpha: float, eps: float) -> int:
    """Number of leaves that are not the mass of their raw priority, or of no item.

    But for rounding: numpy's power may differ from the C library's in the last bit.
    """
    expected = np.where(items, mass_of(np.where(items, live.raw, 0.0), alpha, eps), 0.0)
    return int(np.count_nonzero(~np.isclose(live.mass, expected, rtol=1e-12, atol=0.0)))
