"""The sums and minima of the priority tree in NumPy, which the core is compared with."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.format.layout import FANOUT
from shmbuffer.memory.mapped.slots_file import Floats, SlotsFile


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
