"""Sum and min trees agree with a plain array, for every kind of index and after pickling."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import (
    MinSegmentTreeFp32,
    MinSegmentTreeFp64,
    SumSegmentTreeFp32,
    SumSegmentTreeFp64,
)

pytestmark = pytest.mark.product(few=4)

SUMS = (SumSegmentTreeFp32, SumSegmentTreeFp64)
MINIMA = (MinSegmentTreeFp32, MinSegmentTreeFp64)
SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 4097)


def dtype_of(cls: Any) -> type[np.floating[Any]]:
    return np.float32 if cls.__name__.endswith("32") else np.float64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cls", SUMS)
def test_sums_and_lower_bounds_are_those_of_a_plain_array(cls: Any, size: int) -> None:
    random, tree, model = np.random.default_rng(size), cls(size), np.zeros(size, dtype_of(cls))
    assert tree.query(0, size) == 0
    assert tree.scan_lower_bound(0.0) == 0
    for _ in range(12):
        index = random.integers(0, size, random.integers(1, 40))  # may repeat an index
        # integers keep the sums exact
        value = random.integers(0, 1000, len(index)).astype(model.dtype)
        tree.update(index, value)
        for at, one in zip(index, value, strict=True):
            model[at] = one
        assert tree.at(np.arange(size)).tolist() == model.tolist()
        ends = random.integers(0, size + 1, (2, 30))
        expected = [model[at:to].sum() for at, to in ends.T]
        assert tree.query(*ends).tolist() == expected
        before = np.cumsum(model, dtype=np.float64)
        sums = np.append(random.random(30) * before[-1], [before[-1], before[0], before[-1] + 1])
        assert tree.scan_lower_bound(sums).tolist() == np.searchsorted(before, sums).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cls", MINIMA)
def test_minima_are_those_of_a_plain_array_also_of_zeros_and_below(cls: Any, size: int) -> None:
    random, tree = np.random.default_rng(size), cls(size)
    model = np.full(size, np.finfo(dtype_of(cls)).max, dtype_of(cls))
    assert tree.query(0, size) == tree.identity_element == float(model[0])
    for _ in range(12):
        index = random.integers(0, size, random.integers(1, 40))
        value = random.choice([-1.5, 0.0, 0.25, 3.0], len(index)).astype(model.dtype)
        tree.update(index, value)
        for at, one in zip(index, value, strict=True):
            model[at] = one
        ends = random.integers(0, size + 1, (2, 30))
        expected = [model[at:to].min(initial=model.dtype.type(np.inf)) for at, to in ends.T]
        expected = [tree.identity_element if np.isinf(one) else one for one in expected]
        assert tree.query(*ends).tolist() == expected


@pytest.mark.parametrize("cls", SUMS + MINIMA)
def test_an_answer_has_the_form_of_what_was_asked(cls: Any) -> None:
    tree, dtype = cls(4), dtype_of(cls)
    tree[torch.tensor([[0, 1], [2, 3]])] = torch.tensor([[4.0, 3.0], [2.0, 1.0]])
    assert isinstance(tree[2], float)
    assert tree[2] == 2
    found = tree[torch.tensor([[3], [0]])]
    assert found.tolist() == [[1.0], [4.0]]
    assert found.numpy().dtype == dtype
    found = tree[np.array([[3], [0]])]
    assert found.tolist() == [[1.0], [4.0]]
    assert found.dtype == dtype
    expected = [4.0, 1.0] if cls in MINIMA else [4.0, 10.0]
    assert tree.query(torch.tensor([0, 0]), torch.tensor([1, 4])).tolist() == expected
    assert tree.query(-3, 9) == expected[1]  # the range is clipped
    assert tree.query(2, 2) == tree.identity_element
    tree[[1, 2]] = 7  # one number for both
    assert tree[np.arange(4)].tolist() == [4, 7, 7, 1]
    assert (len(tree), tree.size, tree.capacity) == (4, 4, 8)
    if cls in SUMS:
        assert tree.scan_lower_bound(4.5) == 1
        assert tree.scan_lower_bound(torch.tensor([[4.0], [99.0]])).tolist() == [[0], [4]]


@pytest.mark.parametrize("cls", SUMS + MINIMA)
def test_what_is_wrong_changes_nothing(cls: Any) -> None:
    tree = cls(3)
    tree[np.arange(3)] = [3, 2, 1]
    for index in (3, -1, [0, 7]):
        with pytest.raises(IndexError, match="with 3 numbers; indices must be from 0 to 2"):
            tree[index] = 5
    for value in ([1, 2], float("nan")):
        with pytest.raises(ValueError, match="must be a number or 3 numbers, without NaN, got"):
            tree[np.arange(3)] = value
    with pytest.raises(TypeError, match="indices must be integers, got dtype float64"):
        tree[0.5]
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        cls(0)
    with pytest.raises(TypeError, match=r"size must be a number of items \(an int\), got"):
        cls(1.5)
    assert tree[np.arange(3)].tolist() == [3, 2, 1]


@pytest.mark.parametrize("cls", SUMS + MINIMA)
def test_a_tree_comes_back_from_a_pickle(cls: Any) -> None:
    tree = cls(300)
    tree[np.arange(100, 200)] = np.arange(1, 101)
    other = pickle.loads(pickle.dumps(tree))
    assert len(other) == 300
    assert other[np.arange(300)].tolist() == tree[np.arange(300)].tolist()
    assert other.query(0, 300) == tree.query(0, 300)
    other[150] = 0
    assert tree[150] == 51  # a different tree


def test_float32_numbers_are_added_up_without_losing_the_small_ones() -> None:
    tree = SumSegmentTreeFp32(4097)
    tree[0], tree[np.arange(1, 4097)] = 2.0**24, 1
    assert tree.query(0, 4097) == 2.0**24 + 4096
