"""`ImmutableDatasetWriter`: a data set is read, sampled and iterated, but never changed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)


def dataset(size: int = 10) -> TensorDict:
    return TensorDict({"obs": torch.arange(size), "td_error": torch.ones(size)}, [size])


def buffer(**options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=TensorStorage(dataset()), writer=ImmutableDatasetWriter(), **options
    )


@pytest.mark.parametrize("how", ["add", "extend"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_writing_is_refused_and_changes_nothing(how: str, prioritized: bool) -> None:
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0) if prioritized else None
    rb = buffer(sampler=sampler)
    data = dataset()
    with pytest.raises(RuntimeError, match=r"read-only data set: .* set_writer\("):
        getattr(rb, how)(data if how == "extend" else data[0])
    assert rb[:]["obs"].tolist() == list(range(10))
    assert rb.write_count == 0


def test_emptying_is_refused_and_changes_nothing() -> None:
    rb = buffer()
    with pytest.raises(RuntimeError, match="cannot be emptied"):
        rb.empty()
    assert len(rb) == 10
    assert rb[:]["obs"].tolist() == list(range(10))


def test_it_samples() -> None:
    rb = buffer(batch_size=64)
    sample = rb.sample()
    assert torch.equal(sample["obs"], sample["index"])
    assert set(sample["obs"].tolist()) == set(range(10))


def test_it_iterates_over_every_item_once() -> None:
    rb = buffer(batch_size=3, sampler=SamplerWithoutReplacement())
    for _ in range(2):
        batches = [batch["obs"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        assert sorted(x for batch in batches for x in batch) == list(range(10))


def test_priorities_can_be_updated() -> None:
    rb = buffer(batch_size=40, sampler=PrioritizedSampler(10, alpha=1.0, beta=1.0, eps=0.0))
    rb.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [1.0]))
    assert set(rb.sample()["obs"].tolist()) == {9}


def test_with_another_writer_the_buffer_is_written() -> None:
    rb = buffer()
    before = rb.set_writer(RoundRobinWriter())
    assert isinstance(before, ImmutableDatasetWriter)
    rb.add(dataset()[7])
    assert rb[:]["obs"].tolist()[0] == 7


def test_a_buffer_that_was_filled_can_be_closed_for_writing() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(torch.arange(3))
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="cannot be added"):
        rb.extend(torch.arange(3))
    assert rb[:].tolist() == [0, 1, 2]


def test_it_has_no_state_and_pickles_without_the_storage() -> None:
    rb = buffer()
    assert rb.writer.state_dict() == {}
    rb.writer.load_state_dict({})
    again = pickle.loads(pickle.dumps(rb.writer))
    assert isinstance(again, ImmutableDatasetWriter)
    assert again._storage is None
