"""Computes how many items each shard draws, and their importance weights.

    counts       multinomial, with the shares of the shards that the learner knows
    probability  of item i in shard k:  share_k / sum(shares) * mass_i / mass_of_shard_k
    correction   c_k = share_k / mass_of_shard_k, divided by the largest correction
    weight       (mass_i * c_k / min over shards of (least mass_j * c_j)) ** -beta

A shard's total mass and its least mass are read in the critical section that draws its items.
Therefore the weights match the actual probabilities. If a share is outdated, other items are drawn,
but a weighted mean remains unbiased at ``beta`` 1. With one shard, the correction is 1, and the
weights equal those of the shard's buffer bit for bit.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4, with the probability
of a two-step draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class ShardMass(NamedTuple):
    """The values of one shard from which the importance weights of a batch are computed."""

    share: float  # the shard's share when the batch was divided among the shards
    mass: float  # total mass of the shard's items when its piece was drawn
    least: float  # smallest mass of an item in the shard when its piece was drawn


def counts_of(shares: Mapping[str, float], count: int, key: int) -> dict[str, int]:
    """Divides the items of a batch among the shards at random.

    Args:
        shares: share of each shard, keyed by node.
        count: number of items in the batch.
        key: key of the random number generator.

    Returns:
        The number of items that each shard draws, keyed by node. Counts of zero are left out.
    """
    names = [name for name, share in shares.items() if share > 0]
    if len(names) == 1:
        return {names[0]: count}
    mass = np.array([shares[name] for name in names])
    random = np.random.Generator(np.random.Philox(key=key))
    drawn = random.multinomial(count, mass / mass.sum())
    return {name: int(n) for name, n in zip(names, drawn, strict=True) if n}


def factors_of(drawn: Sequence[ShardMass], others: Iterable[ShardMass], beta: float) -> list[float]:
    """Returns the factor by which the weights of each piece must be multiplied.

    A shard computes the weights of its piece from its own items alone.

    Args:
        drawn: values of the shards that have drawn a piece.
        others: values of the other shards that answer and have items.
        beta: exponent of the weights.
    """
    known = [*drawn, *others]
    corrections = np.array([one.share / one.mass for one in known])
    corrections /= corrections.max()
    least = np.array([one.least for one in known]) * corrections
    factors: list[float] = ((least[: len(drawn)] / least.min()) ** -beta).tolist()
    return factors


def effective_size(weights: Iterable[float]) -> float:
    """Returns the number of equally weighted items whose mean would have the same variance.

    Source: Kish, Survey Sampling, 1965.
    """
    array = np.asarray(weights, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else 0.0
