"""NumPy version of the sums and minima of the priority tree, for comparison with the core."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.format.layout import FANOUT
from shmbuffer.memory.mapped.slots_file import Floats, SlotsFile


def sums_of(children: Floats) -> Floats:
    """Returns the parents of a level in the C core's order of summation.

    Args:
        children: float64, whose length is a multiple of 16.
    """
    c = children.reshape(-1, 4, 4)
    quarters = (c[:, :, 0] + c[:, :, 1]) + (c[:, :, 2] + c[:, :, 3])
    total: Floats = ((quarters[:, 0] + quarters[:, 1]) + quarters[:, 2]) + quarters[:, 3]
    return total


def least_of(children: Floats) -> Floats:
    """Returns the smallest positive value of each group of 16, or 0 if there is none."""
    positive = np.where(children > 0, children, np.inf).reshape(-1, FANOUT)
    least: Floats = positive.min(axis=1)
    least[np.isinf(least)] = 0.0
    return least


def differences(live: SlotsFile) -> int:
    """Returns the number of nodes that differ from the value computed from their children."""
    sums = least = live.masses
    wrong = 0
    for found_sums, found_least in live.levels:
        nodes = len(sums) // FANOUT
        wrong += int(np.count_nonzero(found_sums[:nodes] != sums_of(sums)))
        wrong += int(np.count_nonzero(found_least[:nodes] != least_of(least)))
        sums, least = found_sums, found_least
    return wrong
