"""Slices are contiguous, complete, from one trajectory, and marked at their end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.replay.conformance import RINGS, STEPS, Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)

SAMPLERS = {
    "slices": SliceSampler,
    "slices without replacement": SliceSamplerWithoutReplacement,
    "prioritized slices": PrioritizedSliceSampler,
}


every_case = pytest.mark.parametrize(
    "maker", cases(samplers=tuple(SAMPLERS), writers=("round robin",)), indirect=True, ids=str
)
every_sampler = pytest.mark.parametrize(
    "maker",
    cases(("memory", "directory"), tuple(SAMPLERS), ("round robin",)),
    indirect=True,
    ids=str,
)
with_replacement = pytest.mark.parametrize(
    "maker",
    cases(("memory", "directory"), ("slices", "prioritized slices"), ("round robin",)),
    indirect=True,
    ids=str,
)
prioritized = pytest.mark.parametrize(
    "maker", cases(RINGS, ("prioritized slices",), ("round robin",)), indirect=True, ids=str
)


def sampler(maker: Maker, max_size: int, **options: Any) -> Any:
    if "slice_len" not in options and "num_slices" not in options:
        options["slice_len"] = 2
    if not {"traj_key", "end_key", "end_keys", "ends", "trajectories"} & options.keys():
        options["traj_key"] = "episode"
    cls = SAMPLERS[maker.case.sampler]
    if cls is PrioritizedSliceSampler:
        return cls(max_size, 0.7, 0.9, **options)
    return cls(**options)


def buffer(maker: Maker, max_size: int, batch_size: int, **options: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=maker.storage(max_size),
        sampler=sampler(maker, max_size, **options),
        batch_size=batch_size,
    )


def slices(sample: Any, length: int | None = None) -> list[list[int]]:
    """Returns the ids of each slice, split behind each truncated step or after ``length`` steps."""
    ids = numbers(sample)
    if length is not None:
        return [ids[at : at + length] for at in range(0, len(ids), length)]
    cut: list[list[int]] = [[]]
    for number, last in zip(ids, sample["next", "truncated"].flatten().tolist(), strict=True):
        cut[-1].append(number)
        if last:
            cut.append([])
    assert not cut.pop(), "the last step of a sample is the end of a slice"
    return cut


def is_slice(ids: list[int]) -> bool:
    """True if these are consecutive steps of one trajectory."""
    return ids == list(range(ids[0], ids[0] + len(ids))) and len({at // STEPS for at in ids}) == 1


# -- what a slice is ------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize(
    "by",
    [{"traj_key": "episode"}, {"end_key": ("next", "done")}, {}],
    ids=["trajectory", "end", "default"],
)
def test_a_slice_is_consecutive_steps_of_one_trajectory(maker: Maker, by: dict[str, Any]) -> None:
    options = {"slice_len": 3, **by}
    cls = SAMPLERS[maker.case.sampler]
    made = (
        PrioritizedSliceSampler(16, 0.7, 0.9, **options)
        if cls is PrioritizedSliceSampler
        else cls(**options)
    )
    rb = TensorDictReplayBuffer(storage=maker.storage(16), sampler=made, batch_size=12)
    rb.extend(steps(0, 16))
    seen = set()
    for _ in range(20):
        sample = rb.sample()
        assert_are_steps(sample, slices=True)
        for one in slices(sample, 3):
            assert is_slice(one)
            seen.update(one)
    assert seen == set(range(16))


@every_case
def test_the_last_step_of_a_slice_is_done_and_truncated_and_no_other(maker: Maker) -> None:
    rb = buffer(maker, 16, 8)
    rb.extend(steps(0, 16))
    for _ in range(10):
        sample = rb.sample()
        ends = torch.tensor([[False], [True]] * 4)
        assert torch.equal(sample["next", "truncated"], ends)
        assert torch.equal(sample["next", "done"], ends)
        assert sample["next", "truncated"].dtype is torch.bool


@every_sampler
def test_the_names_of_these_flags_can_be_chosen_or_left_out(maker: Maker) -> None:
    rb = buffer(maker, 16, 8, truncated_key=("next", "cut"))
    rb.extend(steps(0, 16))
    sample = rb.sample()
    assert sample["next", "cut"].flatten().tolist() == [False, True] * 4
    assert not sample["next", "truncated"].any()
    rb.set_sampler(sampler(maker, 16, truncated_key=None))
    sample = rb.sample()
    assert ("next", "cut") not in sample.keys(include_nested=True)
    assert torch.equal(sample["next", "done"], steps(0, 16)["next", "done"][sample["id"]])


@with_replacement
def test_num_slices_divides_the_batch(maker: Maker) -> None:
    rb = buffer(maker, 16, 12, num_slices=4)
    rb.extend(steps(0, 16))
    for _ in range(10):
        cut = slices(rb.sample())
        assert [len(one) for one in cut] == [3, 3, 3, 3]
        assert all(is_slice(one) for one in cut)


@every_sampler
def test_a_batch_that_does_not_divide_is_refused(maker: Maker) -> None:
    rb = buffer(maker, 16, 12)
    rb.extend(steps(0, 16))
    for options in ({"num_slices": 5}, {"slice_len": 5}):
        rb.set_sampler(sampler(maker, 16, **options))
        with pytest.raises(RuntimeError, match="12"):
            rb.sample()


@pytest.mark.parametrize("cls", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_are_counted_or_measured_not_both_and_not_neither(cls: Any) -> None:
    for options in ({}, {"num_slices": 2, "slice_len": 3}):
        with pytest.raises(TypeError, match="slice_len"):
            cls(**options)


# -- strict or not --------------------------------------------------------------------------------


def trajectories(*lengths: int) -> TensorDict:
    """Makes consecutive trajectories of these lengths."""
    count = sum(lengths)
    number = torch.arange(count)
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    return TensorDict(
        {
            "id": number,
            "episode": episode,
            "next": TensorDict({"done": done, "truncated": torch.zeros_like(done)}, [count]),
        },
        [count],
    )


@every_sampler
def test_strictly_no_trajectory_is_chosen_that_is_too_short(maker: Maker) -> None:
    rb = buffer(maker, 20, 8, slice_len=4)
    rb.extend(trajectories(2, 5, 3, 4, 1))
    for _ in range(20):
        sample = rb.sample()
        assert set(sample["episode"].tolist()) <= {1, 3}
        assert len(sample) in (4, 8)  # without replacement, a pass has two slices


@every_sampler
def test_strictly_there_has_to_be_one_that_is_long_enough(maker: Maker) -> None:
    rb = buffer(maker, 20, 8, slice_len=4)
    rb.extend(trajectories(2, 3, 3))
    with pytest.raises(RuntimeError, match="4"):
        rb.sample()


@with_replacement
def test_not_strictly_short_trajectories_make_short_slices(maker: Maker) -> None:
    rb = buffer(maker, 20, 40, slice_len=4, strict_length=False)
    rb.extend(trajectories(2, 5, 3, 4, 1))
    lengths: dict[int, set[int]] = {}
    for _ in range(20):
        sample = rb.sample()
        assert len(sample) <= 40
        episode = iter(sample["episode"].tolist())
        for one in slices(sample):
            of = {next(episode) for _ in one}
            assert len(of) == 1
            assert one == list(range(one[0], one[0] + len(one)))
            lengths.setdefault(of.pop(), set()).add(len(one))
    assert lengths == {0: {2}, 1: {4}, 2: {3}, 3: {4}, 4: {1}}


@pytest.mark.parametrize(
    ("span", "starts", "stops"),
    [
        (False, {0, 1}, {2, 3}),
        ((True, False), {0, 1}, {0, 1, 2, 3}),
        ((False, True), {0, 1, 2, 3}, {2, 3}),
    ],
    ids=["no", "left", "right"],
)
@with_replacement
def test_span_cuts_slices_only_at_the_side_that_was_asked_for(
    maker: Maker, span: Any, starts: set[int], stops: set[int]
) -> None:
    if maker.case.sampler == "prioritized slices" and span == (True, False):
        pytest.skip("a prioritized slice begins with the item that was drawn")
    rb = buffer(maker, 16, 30, slice_len=3, span=span)
    rb.extend(steps(0, 16))
    seen: set[tuple[int, int]] = set()
    for _ in range(60):
        for one in slices(rb.sample()):
            assert is_slice(one)
            assert len(one) <= 3
            seen.add((one[0] % STEPS, one[-1] % STEPS))
    assert {start for start, _ in seen} <= starts
    assert {stop for _, stop in seen} <= stops
    assert {(0, 2), (1, 3)} <= seen
    cut = seen - {(0, 2), (1, 3)}
    assert bool(cut) == (span is not False)


# -- the ring -------------------------------------------------------------------------------------


@pytest.mark.product(few=3)
@every_case
def test_slices_never_cross_the_write_position(maker: Maker) -> None:
    rb = buffer(maker, 10, 4)
    rb.extend(steps(0, 10))
    for start in range(10, 24):
        rb.extend(steps(start, start + 1))
        there = set(range(start - 9, start + 1))
        for _ in range(6):
            for one in slices(rb.sample(), 2):
                assert is_slice(one)
                assert set(one) <= there


@with_replacement
def test_around_the_end_of_the_ring_a_trajectory_goes_on(maker: Maker) -> None:
    rb = buffer(maker, 10, 40)
    rb.extend(steps(0, 10))
    rb.extend(steps(10, 13))
    assert numbers(rb[:]) == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]
    seen = {tuple(one) for _ in range(20) for one in slices(rb.sample(), 2)}
    assert seen == {(4, 5), (5, 6), (6, 7), (8, 9), (9, 10), (10, 11)}


@with_replacement
def test_an_open_trajectory_is_sliced_as_far_as_it_goes(maker: Maker) -> None:
    rb = buffer(maker, 10, 40, end_key=("next", "done"))
    rb.extend(steps(0, 6))
    seen = {tuple(one) for _ in range(20) for one in slices(rb.sample(), 2)}
    assert seen == {(0, 1), (1, 2), (2, 3), (4, 5)}
    rb.extend(steps(6, 8))
    seen = {tuple(one) for _ in range(20) for one in slices(rb.sample(), 2)}
    assert seen == {(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)}


@every_sampler
def test_lanes_are_trajectories_of_their_own(maker: Maker) -> None:
    storage = maker.storage(24, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler(maker, 24), batch_size=8)
    lanes = torch.stack([steps(0, 15), steps(100, 115)])
    rb.extend(lanes[:, :12])
    rb.extend(lanes[:, 12:])
    there = {*range(3, 15), *range(103, 115)}
    for _ in range(30):
        sample = rb.sample()
        assert list(sample["index"].shape) == [len(sample), 2]
        for one in slices(sample, 2):
            assert is_slice(one)
            assert set(one) <= there


# -- without replacement --------------------------------------------------------------------------


def without_replacement(storage: Any, batch_size: int, **options: Any) -> Any:
    return ReplayBuffer(
        storage=storage,
        sampler=SliceSamplerWithoutReplacement(traj_key="episode", **options),
        batch_size=batch_size,
    )


every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("random",), writers=("round robin",)), indirect=True, ids=str
)


@every_storage
def test_a_pass_takes_every_trajectory_once(maker: Maker) -> None:
    rb = without_replacement(maker.storage(20), 8, num_slices=2)
    rb.extend(steps(0, 20))
    orders = []
    for _ in range(4):
        batches = [slices(batch, STEPS) for batch in rb]
        assert [len(batch) for batch in batches] == [2, 2, 1]
        drawn = [one for batch in batches for one in batch]
        assert all(is_slice(one) for one in drawn)
        orders.append([one[0] // STEPS for one in drawn])
        assert sorted(orders[-1]) == [0, 1, 2, 3, 4]
    assert len({tuple(order) for order in orders}) > 1


@every_storage
def test_drop_last_leaves_the_short_batch_out(maker: Maker) -> None:
    rb = without_replacement(maker.storage(20), 8, num_slices=2, drop_last=True)
    rb.extend(steps(0, 20))
    for _ in range(3):
        assert [len(batch) for batch in rb] == [8, 8]


@every_storage
def test_without_shuffling_trajectories_come_in_order(maker: Maker) -> None:
    rb = without_replacement(maker.storage(20), 8, num_slices=2, shuffle=False)
    rb.extend(steps(0, 20))
    drawn = [one[0] // STEPS for batch in rb for one in slices(batch, STEPS)]
    assert drawn == [0, 1, 2, 3, 4]


# -- by priority ----------------------------------------------------------------------------------


@prioritized
def test_a_trajectory_without_any_priority_is_never_drawn(maker: Maker) -> None:
    rb = buffer(maker, 16, 40)
    rb.extend(steps(0, 16))
    rb.update_priority(
        torch.arange(16), torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [2.0] * 4)
    )
    for _ in range(10):
        cut = slices(rb.sample(), 2)
        assert all(is_slice(one) for one in cut)
        assert {one[0] // STEPS for one in cut} <= {1, 3}


@prioritized
def test_a_slice_begins_where_the_priority_is(maker: Maker) -> None:
    rb = buffer(maker, 16, 40)
    rb.extend(steps(0, 16))
    priorities = torch.zeros(16)
    priorities[5] = priorities[9] = 1.0
    rb.update_priority(torch.arange(16), priorities)
    seen = {tuple(one) for _ in range(10) for one in slices(rb.sample(), 2)}
    assert seen == {(5, 6), (9, 10)}


@prioritized
def test_after_wrapping_the_priorities_are_those_of_the_new_items(maker: Maker) -> None:
    rb = buffer(maker, 12, 20)
    rb.extend(steps(0, 12))
    rb.update_priority(torch.arange(12), torch.tensor([0.0] * 8 + [1e-3] * 4))
    rb.extend(steps(12, 20))  # overwrites items of priority 0 with the default priority
    seen = {one[0] // STEPS for _ in range(10) for one in slices(rb.sample(), 2)}
    assert seen <= {2, 3, 4}
    assert {3, 4} <= seen


@prioritized
def test_every_step_of_a_slice_has_a_weight(maker: Maker) -> None:
    rb = buffer(maker, 16, 40)
    rb.extend(steps(0, 16))
    sample = rb.sample()
    assert list(sample["priority_weight"].shape) == [40]
    assert torch.equal(sample["priority_weight"], torch.ones(40))
    assert torch.equal(sample["_weight"], sample["priority_weight"])
    sample["td_error"] = sample["id"].float()
    rb.update_tensordict_priority(sample)
    assert (rb.sample()["priority_weight"] <= 1.0).all()
