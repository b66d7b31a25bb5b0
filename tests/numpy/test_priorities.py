"""Priorities, the limiter and waiting work as in the other client, but without tensors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    PrioritizedSampler,
    RateLimiter,
    RateLimitTimeout,
    TensorDictReplayBuffer,
)
from shmbuffer.numpy import PriorityUpdate
from tests.kit.rings import ring_of
from tests.numpy.conftest import Directory


def raw_of(buffer: object) -> list[float]:
    """Returns the raw priorities of the stored items."""
    ring = ring_of(buffer)
    return ring.tree.priorities(ring.live.committed()).tolist()


@pytest.mark.parametrize("given", ["arrays", "float32", "a list", "a tensor", "of another leaf"])
def test_priorities_in_the_data_become_the_items(given: str, directory: Directory) -> None:
    directory.create(alpha=0.6)
    arrays = directory.arrays()
    if given != "of another leaf":
        arrays.extend({"a": np.zeros(1)})
    numbers = np.array([3.0, 0.5, 2.0])
    priority = {
        "float32": numbers.astype(np.float32),
        "a list": numbers.tolist(),
        "a tensor": torch.from_numpy(numbers),
    }.get(given, numbers)
    arrays.extend({"a": np.arange(3.0), "td_error": priority})
    arrays.add({"a": 3.0, "td_error": 7})
    assert raw_of(arrays)[-4:] == [3.0, 0.5, 2.0, 7.0]
    arrays.extend({"a": np.zeros(1), **({"td_error": [7.0]} if given == "of another leaf" else {})})
    assert raw_of(arrays)[-1] == 7.0
    assert raw_of(directory.tensors()) == raw_of(arrays)


def test_several_priorities_of_an_item_become_one(directory: Directory) -> None:
    directory.create(alpha=0.6)
    arrays = directory.arrays()
    arrays.extend({"a": np.zeros(1)})
    arrays.extend({"a": np.zeros(2), "td_error": np.array([[1.0, 3.0], [5.0, 2.0]])})
    assert raw_of(arrays) == [1.0, 3.0, 5.0]
    sample = arrays.sample(4)
    errors = np.arange(12.0).reshape(4, 3)
    assert arrays.update_priority(sample, errors) == (4, 0)
    with pytest.raises(RuntimeError, match="got 5 priorities for 4 items"):
        arrays.update_priority(sample, np.ones(5))


def test_a_nested_priority_key_is_found(directory: Directory) -> None:
    directory.create(alpha=0.6, priority_key=("agent", "error"))
    arrays = directory.arrays()
    arrays.extend({"agent": {"error": np.array([2.0, 4.0]), "a": np.zeros(2)}})
    arrays.extend({("agent", "error"): np.array([5.0]), ("agent", "a"): np.zeros(1)})
    assert raw_of(arrays) == [2.0, 4.0, 5.0]
    assert arrays.update_priority({**arrays.sample(2), "agent": {"error": np.ones(2)}})[0] == 2


@pytest.mark.parametrize(
    "form", ["sample", "entries", "float32", "tensor", "tensors", "lists", "one"]
)
def test_a_sample_takes_its_priorities_back(form: str, directory: Directory) -> None:
    directory.create(alpha=0.6)
    arrays, tensors = directory.arrays(), directory.tensors()
    arrays.extend({"a": np.arange(8)})
    sample = arrays.sample(16)
    new = sample["index"] + 1.0
    index, generation = sample["index"], sample["index_generation"]
    if form == "sample":
        found = arrays.update_priority({**sample, "td_error": new})
    elif form == "entries":
        found = arrays.update_priority(index, new, generation)
    elif form == "float32":
        found = arrays.update_priority(sample, new.astype(np.float32))
    elif form == "tensor":
        found = arrays.update_priority(sample, torch.from_numpy(new))
    elif form == "tensors":
        found = arrays.update_priority(torch.from_numpy(index), torch.from_numpy(new))
    elif form == "lists":
        found = arrays.update_priority(index.tolist(), new.tolist(), generation.tolist())
    else:
        found, new = arrays.update_priority(sample, 3), np.full(16, 3.0)
    assert found == PriorityUpdate(16, 0)
    expected = dict(zip(index.tolist(), new.tolist(), strict=True))
    assert {at: raw_of(tensors)[at] for at in expected} == expected


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_priorities_lie_as_the_data_that_are_appended_along_another_dimension(
    kind: str, directory: Directory
) -> None:
    storage = LazyMemmapStorage(8, scratch_dir=directory.path)
    sampler = PrioritizedSampler(8, alpha=1.0, beta=1.0)
    with TensorDictReplayBuffer(storage=storage, sampler=sampler, dim_extend=1) as tensors:
        index = tensors.extend(TensorDict({"a": torch.arange(6).reshape(1, 6)}, [1, 6]))
        buffer = tensors if kind == "tensors" else directory.arrays()
        buffer.update_priority(index.numpy(), np.arange(1.0, 7.0).reshape(2, 3))
        assert raw_of(tensors) == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]


def test_what_is_no_priority_is_refused_and_nothing_is_changed(directory: Directory) -> None:
    directory.create(alpha=0.6)
    arrays = directory.arrays()
    arrays.extend({"a": np.arange(3)})
    sample = arrays.sample(3)
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(ValueError, match=r"priorit.*nothing was changed"):
            arrays.extend({"a": np.arange(2), "td_error": np.array([1.0, bad])})
        with pytest.raises(ValueError, match=r"priorit.*nothing was changed"):
            arrays.extend({"a": [0, 1], "td_error": [1.0, bad]})
        with pytest.raises(ValueError, match="not a number from 0"):
            arrays.update_priority(sample, np.array([1.0, 1.0, bad]))
    with pytest.raises(IndexError, match="index 64 at position 1 is out of range for a buffer of"):
        arrays.update_priority(np.array([0, 64]), np.ones(2))
    with pytest.raises(RuntimeError, match="2 priorities for 3 items"):
        arrays.update_priority(np.arange(3), np.ones(2))
    with pytest.raises(
        ValueError,
        match="3 indices and 3 priorities, 2 generations were given; pass the same number",
    ):
        arrays.update_priority(np.arange(3), np.ones(3), np.zeros(2, np.int64))
    with pytest.raises(KeyError, match="needs the entry 'index' of a sample"):
        arrays.update_priority({"a": 1}, np.ones(1))
    with pytest.raises(KeyError, match="this sample has no entry 'td_error'"):
        arrays.update_priority(sample)
    with pytest.raises(TypeError, match="priorities are missing"):
        arrays.update_priority(np.arange(3))
    assert raw_of(arrays) == [1.0] * 3
    assert len(arrays) == 3


def test_without_priorities_an_update_does_nothing(directory: Directory) -> None:
    directory.create(alpha=None)
    arrays = directory.arrays()
    arrays.extend({"a": np.arange(3), "td_error": np.ones(3)})
    sample = arrays.sample(2)
    assert "_weight" not in sample
    assert not arrays.prioritized
    assert arrays.update_priority(sample, np.ones(2)) == (0, 0)


def test_the_largest_priority_within_the_buffer_is_that_of_new_items(directory: Directory) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=directory.path, shared_init=True)
    sampler = PrioritizedSampler(4, 0.6, 0.4, max_priority_within_buffer=True)
    with TensorDictReplayBuffer(storage=storage, sampler=sampler) as tensors:
        arrays = directory.arrays()
        arrays.extend({"a": np.zeros(4)})
        arrays.update_priority(np.arange(4), np.array([5.0, 0.25, 0.5, 2.0]))
        arrays.add({"a": 1.0})
        assert raw_of(tensors) == [2.0, 0.25, 0.5, 2.0]
        tensors.update_priority(torch.tensor([3]), torch.tensor([9.0]))
        arrays.add({"a": 1.0})
        assert raw_of(tensors) == [2.0, 9.0, 0.5, 9.0]


def test_weights_follow_beta(directory: Directory) -> None:
    directory.create(alpha=1.0, eps=0.0)
    arrays = directory.arrays(beta=0.0)
    arrays.extend({"a": np.arange(2), "td_error": np.array([1.0, 4.0])})
    assert set(arrays.sample(32)["_weight"].tolist()) == {1.0}
    arrays.beta = 1.0
    sample = arrays.sample(64)
    assert sample["_weight"].tolist() == [1.0 if one == 0 else 0.25 for one in sample["a"]]
    with pytest.raises(ValueError, match="beta must be a finite number"):
        arrays.beta = -1.0


def test_a_queue_hands_out_items_in_their_order(directory: Directory) -> None:
    directory.create(alpha=None, rate_limiter=RateLimiter(max_times_sampled=1))
    arrays, tensors = directory.arrays(), directory.tensors()
    tensors.extend(TensorDict({"a": torch.arange(6)}, [6]))
    assert arrays.sample(4)["a"].tolist() == [0, 1, 2, 3]
    assert tensors.sample(1)["a"].tolist() == [4]
    assert arrays.sample(1)["a"].tolist() == [5]
    with pytest.raises(RateLimitTimeout, match="sample"):
        arrays.sample(1, timeout=0.0)


def test_both_clients_are_kept_in_one_ratio(directory: Directory) -> None:
    limiter = RateLimiter(samples_per_insert=1.0, min_size=2, error_buffer=2.0)
    directory.create(alpha=None, rate_limiter=limiter)
    arrays, tensors = directory.arrays(), directory.tensors()
    assert arrays.rate_limiter is not None
    with pytest.raises(RateLimitTimeout):
        arrays.sample(1, timeout=0.0)
    tensors.extend(TensorDict({"a": torch.arange(4)}, [4]))
    for _ in range(4):
        arrays.sample(1, timeout=0.0)
    with pytest.raises(RateLimitTimeout, match="sample"):
        arrays.sample(1, timeout=0.0)
    arrays.extend({"a": np.zeros(4, np.int64)}, timeout=0.0)
    with pytest.raises(RateLimitTimeout, match="extend waits: 1 samples per insert are required"):
        arrays.add({"a": 1}, timeout=0.0)


def test_a_sample_waits_for_the_first_write(directory: Directory) -> None:
    directory.create()
    arrays, tensors = directory.arrays(), directory.tensors()
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(arrays.sample(3, min_size=2)["a"]))
    waiting.start()
    tensors.extend(TensorDict({"a": torch.full((2,), 7)}, [2]))
    waiting.join(30)
    assert found == [7, 7, 7]


def test_what_cannot_be_drawn_is_an_error(directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    with pytest.raises(RuntimeError, match=r"no batch size was"):
        arrays.sample()
    with pytest.raises(EmptyBufferError, match="write to it first"):
        arrays.sample(1)
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        arrays.sample(-1)
    with pytest.raises(ValueError, match="min_size must be at least 0, got -1"):
        arrays.sample(1, min_size=-1)
    with pytest.raises(RateLimitTimeout, match="sample"):
        arrays.sample(1, min_size=1, timeout=0.0)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        directory.arrays(batch_size=0)
    arrays.extend({"a": np.zeros(2)})
    with pytest.warns(UserWarning, match="batch_size=0.*returns an empty batch"):
        assert arrays.sample(0)["a"].shape == (0,)
    with pytest.warns(UserWarning, match="beta=7 .*from 0 to 1"):
        arrays.beta = 7
    with pytest.warns(UserWarning, match=r"batch_size=3\) differs from the buffer's batch_size=2"):
        directory.arrays(batch_size=2).sample(3)
