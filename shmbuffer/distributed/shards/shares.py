"""How many items each shard draws, and their weights.

    counts       multinomial, by the shares of the shards as a learner knows them
    probability  of item i of shard k:  share_k / sum(shares) * mass_i / mass_of_shard_k
    correction   c_k = share_k / mass_of_shard_k, divided by the largest of them
    weight       (mass_i * c_k / min over shards of (least mass_j * c_j)) ** -beta

The mass and the least mass of a shard are those of the locked section in which its items were
drawn. So the weights match the probability that was used: an outdated share changes the draws, but
a weighted mean stays unbiased at ``beta`` 1. With one shard the correction is 1, and the weights
are those of its buffer, bit for bit.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4, with the probability
of a draw in two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Weighed(NamedTuple):
    """Numbers of a shard that the weights of a batch depend on."""

    share: float  # by which it was given a part of the batch
    mass: float  # of all its items, when its part was drawn
    least: float  # smallest mass of one of them


def counts_of(shares: Mapping[str, float], count: int, key: int) -> dict[str, int]:
    """Returns how many of ``count`` items each shard draws, by node, if it draws any."""
    names = [name for name, share in shares.items() if share > 0]
    if len(names) == 1:
        return {names[0]: count}
    mass = np.array([shares[name] for name in names])
    random = np.random.Generator(np.random.Philox(key=key))
    drawn = random.multinomial(count, mass / mass.sum())
    return {name: int(n) for name, n in zip(names, drawn, strict=True) if n}


def factors_of(drawn: Sequence[Weighed], others: Iterable[Weighed], beta: float) -> list[float]:
    """Returns a factor for the weights of each piece, which its shard computed for itself alone."""
    known = [*drawn, *others]
    corrections = np.array([one.share / one.mass for one in known])
    corrections /= corrections.max()
    least = np.array([one.least for one in known]) * corrections
    factors: list[float] = ((least[: len(drawn)] / least.min()) ** -beta).tolist()
    return factors


def effective_size(weights: Iterable[float]) -> float:
    """Returns how many items of equal weight have this variance (Kish, Survey Sampling, 1965)."""
    array = np.asarray(weights, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else 0.0
