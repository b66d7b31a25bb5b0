"""Strategies that select items from a group with more items than requested."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.format.array_types import Floats, Ints

_SAME = 1e-12  # relative difference below which two variances count as equal


def last(members: Ints, wanted: int) -> Ints:
    """Returns the ``wanted`` newest members of each group, oldest first.

    Args:
        members: elements of the items in each group, oldest first, int64 ``[groups, items]``.
        wanted: number of items to select from each group.
    """
    return members[:, members.shape[1] - wanted :]


def best(members: Ints, rewards: Floats, wanted: int) -> Ints:
    """Returns the ``wanted`` members of each group with the largest rewards.

    The members are sorted by descending reward. Of equal rewards, the oldest item is first.
    """
    order = np.argsort(-rewards, axis=1, kind="stable")[:, :wanted]
    return np.take_along_axis(members, order, 1)


def most_different(members: Ints, rewards: Floats, wanted: int) -> Ints:
    """Returns ``wanted`` members of each group so that the variance of their rewards is largest.

    The selection consists of members with the smallest rewards and members with the largest
    rewards, in ascending order of reward. Of several selections with equal variance, the selection
    with the largest sum is returned.
    """
    order = np.argsort(rewards, axis=1, kind="stable")
    values = np.take_along_axis(rewards, order, 1)
    groups, count = values.shape
    values = values - values.mean(1, keepdims=True)  # avoids a loss of precision in the squares
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
