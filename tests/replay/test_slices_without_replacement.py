"""Slices of trajectories without replacement: one slice of each trajectory in a pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyTensorStorage,
    ListStorage,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.replay.slice_model import History, cut_up, slices
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)


def episodes(*lengths: int, first: int = 0) -> TensorDict:
    """Makes whole episodes; ``episode`` counts from ``first``."""
    ids = torch.cat([torch.full((size,), first + at) for at, size in enumerate(lengths)])
    ends = torch.cat([torch.arange(size) == size - 1 for size in lengths])
    return TensorDict({"episode": ids, ("next", "done"): ends.unsqueeze(-1)}, [len(ids)])


def buffer(
    storage: Any,
    batch_size: int,
    generator: Any = None,
    prefetch: int | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=SliceSamplerWithoutReplacement(**options),
        batch_size=batch_size,
        generator=generator,
        prefetch=prefetch,
    )


def passes(rb: Any) -> list[list[int]]:
    """Returns the episodes of the slices in each batch of a pass, in order."""
    return [
        [slice_[0] for slice_ in cut_up(batch["episode"], batch["next", "truncated"])]
        for batch in rb
    ]


# -- a pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_pass_has_one_slice_of_every_trajectory_that_is_long_enough(
    make: Any, prefetch: int | None
) -> None:
    rb = buffer(make(40), 6, prefetch=prefetch, num_slices=2)
    rb.extend(episodes(3, 2, 5, 3, 4, 3, 1))
    for _ in range(3):
        found = passes(rb)
        assert [len(batch) for batch in found] == [2, 2, 1]
        assert sorted(itertools.chain(*found)) == [0, 2, 3, 4, 5]
    assert rb.sampler.ran_out


@pytest.mark.parametrize("prefetch", [None, 3])
def test_the_last_batch_is_left_out_where_it_would_be_short(prefetch: int | None) -> None:
    rb = buffer(LazyTensorStorage(40), 6, prefetch=prefetch, slice_len=3, drop_last=True)
    rb.extend(episodes(3, 2, 5, 3, 4, 3, 1))
    left_out = set()
    for _ in range(20):
        found = passes(rb)
        assert [len(batch) for batch in found] == [2, 2]
        left_out |= {0, 2, 3, 4, 5} - set(itertools.chain(*found))
    assert left_out == {0, 2, 3, 4, 5}


@pytest.mark.product("strict lanes", few=1)
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("strict", [True, False])
def test_every_slice_is_one_of_the_definition_and_each_is_drawn_in_some_pass(
    seed: int, lanes: int, strict: bool
) -> None:
    history = History(seed, lanes=lanes, ends=0.2)
    rb = buffer(
        LazyTensorStorage(14 * lanes, ndim=min(lanes, 2)),
        9,
        num_slices=3,
        strict_length=strict,
    )
    for _ in range(5 + 2 * seed):
        rb.extend(history.steps(history.chunk(4)))
    trajectories = history.trajectories(14)
    legal = slices(trajectories, 3, strict=strict)
    owner = {item.number: at for at, one in enumerate(trajectories) for item in one}
    found = set()
    for _ in range(150):
        one = [
            slice_ for batch in rb for slice_ in cut_up(batch["number"], batch["next", "truncated"])
        ]
        assert len({owner[slice_[0]] for slice_ in one}) == len(one)
        assert {owner[slice_[0]] for slice_ in one} == {owner[slice_[0]] for slice_ in legal}
        found |= set(one)
    assert found == legal


def test_without_shuffling_trajectories_come_by_age() -> None:
    rb = buffer(LazyTensorStorage(12), 4, slice_len=2, shuffle=False)
    rb.extend(episodes(3, 3, 3))
    rb.extend(episodes(3, 3, first=3))  # overwrites the first episode
    assert passes(rb) == [[1, 2], [3, 4]]
    assert passes(rb) == [[1, 2], [3, 4]]


def test_every_pass_has_an_order_of_its_own_and_a_seed_decides_it() -> None:
    def orders(seed: int) -> list[list[list[int]]]:
        rb = buffer(LazyTensorStorage(20), 4, torch.Generator().manual_seed(seed), slice_len=2)
        rb.extend(episodes(4, 4, 4, 4, 4))
        return [passes(rb) for _ in range(4)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len({str(order) for order in orders(1)}) > 1


def test_an_interrupted_pass_goes_on_and_a_finished_one_starts_again() -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2, shuffle=False)
    rb.extend(episodes(4, 4, 4))
    for batch in rb:
        assert batch["episode"].tolist() == [0, 0]
        break
    assert rb.sample()["episode"].tolist() == [1, 1]
    assert not rb.sampler.ran_out
    assert rb.sample()["episode"].tolist() == [2, 2]
    assert rb.sampler.ran_out
    assert rb.sample()["episode"].tolist() == [0, 0]
    assert not rb.sampler.ran_out
    rb.sampler.ran_out = True
    assert passes(rb) == [[1], [2]]


def test_a_pass_goes_on_with_another_batch_size() -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2, shuffle=False)
    rb.extend(episodes(4, 4, 4, 4))
    rb.sample()
    with pytest.warns(UserWarning, match="differs"):
        assert rb.sample(4)["episode"].tolist() == [1, 1, 2, 2]
    assert rb.sample()["episode"].tolist() == [3, 3]
    assert rb.sampler.ran_out


def test_short_trajectories_are_drawn_whole_where_lengths_are_not_strict() -> None:
    rb = buffer(LazyTensorStorage(20), 8, num_slices=2, strict_length=False, shuffle=False)
    rb.extend(episodes(2, 6, 1))
    found = [batch["episode"].tolist() for batch in rb]
    assert found == [[0, 0, 1, 1, 1, 1], [2]]


def test_one_trajectory_has_to_be_long_enough() -> None:
    rb = buffer(LazyTensorStorage(20), 8, num_slices=2)
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(episodes(2, 3))
    with pytest.raises(RuntimeError, match="long enough for a slice of 4 steps"):
        rb.sample()


def test_without_short_batches_there_have_to_be_enough_trajectories() -> None:
    rb = buffer(LazyTensorStorage(20), 6, slice_len=2, drop_last=True)
    rb.extend(episodes(2, 3))
    with pytest.raises(
        ValueError, match=r"needs 3 slices, but only 2 trajectories .* drop_last=True"
    ):
        rb.sample()
    rb.extend(episodes(3, first=2))
    assert sorted(passes(rb)[0]) == [0, 1, 2]


# -- what is written in the middle -----------------------------------------------------------------


def test_a_write_through_the_buffer_begins_a_new_pass(make: Any) -> None:
    rb = buffer(make(20), 2, slice_len=2, shuffle=False)
    rb.extend(episodes(4, 4, 4))
    assert rb.sample()["episode"].tolist() == [0, 0]
    assert rb.sample()["episode"].tolist() == [1, 1]
    rb.extend(episodes(4, first=3))
    assert passes(rb) == [[0], [1], [2], [3]]
    rb.sample()
    rb.add(episodes(1, first=4)[0])
    assert rb.sample()["episode"].tolist() == [0, 0]


def test_items_of_others_join_at_the_next_pass(directory: Any) -> None:
    rb = buffer(directory(30), 2, slice_len=2, shuffle=False, traj_key="episode")
    others = TensorDictReplayBuffer(storage=directory(30))
    others.extend(episodes(4, 4, 4))
    found = []
    for batch in rb:
        found.append(int(batch["episode"][0]))
        others.extend(episodes(2, first=10 + len(found)))
    assert found == [0, 1, 2]
    assert [batch[0] for batch in passes(rb)] == [0, 1, 2, 11, 12, 13]


def test_a_trajectory_whose_beginning_is_written_over_is_left_out(directory: Any) -> None:
    rb = buffer(directory(12), 2, slice_len=2, shuffle=False, traj_key="episode")
    others = TensorDictReplayBuffer(storage=directory(12))
    others.extend(episodes(3, 3, 3, 3))
    assert rb.sample()["episode"].tolist() == [0, 0]
    others.extend(episodes(3, 3, first=4))  # 5 begins in the slot of 1
    assert rb.sample()["episode"].tolist() == [2, 2]
    others.extend(episodes(1, first=6))  # overwrites the first step of 2
    assert rb.sample()["episode"].tolist() == [3, 3]
    assert rb.sampler.ran_out
    assert passes(rb) == [[2], [3], [4], [5]]


def test_a_draw_that_was_overtaken_leaves_the_pass_as_it_was(directory: Any) -> None:
    others = TensorDictReplayBuffer(storage=directory(15))

    class Slow(SliceSamplerWithoutReplacement):
        """A sampler whose first chosen trajectory is overwritten before it is read."""

        calls = 0

        def _choose(self, *args: Any) -> Any:
            cuts = super()._choose(*args)
            self.calls += 1
            if self.calls == 1:
                others.extend(episodes(3, first=5))
            return cuts

    rb = TensorDictReplayBuffer(
        storage=directory(15),
        sampler=Slow(slice_len=2, shuffle=False, traj_key="episode"),
        batch_size=4,
    )
    others.extend(episodes(3, 3, 3, 3, 3))
    assert passes(rb) == [[1, 2], [3, 4], [5]]


def test_an_emptied_buffer_begins_a_new_pass(make: Any) -> None:
    rb = buffer(make(20), 2, slice_len=2, shuffle=False)
    rb.extend(episodes(4, 4, 4))
    rb.sample()
    rb.empty()
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(episodes(2, 2, first=7))
    assert passes(rb) == [[7], [8]]


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [1, 2, 3])
def test_a_state_goes_on_with_what_was_left(drawn: int) -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2)
    rb.extend(episodes(4, 4, 4, 4))
    before = [int(rb.sample()["episode"][0]) for _ in range(drawn)]
    other = buffer(LazyTensorStorage(20), 2, slice_len=2)
    other.storage.load_state_dict(rb.storage.state_dict())
    other.sampler.load_state_dict(rb.sampler.state_dict())
    rest = [batch[0] for batch in passes(rb)]
    assert sorted(before + rest) == [0, 1, 2, 3]
    assert [batch[0] for batch in passes(other)] == rest
    assert len(passes(other)) == 4


def test_a_checkpoint_goes_on_with_what_was_left(tmp_path: Any) -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2)
    rb.extend(episodes(4, 4, 4, 4, 4))
    rb.extend(episodes(2, first=5))  # overwrites the beginning of the first episode
    before = [int(rb.sample()["episode"][0]) for _ in range(2)]
    rb.dumps(tmp_path / "checkpoint")
    rest = [batch[0] for batch in passes(rb)]
    assert sorted(before + rest) == [0, 1, 2, 3, 4, 5]
    other = buffer(LazyTensorStorage(20), 2, slice_len=2)
    other.loads(tmp_path / "checkpoint")
    assert [batch[0] for batch in passes(other)] == rest
    assert len(passes(other)) == 6


def test_a_state_keeps_the_end_of_a_pass() -> None:
    rb = buffer(LazyTensorStorage(20), 4, slice_len=2, drop_last=True)
    rb.extend(episodes(4, 4))
    rb.sample()
    other = SliceSamplerWithoutReplacement(slice_len=2)
    other.load_state_dict(rb.sampler.state_dict())
    assert other.ran_out
    assert other.drop_last


def test_the_state_of_another_storage_begins_a_new_pass() -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2, shuffle=False)
    rb.extend(episodes(4, 4, 4))
    rb.sample()
    other = buffer(ListStorage(20), 2, slice_len=2, shuffle=False)
    other.extend(episodes(4, 4))
    other.sampler.load_state_dict(rb.sampler.state_dict())
    assert len(passes(other)) == 2
    theirs = {"len_storage": 8, "_sample_list": torch.tensor([1]), "drop_last": False}
    other.sampler.load_state_dict({**theirs, "_ran_out": False})  # as TorchRL writes it
    assert len(passes(other)) == 2


# -- arguments -------------------------------------------------------------------------------------


def test_the_prioritized_slice_sampler_is_both_of_its_parents() -> None:
    sampler = SliceSamplerWithoutReplacement(num_slices=2)
    assert isinstance(sampler, SliceSampler)
    assert isinstance(sampler, SamplerWithoutReplacement)
    assert (sampler.drop_last, sampler.shuffle, sampler.ran_out) == (False, True, False)


@pytest.mark.parametrize("name", ["cache_values", "pad_output", "span", "fragmented", "step_key"])
def test_arguments_that_torchrl_refuses_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SliceSamplerWithoutReplacement(num_slices=2, **{name: True})


def test_ends_can_be_given() -> None:
    ends = torch.tensor([0, 1, 0, 0, 1, 1]).bool()
    rb = buffer(LazyTensorStorage(6), 4, slice_len=2, ends=ends, shuffle=False)
    rb.extend(episodes(6))
    found = [batch["index"].tolist() for batch in rb]
    assert len(found) == 1
    assert found[0] in ([0, 1, 2, 3], [0, 1, 3, 4])


def test_its_name_says_how_far_a_pass_is() -> None:
    rb = buffer(LazyTensorStorage(20), 2, slice_len=2)
    rb.extend(episodes(4, 4, 4))
    rb.sample()
    assert repr(rb.sampler).endswith("1 of 3 drawn)")
    rb.sample()
    rb.sample()
    assert repr(rb.sampler).endswith("3 of 3 drawn)")
