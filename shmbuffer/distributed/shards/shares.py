"""Computes how many items each shard draws, and their importance weights.

    counts       multinomial, by the shares of the shards last reported to the learner
    probability  of item i of shard k:  share_k / sum(shares) * mass_i / mass_of_shard_k
    correction   c_k = share_k / mass_of_shard_k, divided by the largest of them
    weight       (mass_i * c_k / min over shards of (least mass_j * c_j)) ** -beta

The mass and the least mass of a shard are read in the locked section in which its items are drawn.
Therefore the weights match the actual probabilities: an outdated share changes the draws, but a
weighted mean stays unbiased at ``beta`` 1. With one shard, the correction is 1, and the weights
are equal to those of its buffer, bit for bit.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4, with the probability
of a two-step draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Weighed(NamedTuple):
    """Values of a shard on which the weights of a batch depend."""

    share: float  # share that determined the shard's part of the batch
    mass: float  # total mass of the shard's items when its part was drawn
    least: float  # smallest mass of a single item at that time


def counts_of(shares: Mapping[str, float], count: int, key: int) -> dict[str, int]:
    """Returns how many of ``count`` items each shard draws, by node, without zero counts."""
    names = [name for name, share in shares.items() if share > 0]
    if len(names) == 1:
        return {names[0]: count}
    mass = np.array([shares[name] for name in names])
    random = np.random.Generator(np.random.Philox(key=key))
    drawn = random.multinomial(count, mass / mass.sum())
    return {name: int(n) for name, n in zip(names, drawn, strict=True) if n}


def factors_of(drawn: Sequence[Weighed], others: Iterable[Weighed], beta: float) -> list[float]:
    """Returns the factor that corrects the weights of each piece, computed within one shard."""
    known = [*drawn, *others]
    corrections = np.array([one.share / one.mass for one in known])
    corrections /= corrections.max()
    least = np.array([one.least for one in known]) * corrections
    factors: list[float] = ((least[: len(drawn)] / least.min()) ** -beta).tolist()
    return factors


def effective_size(weights: Iterable[float]) -> float:
    """Returns how many equally weighted items have the same variance.

    Source: Kish, Survey Sampling, 1965.
    """
    array = np.asarray(weights, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else 0.0
