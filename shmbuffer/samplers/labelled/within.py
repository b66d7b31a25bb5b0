"""Selects items from a group that has more items than requested."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.format.array_types import Floats, Ints

_SAME = 1e-12  # relative difference of variances that is attributed to rounding


def last(members: Ints, wanted: int) -> Ints:
    """Returns the newest members of each group in ``[groups, items]``, sorted by age."""
    return members[:, members.shape[1] - wanted :]


def best(members: Ints, rewards: Floats, wanted: int) -> Ints:
    """Returns the members with the largest rewards, in descending order. Ties are sorted by age."""
    order = np.argsort(-rewards, axis=1, kind="stable")[:, :wanted]
    return np.take_along_axis(members, order, 1)


def most_different(members: Ints, rewards: Floats, wanted: int) -> Ints:
    """Returns the members whose rewards have the largest variance, in ascending order.

    The result combines some of the smallest and some of the largest rewards. Of selections with
    equal variance, the one with the largest sum is returned.
    """
    order = np.argsort(rewards, axis=1, kind="stable")
    values = np.take_along_axis(rewards, order, 1)
    groups, count = values.shape
    values = values - values.mean(1, keepdims=True)  # keeps the precision of the squares
    sums, squares = np.zeros((2, groups, count + 1))
    np.cumsum(values, 1, out=sums[:, 1:])
    np.cumsum(values**2, 1, out=squares[:, 1:])
    low = np.arange(wanted + 1)
    high = count - (wanted - low)
    total = sums[:, low] + sums[:, count:] - sums[:, high]
    square = squares[:, low] + squares[:, count:] - squares[:, high]
    variances = square / wanted - (total / wanted) ** 2
    largest = variances.max(1, keepdims=True)
    same = variances >= largest - _SAME * np.maximum(1.0, np.abs(largest))
    lows = np.where(same, total, -np.inf).argmax(1)[:, None]
    rank = np.arange(count)
    chosen = (rank < lows) | (rank >= count - (wanted - lows))
    found: Ints = np.take_along_axis(members, order, 1)[chosen].reshape(groups, wanted)
    return found
