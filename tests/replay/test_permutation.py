"""Permutations that are computed piece by piece contain each number once and are uniform."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from shmbuffer.samplers.permutation import Permutation


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 99, 100, 101, 8192, 10_007, 2**16 + 1])
@pytest.mark.parametrize("key", [None, 0, 2**63 - 1])
def test_each_number_is_there_once(count: int, key: int | None) -> None:
    order = Permutation(count, key)
    assert len(order) == count
    assert order[:].dtype == np.int64
    assert np.array_equal(np.sort(order[:]), np.arange(count))
    if key is None or count > 5:  # a few numbers may be sorted by chance
        assert np.array_equal(order[:], np.arange(count)) is (key is None)


def test_a_piece_is_the_same_whatever_was_looked_at_before() -> None:
    order, whole = Permutation(20_000, 7), Permutation(20_000, 7)[:]
    rng = np.random.default_rng(3)
    for first, size in zip(rng.integers(20_000, size=50), rng.integers(9000, size=50), strict=True):
        assert np.array_equal(order[first : first + size], whole[first : first + size])
    assert len(order[20_000:20_010]) == 0
    assert np.array_equal(pickle.loads(pickle.dumps(order))[100:200], whole[100:200])


def test_orders_of_different_keys_are_as_even_as_those_of_a_table() -> None:
    count, keys = 8192, 400
    rng = np.random.default_rng(1)
    centred = np.arange(count) - (count - 1) / 2
    found = []
    for key in rng.integers(2**63, size=keys):
        order = Permutation(count, int(key))[:]
        value = order - (count - 1) / 2
        found.append(
            (
                (value * centred).sum() / (centred**2).sum() * count**0.5,  # standard normal
                (value[1:] * value[:-1]).sum() / (centred**2).sum() * count**0.5,  # standard normal
                (order == np.arange(count)).sum() - 1.0,  # a Poisson number less its mean of 1
                ((np.diff(order) > 0).mean() - 0.5) * (12 * count) ** 0.5,  # standard normal
            )
        )
    for statistic in np.array(found).T:
        assert abs(statistic.mean()) < 4 / keys**0.5
        assert 0.8 < statistic.std() < 1.2
