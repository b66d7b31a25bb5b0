"""How many items each shard draws, and what they weigh.

    counts       multinomial, by the share that a learner believes each shard to have
    probability  of item i of shard k:  share_k / sum(shares) * mass_i / mass_of_shard_k
    correction   c_k = share_k / mass_of_shard_k, divided by the largest of them
    weight       (mass_i * c_k / min over shards of (least mass_j * c_j)) ** -beta

The mass and the least mass of a shard are those of the locked section in which its items were
drawn. So the weights are right for the probability that was used: a share that is out of date
changes what is drawn, and leaves a weighted mean unbiased at ``beta`` 1. With one shard the
correction is 1, and the weights are those of its buffer, bit for bit.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4, with the probability
of a draw in two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Weighed(NamedTuple):
    """A shard as far as the weights of a batch depend on it."""

    share: float
    """What it was given a part of the batch by."""
    mass: float
    """Of all its items, when they were drawn."""
    least: float
    """The smallest mass of one of them."""


def counts_of(shares: Mapping[str, float], count: int, key: int) -> dict[str, int]:
    """How many of ``count`` items each shard draws; those that draw none are left out.

    Args:
        shares: of the shards that live, by node; not all of them 0.
        count: items of the batch.
        key: 63 bits that decide.
    """
    names = [name for name, share in shares.items() if share > 0]
    if len(names) == 1:
        return {names[0]: count}
    mass = np.array([shares[name] for name in names])
    random = np.random.Generator(np.random.Philox(key=key))
    drawn = random.multinomial(count, mass / mass.sum())
    return {name: int(n) for name, n in zip(names, drawn, strict=True) if n}


def factors_of(drawn: Sequence[Weighed], others: Iterable[Weighed], beta: float) -> list[float]:
    """What the weights of each piece, as its own shard gives them, are multiplied by.

    A shard gives ``(mass / least) ** -beta``, as if there were no other.

    Args:
        drawn: the shards of the pieces.
        others: the shards that live, weigh something and have drawn nothing for this batch.
        beta: exponent of the importance weights.
    """
    known = [*drawn, *others]
    corrections = np.array([one.share / one.mass for one in known])
    corrections /= corrections.max()
    least = np.array([one.least for one in known]) * corrections
    factors: list[float] = ((least[: len(drawn)] / least.min()) ** -beta).tolist()
    return factors


def effective_size(weights: Iterable[float]) -> float:
    """``(sum w) ** 2 / sum(w ** 2)``: how many items of equal weight say as much.

    Source: Kish, Survey Sampling, 1965.
    """
    array = np.asarray(weights, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else 0.0
