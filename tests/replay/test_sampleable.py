"""Buffers of an ensemble are weighted by what each of them can sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyTensorStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)


def member(lengths: list[int], sampler: Any) -> TensorDictReplayBuffer:
    """Makes a buffer with trajectories of these lengths."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler)
    for number, length in enumerate(lengths):
        done = torch.arange(length)[:, None] == length - 1
        episode = torch.full((length,), number)
        rb.extend(TensorDict({"episode": episode, "next": {"done": done}}, [length]))
    return rb


@pytest.mark.parametrize(
    ("sampler", "options", "count"),
    [
        (RandomSampler, {}, 20),
        (SliceSampler, {"slice_len": 4}, (10 - 3) + (5 - 3)),
        (SliceSampler, {"slice_len": 4, "strict_length": False}, (10 - 3) + 1 + 1 + (5 - 3)),
        (SliceSampler, {"num_slices": 2}, (10 - 3) + (5 - 3)),
        (SliceSamplerWithoutReplacement, {"slice_len": 4}, (10 - 3) + (5 - 3)),
        (StreamingSliceSampler, {"slice_len": 4}, (10 - 3) + (5 - 3)),
    ],
)
def test_a_slice_sampler_counts_the_places_where_a_slice_can_begin(
    sampler: Any, options: dict[str, Any], count: int
) -> None:
    rb = member([10, 3, 2, 5], sampler(**options))
    assert rb.sampler._sampleable_count(rb.storage, 8) == count


def test_what_cannot_be_sampled_counts_nothing() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=4))
    assert rb.sampler._sampleable_count(rb.storage, 4) == 0
    rb.extend(TensorDict({"a": torch.zeros(9)}, [9]))
    assert rb.sampler._sampleable_count(rb.storage, 4) == 0


def test_a_buffer_whose_trajectories_are_too_short_is_never_chosen() -> None:
    few = member([3] * 30, SliceSampler(slice_len=4))
    one = member([4], SliceSampler(slice_len=4))
    rb = ReplayBufferEnsemble(
        few, one, p="sampleable", num_buffer_sampled=2, sample_from_all=False, batch_size=8
    )
    assert rb.can_sample()
    for _ in range(40):
        assert (rb.sample()["index", "buffer_ids"] == 1).all()
    one.empty()
    assert not rb.can_sample()
    with pytest.raises(
        EmptyBufferError, match="are empty, or have no slice of the required length"
    ):
        rb.sample()


def test_buffers_are_chosen_in_proportion_to_the_places() -> None:
    many = member([23], SliceSampler(slice_len=4))  # 20 start positions
    some = member([8] * 1 + [3] * 20, SliceSampler(slice_len=4))  # 5 start positions among 68 items
    rb = ReplayBufferEnsemble(many, some, p="sampleable", num_buffer_sampled=1000, batch_size=4000)
    torch.manual_seed(0)
    share = (rb.sample()["index", "buffer_ids"] == 1).double().mean()
    assert abs(share - 0.2) < 0.05
