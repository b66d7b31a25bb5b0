"""H11: draws follow priorities, by a chi-square test of a million draws with a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings

pytestmark = pytest.mark.slow

DRAWS = 1_000_000
CAPACITY = 1000
#: The standard normal exceeds this with a probability of one in a million.
ONE_IN_A_MILLION = 4.753

SLOTS = np.arange(CAPACITY)
DISTRIBUTIONS = {
    "equal": np.ones(CAPACITY),
    "linear": SLOTS + 50.0,
    "halves": np.ldexp(1.0, -(SLOTS % 8)),
    "every other one is zero": (SLOTS % 2) * 3.0,
    "one outweighs all others": np.where(SLOTS == 77, 1000.0, 1.0),
}


def chi_square_is_plausible(found: NDArray[np.int64], expected: NDArray[np.float64]) -> bool:
    """True unless a sum this large has a probability below 1e-6 (Wilson and Hilferty 1931)."""
    assert (found[expected == 0] == 0).all(), "something without a mass was drawn"
    drawn, hoped_for = found[expected > 0], expected[expected > 0]
    assert hoped_for.min() >= 5, "too few draws for a chi-square test"
    freedom = len(drawn) - 1
    assert freedom >= 64
    total = float(((drawn - hoped_for) ** 2 / hoped_for).sum())
    cube = (total / freedom) ** (1 / 3)
    spread = 2 / (9 * freedom)
    return abs(cube - (1 - spread)) / math.sqrt(spread) < ONE_IN_A_MILLION


def ring_with(engine: Engine, priorities: NDArray[np.float64]) -> Ring:
    ring = engine.define(Schema((Leaf(("number",), "int64", ()),), CAPACITY))
    ring.write([SLOTS.ctypes.data], CAPACITY, priorities)
    return ring


def drawn(ring: Ring, seed: int, *, prioritized: bool) -> NDArray[np.int64]:
    """Counts how often each slot was drawn."""
    index, tickets = np.empty(DRAWS, np.int64), np.empty(DRAWS, np.int64)
    places = index.ctypes.data, tickets.ctypes.data
    ring.sample(DRAWS, seed, None, *places, prioritized=prioritized)
    return np.bincount(index, minlength=CAPACITY)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_draws_follow_priorities(name: str, alpha: float) -> None:
    with Engine.anonymous(Settings(CAPACITY, alpha=alpha, eps=0.0)) as engine:
        priorities = DISTRIBUTIONS[name]
        ring = ring_with(engine, priorities)
        mass = priorities**alpha
        found = drawn(ring, 1, prioritized=True)
        assert chi_square_is_plausible(found, mass / mass.sum() * DRAWS)


def test_draws_follow_priorities_that_were_updated() -> None:
    rng = np.random.default_rng(2)
    with Engine.anonymous(Settings(CAPACITY, alpha=0.5, eps=0.0)) as engine:
        ring = ring_with(engine, np.ones(CAPACITY))
        for _ in range(100):
            ring.update(rng.integers(0, CAPACITY, 64), rng.uniform(0.1, 4, 64))
        mass = ring.tree.priorities() ** 0.5
        found = drawn(ring, 3, prioritized=True)
        assert chi_square_is_plausible(found, mass / mass.sum() * DRAWS)


def test_uniform_draws_do_not_look_at_priorities() -> None:
    with Engine.anonymous(Settings(CAPACITY, alpha=1.0, eps=0.0)) as engine:
        ring = ring_with(engine, DISTRIBUTIONS["linear"])
        found = drawn(ring, 4, prioritized=False)
        assert chi_square_is_plausible(found, np.full(CAPACITY, DRAWS / CAPACITY))


def test_the_chi_square_notices_one_slot_in_a_thousand_that_is_drawn_too_often() -> None:
    found = np.random.default_rng(5).multinomial(DRAWS, np.full(CAPACITY, 1 / CAPACITY))
    expected = np.full(CAPACITY, DRAWS / CAPACITY)
    assert chi_square_is_plausible(found, expected)
    found[0] += 500
    assert not chi_square_is_plausible(found, expected)
