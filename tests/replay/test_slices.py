"""Slices of trajectories: which exist, how often each is drawn, and how they are marked."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.samplers.item_entries import RowEntries
from shmbuffer.samplers.slicing import boundaries
from shmbuffer.samplers.slicing.cuts import MarkColumns
from tests.kit.rings import ring_of
from tests.replay.slice_model import History, cut_up, drawn, slices
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)

MANY = 400  # slices in a batch, enough to draw every one of some dozens


def buffer(storage: Any, batch_size: int, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage, sampler=SliceSampler(**options), batch_size=batch_size
    )


def episodes(*lengths: int, done: bool = True) -> TensorDict:
    """Makes numbered steps of whole episodes; without ``done``, the last episode stays open."""
    ends = torch.cat([torch.arange(length) == length - 1 for length in lengths])
    ends[-1] = done
    count = len(ends)
    return TensorDict(
        {"number": torch.arange(count), ("next", "done"): ends.unsqueeze(-1)}, [count]
    )


def filled(data: TensorDict, **options: Any) -> TensorDictReplayBuffer:
    rb = buffer(LazyTensorStorage(len(data)), **options)
    rb.extend(data)
    return rb


# -- which slices there are ------------------------------------------------------------------------


@pytest.mark.product("make keys")
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("keys", [{"end_key": ("next", "done")}, {"traj_key": "id"}, {}])
def test_every_slice_is_one_of_the_definition_and_each_of_them_is_drawn(
    make: Any, seed: int, keys: dict[str, Any]
) -> None:
    history = History(seed)
    capacity, steps = 12 + seed, 1 + seed % 4
    rb = buffer(make(capacity), MANY * steps, slice_len=steps, **keys)
    for written in (capacity // 2, capacity, 3 * capacity + seed):
        while len(history.rows) < written:
            rb.extend(history.steps(min(history.chunk(5), written - len(history.rows))))
        legal = slices(history.trajectories(capacity), steps)
        if legal:
            assert set(drawn(rb, 8)) == legal


@pytest.mark.product("span strict", few=5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "span", [True, (True, False), (False, True), 1, (2, 0), [0, 2], (True, 1), (0, 0)]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_span_cuts_slices_off_at_the_sides_that_it_names(
    seed: int, span: Any, strict: bool
) -> None:
    history = History(seed, ends=0.15)
    rb = buffer(LazyTensorStorage(20), 4 * 3 * MANY, slice_len=4, span=span, strict_length=strict)
    for _ in range(9):
        rb.extend(history.steps(history.chunk(6)))
    left, right = span if isinstance(span, (tuple, list)) else (span, span)
    legal = slices(history.trajectories(20), 4, strict=strict, left=left, right=right)
    assert set(drawn(rb, 8)) == legal


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_short_trajectories_are_drawn_whole_where_lengths_are_not_strict(seed: int) -> None:
    history = History(seed, ends=0.4)
    rb = buffer(LazyTensorStorage(15), 5 * MANY, num_slices=MANY, strict_length=False)
    for _ in range(12):
        rb.extend(history.steps(history.chunk(3)))
    found = drawn(rb, 8)
    assert set(found) == slices(history.trajectories(15), 5, strict=False)
    assert sum(found.values()) == 8 * MANY
    assert rb.sample().shape[0] < 5 * MANY


@pytest.mark.product(few=6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_are_streams_of_their_own(make: Any, seed: int, lanes: int) -> None:
    history = History(seed, lanes=lanes)
    rb = buffer(make(10 * lanes, ndim=2), 3 * MANY, slice_len=3)
    for _ in range(3 + 2 * seed):
        rb.extend(history.steps(history.chunk(4)))
    found = drawn(rb, 8)
    assert set(found) == slices(history.trajectories(10), 3)
    sample = rb.sample()
    assert sample["index"].shape == (3 * MANY, 2)
    assert torch.equal(sample["index"][:, 1], sample["number"] // 1000)
    assert torch.equal(sample["index"][:, 0], sample["number"] % 1000 % 10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_place_without_an_item_cuts(make: Any, seed: int, lanes: int) -> None:
    history = History(seed, lanes=lanes, ends=0.1)
    rb = buffer(make(12 * lanes, ndim=min(lanes, 2)), 2 * MANY, slice_len=2)
    rb.extend(history.steps(2))
    ring = ring_of(rb)
    for _ in range(5 + seed):
        rb.extend(history.steps(2 + history.chunk(3)))
        ring.claims.claim(1)
        ring.claims.abort()
        history.hole(1)
    assert set(drawn(rb, 8)) == slices(history.trajectories(12), 2)


def test_a_trajectory_over_the_last_slot_of_the_ring_is_one_and_the_head_is_not_crossed() -> None:
    rb = buffer(LazyTensorStorage(6), 3 * MANY, slice_len=3)
    rb.extend(episodes(4, done=False))
    more = episodes(4)
    rb.extend(more.set("number", more["number"] + 4))
    assert set(drawn(rb, 8)) == {(2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7)}
    assert rb[:]["number"].tolist() == [6, 7, 2, 3, 4, 5]


def test_an_item_that_is_being_written_is_in_no_slice(make: Any) -> None:
    rb = buffer(make(8), 2 * MANY, slice_len=2)
    rb.extend(episodes(8, done=False))
    ring = ring_of(rb)
    ring.claims.claim_slots(np.array([3]), in_place=True)
    try:
        assert set(drawn(rb, 8)) == {(0, 1), (1, 2), (4, 5), (5, 6), (6, 7)}
    finally:
        ring.claims.abort()


def test_an_item_is_in_slices_once_it_is_committed(make: Any) -> None:
    rb = buffer(make(8), 2 * MANY, slice_len=2, cache_values=True)
    rb.extend(episodes(3, done=False))
    ring, rows = ring_of(rb), rb.storage.mover()
    ring.claims.claim(2)
    for view in rows.views():
        view[3:5] = view[:2]
    assert set(drawn(rb, 8)) == {(0, 1), (1, 2)}
    ring.claims.commit()  # the head does not move
    assert set(drawn(rb, 8)) == {(0, 1), (1, 2), (2, 0)}


def test_an_item_that_was_changed_in_place_stays_where_it_is(make: Any) -> None:
    rb = buffer(make(4), 2 * MANY, slice_len=2)
    rb.extend(episodes(6, done=False))
    assert set(drawn(rb, 8)) == {(2, 3), (3, 4), (4, 5)}
    rb[2] = TensorDict({"number": torch.tensor(77), "next": {"done": torch.tensor([False])}}, [])
    assert set(drawn(rb, 8)) == {(77, 3), (3, 4), (4, 5)}
    rb[3] = TensorDict({"number": torch.tensor(78), "next": {"done": torch.tensor([True])}}, [])
    assert set(drawn(rb, 8)) == {(77, 78), (4, 5)}


# -- how often each is drawn -----------------------------------------------------------------------


def test_a_trajectory_is_as_likely_as_any_other_and_in_it_every_slice() -> None:
    rb = filled(episodes(3, 3, 6), batch_size=30000, slice_len=3)
    found = drawn(rb, 1)
    for one in ((0, 1, 2), (3, 4, 5)):
        assert found[one] == pytest.approx(10000 / 3, rel=0.1)
    for begin in range(6, 10):
        assert found[(begin, begin + 1, begin + 2)] == pytest.approx(10000 / 12, rel=0.2)


def test_short_trajectories_are_as_likely_as_long_ones_where_lengths_are_not_strict() -> None:
    rb = filled(episodes(1, 5), batch_size=30000, slice_len=3, strict_length=False)
    assert drawn(rb, 1)[(0,)] == pytest.approx(5000, rel=0.1)


def test_a_seed_decides_the_slices() -> None:
    def first(seed: int) -> list[int]:
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30),
            sampler=SliceSampler(slice_len=2),
            batch_size=20,
            generator=torch.Generator().manual_seed(seed),
        )
        rb.extend(episodes(10, 10, 10))
        return rb.sample()["number"].tolist()

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_without_a_generator_the_seed_of_torch_decides() -> None:
    rb = filled(episodes(20), batch_size=20, slice_len=2)
    torch.manual_seed(5)
    one = rb.sample()
    torch.manual_seed(5)
    assert torch.equal(one["number"], rb.sample()["number"])


# -- sizes -----------------------------------------------------------------------------------------


def test_the_length_of_a_slice_follows_from_their_number_or_is_given() -> None:
    data = episodes(10, 10)
    assert len(cut_up_one(filled(data, batch_size=12, num_slices=3))) == 3
    assert len(cut_up_one(filled(data, batch_size=12, slice_len=3))) == 4
    rb = filled(data, batch_size=12, num_slices=3)
    with pytest.warns(UserWarning, match="differs"):
        assert len(cut_up(rb.sample(6)["number"], rb.sample(6)["next", "truncated"])) == 3


def cut_up_one(rb: Any) -> list[tuple[int, ...]]:
    sample = rb.sample()
    assert sample.shape == (12,)
    return cut_up(sample["number"], sample["next", "truncated"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slices": 3}, "a batch of 8 is not divisible by num_slices=3"),
        ({"slice_len": 3}, "a batch of 8 is not divisible by slice_len=3"),
        ({"slice_len": 9}, "a batch of 8 is not divisible by slice_len=9"),
    ],
)
def test_a_batch_is_a_whole_number_of_slices(options: dict[str, int], message: str) -> None:
    rb = filled(episodes(10), batch_size=8, **options)
    with pytest.raises(RuntimeError, match=message):
        rb.sample()


def test_strict_lengths_need_one_trajectory_that_is_long_enough() -> None:
    rb = filled(episodes(3, 5), batch_size=12, slice_len=6)
    with pytest.raises(
        RuntimeError, match=r"long enough for .* 6 steps: the longest of the 2 trajectories has 5"
    ):
        rb.sample()
    assert set(drawn(filled(episodes(3, 5), batch_size=400, slice_len=4), 8)) == {
        (3, 4, 5, 6),
        (4, 5, 6, 7),
    }


def test_nothing_can_be_drawn_from_nothing(make: Any) -> None:
    rb = buffer(make(10), 4, slice_len=2)
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(episodes(10))
    rb.sample()
    rb.empty()
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(episodes(4))
    assert set(drawn(rb, 40)) == {(0, 1), (1, 2), (2, 3)}


def test_a_batch_of_no_steps_is_empty() -> None:
    rb = filled(episodes(4), batch_size=4, slice_len=2)
    with pytest.warns(UserWarning, match="differs"):
        assert rb.sample(0).shape == (0,)


# -- marks -----------------------------------------------------------------------------------------


def test_the_last_step_of_a_slice_is_truncated_and_done_and_as_terminated_as_it_was() -> None:
    data = episodes(4, 4)
    data["next", "terminated"] = data["next", "done"].clone()
    rb = filled(data, batch_size=40, slice_len=2)
    sample = rb.sample()
    last = torch.tensor([False, True] * 20).unsqueeze(-1)
    assert torch.equal(sample["next", "truncated"], last)
    assert torch.equal(sample["next", "done"], last)
    terminated = (sample["number"] % 4 == 3).unsqueeze(-1)
    assert terminated.any()
    assert not terminated.all()
    assert torch.equal(sample["next", "terminated"], terminated)
    assert torch.equal(rb[:]["next", "done"], data["next", "done"])


def test_a_step_that_is_stored_as_truncated_stays_so() -> None:
    data = episodes(6)
    data["next", "truncated"] = torch.zeros(6, 1, dtype=torch.bool)
    data["next", "truncated"][1] = True
    sample = filled(data, batch_size=300, slice_len=3).sample()
    rows = sample["number"].view(-1, 3)
    truncated = sample["next", "truncated"].view(-1, 3)
    assert torch.equal(truncated[:, :2], rows[:, :2] == 1)
    assert truncated[:, 2].all()


@pytest.mark.parametrize(
    ("key", "done", "terminated"),
    [
        ("cut", "done", "terminated"),
        (("next", "cut"), ("next", "done"), ("next", "terminated")),
        (("a", "b", "cut"), ("a", "b", "done"), ("a", "b", "terminated")),
    ],
)
def test_marks_have_the_names_that_were_asked_for(key: Any, done: Any, terminated: Any) -> None:
    rb = filled(episodes(6), batch_size=4, slice_len=2, truncated_key=key)
    sample, info = rb.sample(return_info=True)
    last = torch.tensor([[False], [True]] * 2)
    for name, value in ((key, last), (done, last), (terminated, torch.zeros_like(last))):
        assert torch.equal(info[name], value)
        assert torch.equal(sample[name], value)


def test_nothing_is_marked_without_a_key() -> None:
    data = episodes(6)
    rb = filled(data, batch_size=400, slice_len=2, truncated_key=None)
    sample, info = rb.sample(return_info=True)
    assert set(info) == {"index"}
    assert torch.equal(sample["next", "done"].squeeze(-1), sample["number"] == 5)
    assert ("next", "truncated") not in sample.keys(True)


def test_marks_have_the_shape_of_what_is_stored() -> None:
    flat = episodes(6)
    flat["next", "done"] = flat["next", "done"].squeeze(-1)
    sample = filled(flat, batch_size=4, slice_len=2).sample()
    for name in ("done", "truncated", "terminated"):
        assert sample["next", name].shape == (4,)
    assert sample["next", "done"].tolist() == [False, True] * 2
    several = episodes(6)
    several["next", "done"] = several["next", "done"].expand(6, 3).clone()
    several["next", "done"][2, 1] = True  # one of three flags is enough to end the trajectory
    sample = filled(several, batch_size=300, slice_len=3).sample()
    assert set(cut_up(sample["number"], sample["next", "truncated"][:, 0])) == {
        (0, 1, 2),
        (3, 4, 5),
    }
    last = torch.tensor([False, False, True] * 100).unsqueeze(-1).expand(300, 3)
    for name in ("done", "truncated"):
        assert torch.equal(sample["next", name], last)


def test_the_first_step_of_a_slice_is_marked_where_first_steps_are_stored() -> None:
    data = episodes(6)
    data["is_init"] = (data["number"] == 2).unsqueeze(-1)
    sample, info = filled(data, batch_size=300, slice_len=3).sample(return_info=True)
    first = torch.tensor([True, False, False] * 100).unsqueeze(-1)
    assert torch.equal(info["is_init"], first | (sample["number"] == 2).unsqueeze(-1))
    assert torch.equal(sample["is_init"], info["is_init"])
    rb = filled(data, batch_size=300, slice_len=3, init_key=None)
    sample, info = rb.sample(return_info=True)
    assert torch.equal(sample["is_init"].squeeze(-1), sample["number"] == 2)
    assert "is_init" not in info
    sample, info = filled(episodes(6), batch_size=3, slice_len=3).sample(return_info=True)
    assert "is_init" not in info
    assert "is_init" not in set(sample.keys())


def test_a_plain_buffer_has_the_marks_in_its_info_alone() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=3), batch_size=60
    )
    rb.extend(episodes(6))
    data, info = rb.sample(return_info=True)
    assert torch.equal(data["next", "done"].squeeze(-1), data["number"] == 5)
    assert info["next", "done"].squeeze(-1).tolist() == [False, False, True] * 20
    assert info["next", "truncated"].dtype is torch.bool
    assert torch.equal(info["index"], data["number"])
    assert set(info) == {
        "index",
        ("next", "truncated"),
        ("next", "done"),
        ("next", "terminated"),
    }


def test_padding_repeats_the_last_step_and_is_told_from_it() -> None:
    data = episodes(2, 3)
    data["next", "truncated"] = data["next", "done"].clone()
    rb = filled(data, batch_size=400, slice_len=4, strict_length=False, pad_output=True)
    sample, info = rb.sample(return_info=True)
    assert sample.shape == (400,)
    mask = sample["collector", "mask"].view(-1, 4)
    assert torch.equal(info["collector", "mask"], mask.flatten())
    rows = sample["number"].view(-1, 4).tolist()
    truncated = sample["next", "truncated"].view(-1, 4).tolist()
    expected = {
        (0, 1, 1, 1): ([True, True, False, False], [False, True, False, False]),
        (2, 3, 4, 4): ([True, True, True, False], [False, False, True, False]),
    }
    assert {tuple(row) for row in rows} == set(expected)
    for row, real, last in zip(rows, mask.tolist(), truncated, strict=True):
        assert (real, last) == expected[tuple(row)]


def test_padding_has_nothing_to_do_with_strict_lengths() -> None:
    with pytest.raises(ValueError, match="strict_length=False"):
        SliceSampler(slice_len=2, pad_output=True)


# -- what ends a trajectory ------------------------------------------------------------------------


def conflicting() -> TensorDict:
    """Makes data in which each of the usual entries splits at a different step."""
    data = TensorDict({"number": torch.arange(8)}, [8])
    data["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    data["episode"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    data["next", "done"] = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0]).bool().unsqueeze(-1)
    data["next", "truncated"] = torch.zeros(8, 1, dtype=torch.bool)
    data["next", "truncated"][6] = True
    return data


@pytest.mark.parametrize(
    ("options", "without", "cuts"),
    [
        ({}, (), {1}),
        ({}, ("collector",), {3}),
        ({}, ("collector", "episode"), {5}),
        ({"end_key": ("next", "done")}, (), {5}),
        ({"end_keys": [("next", "done"), ("next", "truncated")]}, (), {5, 6}),
        ({"end_keys": [("next", "nowhere"), ("next", "done")]}, (), {5}),
        ({"traj_key": "episode"}, (), {3}),
        ({"traj_key": "episode", "end_key": ("next", "done")}, (), {3, 5}),
        ({"traj_key": "nowhere"}, (), {5}),
        ({"traj_key": "nowhere", "end_key": ("next", "truncated")}, (), {6}),
    ],
)
def test_which_entries_say_where_a_trajectory_ends(
    options: dict[str, Any], without: tuple[str, ...], cuts: set[int]
) -> None:
    rb = filled(conflicting().exclude(*without), batch_size=800, slice_len=2, **options)
    sample = rb.sample()
    pairs = {tuple(pair) for pair in sample["number"].view(-1, 2).tolist()}
    assert pairs == {(at, at + 1) for at in range(7) if at not in cuts}


def test_data_without_trajectory_ends_are_refused() -> None:
    data = TensorDict({"number": torch.arange(8)}, [8])
    with pytest.raises(RuntimeError, match=r"cannot find the ends .* traj_key or end_key"):
        filled(data, batch_size=4, slice_len=2).sample()
    with pytest.raises(RuntimeError, match="'nowhere'"):
        filled(data, batch_size=4, slice_len=2, end_key="nowhere").sample()
    with pytest.raises(KeyError, match=r"none of the end_keys 'a', \('b', 'c'\)"):
        filled(data, batch_size=4, slice_len=2, end_keys=["a", ("b", "c")]).sample()
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=SliceSampler(slice_len=2), batch_size=2)
    rb.extend(torch.arange(4))
    with pytest.raises(RuntimeError, match="the sampler cannot find the ends"):
        rb.sample()


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([5, 5, 5, 3, 3, 3]).to(torch.int32),
        torch.tensor([0.5, 0.5, 0.5, 2, 2, 2]),
        torch.tensor([0.5, 0.5, 0.5, 2, 2, 2]).bfloat16(),
        torch.tensor([[0, 1]] * 3 + [[0, 2]] * 3),
    ],
)
def test_an_id_is_any_number_or_several(ids: torch.Tensor) -> None:
    data = TensorDict({"number": torch.arange(6), "mine": ids}, [6])
    rb = filled(data, batch_size=400, slice_len=2, traj_key="mine")
    pairs = {tuple(pair) for pair in rb.sample()["number"].view(-1, 2).tolist()}
    assert pairs == {(0, 1), (1, 2), (3, 4), (4, 5)}


# -- ends and ids that are given -------------------------------------------------------------------


def pairs_of(rb: Any) -> set[tuple[int, int]]:
    return {tuple(pair) for pair in rb.sample()["number"].view(-1, 2).tolist()}


def test_ends_that_are_given_say_it_in_place_of_what_is_stored() -> None:
    ends = torch.tensor([0, 1, 0, 0, 0, 1]).bool()
    rb = filled(episodes(6), batch_size=400, slice_len=2, ends=ends, cache_values=True)
    assert pairs_of(rb) == {(0, 1), (2, 3), (3, 4), (4, 5)}


def test_without_an_end_at_its_end_what_is_given_is_a_circle() -> None:
    ends = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    rb = filled(episodes(6), batch_size=600, slice_len=2, ends=ends, cache_values=True)
    assert pairs_of(rb) == {(0, 1), (2, 3), (3, 4), (4, 5), (5, 0)}
    ids = torch.tensor([7, 7, 8, 8, 9, 7])
    rb = filled(episodes(6), batch_size=600, slice_len=2, trajectories=ids, cache_values=True)
    assert pairs_of(rb) == {(0, 1), (2, 3), (5, 0)}


def test_given_ends_are_no_circle_at_the_write_position_or_before_the_ring_is_full() -> None:
    ends = torch.zeros(6, dtype=torch.bool)
    rb = buffer(LazyTensorStorage(8), 600, slice_len=2, ends=ends, cache_values=True)
    rb.extend(episodes(6))
    assert pairs_of(rb) == {(at, at + 1) for at in range(5)}
    rb = buffer(LazyTensorStorage(6), 600, slice_len=2, ends=ends, cache_values=True)
    rb.extend(episodes(6))
    more = episodes(2)
    rb.extend(more.set("number", more["number"] + 6))
    assert rb[:]["number"].tolist() == [6, 7, 2, 3, 4, 5]
    assert pairs_of(rb) == {(2, 3), (3, 4), (4, 5), (5, 6), (6, 7)}


def test_given_ends_of_lanes_are_a_circle_in_each() -> None:
    ends = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 1]]).bool()  # of the slots, as they are stored
    storage = TensorStorage(TensorDict({"number": torch.arange(8).view(4, 2)}, [4, 2]), ndim=2)
    rb = buffer(storage, 800, slice_len=2, ends=ends, cache_values=True)
    assert pairs_of(rb) == {(0, 2), (2, 4), (6, 0), (3, 5), (5, 7)}


def test_given_ends_must_fit_the_storage() -> None:
    ends = torch.zeros(5, dtype=torch.bool)
    rb = filled(episodes(6), batch_size=4, slice_len=2, ends=ends, cache_values=True)
    with pytest.raises(ValueError, match="ends has 5 entries, but the storage has 6 items"):
        rb.sample()


# -- fragments -------------------------------------------------------------------------------------


def fragments(ids: list[int], steps: list[int]) -> TensorDict:
    count = len(ids)
    return TensorDict(
        {
            "number": torch.arange(count),
            "episode": torch.tensor(ids),
            "step_count": torch.tensor(steps),
        },
        [count],
    )


@pytest.mark.parametrize("cache_values", [False, True])
def test_fragments_are_put_in_order_by_id_and_step(cache_values: bool) -> None:
    data = fragments([4, 2, 4, 2, 4, 4], [0, 7, 2, 6, 1, 4])
    rb = filled(data, batch_size=600, slice_len=2, fragmented=True, cache_values=cache_values)
    assert pairs_of(rb) == {(0, 4), (4, 2), (3, 1)}
    rb[2] = fragments([4], [5])[0].set("number", torch.tensor(2))
    assert pairs_of(rb) == {(0, 4), (5, 2), (3, 1)}
    rb = filled(data, batch_size=60, slice_len=3, fragmented=True, strict_length=False)
    assert set(drawn(rb, 8)) == {(0, 4, 2), (5,), (3, 1)}


def test_fragments_need_ids_and_steps_that_are_numbers_and_occur_once() -> None:
    options = {"batch_size": 4, "slice_len": 2, "fragmented": True}
    with pytest.raises(RuntimeError, match=r"step 1 of trajectory 0 occurs twice .* 1 and 2"):
        filled(fragments([0, 0, 0], [0, 1, 1]), **options).sample()
    with pytest.raises(ValueError, match="step numbers must be at least 0, got -1"):
        filled(fragments([0, 0, 0], [0, -1, 1]), **options).sample()
    data = fragments([0, 0, 0], [0, 1, 2])
    with pytest.raises(TypeError, match=r"one integer per item, got dtype float32"):
        filled(data.clone().set("step_count", torch.rand(3)), **options).sample()
    with pytest.raises(RuntimeError, match="step_key 'nowhere'"):
        filled(data, **options, step_key="nowhere").sample()


# -- storages --------------------------------------------------------------------------------------


def test_the_callers_tensors_are_a_ring_that_is_full() -> None:
    rb = buffer(TensorStorage(episodes(3, 3, done=False)), 400, slice_len=2)
    assert pairs_of(rb) == {(0, 1), (1, 2), (3, 4), (4, 5)}


@pytest.mark.product(few=2)
@pytest.mark.parametrize("cls", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("seed", range(3))
def test_items_in_a_list_are_read_once_each(cls: Any, seed: int) -> None:
    history = History(seed)
    rb = buffer(cls(14), 2 * MANY, slice_len=2)
    for _ in range(4 + 3 * seed):
        rb.extend(history.steps(history.chunk(4)))
    assert set(drawn(rb, 8)) == slices(history.trajectories(14), 2)


def test_a_list_of_dicts_has_entries_too() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(6),
        sampler=SliceSampler(slice_len=2, end_key="end"),
        batch_size=200,
        collate_fn=lambda items: torch.tensor([item["number"] for item in items]),
    )
    rb.extend([{"number": at, "end": at == 2} for at in range(6)])
    found, info = rb.sample(return_info=True)
    assert {tuple(pair) for pair in found.view(-1, 2).tolist()} == {(0, 1), (1, 2), (3, 4), (4, 5)}
    assert info["next", "truncated"].flatten().tolist() == [False, True] * 100


class ForeignStorage(Storage):
    """A user's storage with get, set and a length."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.data: TensorDict | None = None
        self.length = 0

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        if self.data is None:
            self.data = data[:1].expand(self.max_size).clone().zero_()
        self.data[cursor] = data
        self.length = max(self.length, int(torch.as_tensor(cursor).max()) + 1)

    def get(self, index: Any) -> Any:
        assert self.data is not None
        return self.data[index]

    def __len__(self) -> int:
        return self.length


def test_a_foreign_storage_needs_get_and_a_length() -> None:
    rb = buffer(ForeignStorage(10), 400, slice_len=2)
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(episodes(2, 4))
    assert set(drawn(rb, 8)) == {(0, 1), (2, 3), (3, 4), (4, 5)}
    rb.storage.data["next", "done"][3] = True  # the storage is not notified
    assert set(drawn(rb, 8)) == {(0, 1), (2, 3), (4, 5)}


def test_pytrees_have_entries_by_path() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(6),
        sampler=SliceSampler(slice_len=2, end_key=("flags", "end"), truncated_key=("flags", "cut")),
        batch_size=200,
    )
    rb.extend({"number": torch.arange(6), "flags": {"end": torch.arange(6) == 2}})
    data, info = rb.sample(return_info=True)
    assert {tuple(pair) for pair in data["number"].view(-1, 2).tolist()} == {
        (0, 1),
        (1, 2),
        (3, 4),
        (4, 5),
    }
    assert info["flags", "cut"].flatten().tolist() == [False, True] * 100


def test_dim_extend_says_which_dimension_time_is() -> None:
    for dim_extend in (0, 1):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(12, ndim=2),
            sampler=SliceSampler(slice_len=3),
            batch_size=300,
            dim_extend=dim_extend,
        )
        number = torch.arange(12).view(3, 4)
        data = TensorDict({"number": number, "next": {"done": number % 6 == 5}}, [3, 4])
        rb.extend(data)
        found = {tuple(one) for one in rb.sample()["number"].view(-1, 3).tolist()}
        along = number.T if dim_extend == 0 else number
        expected = {
            tuple(lane[at : at + 3].tolist())
            for lane in along
            for at in range(len(lane) - 2)
            if not (lane[at : at + 2] % 6 == 5).any()
        }
        assert found == expected


# -- what is remembered ----------------------------------------------------------------------------


@pytest.mark.parametrize("cache_values", [False, True])
def test_the_next_sample_sees_a_write(make: Any, cache_values: bool) -> None:
    rb = buffer(make(6), 400, slice_len=2, cache_values=cache_values)
    other = buffer(rb.storage, 400, slice_len=2)
    rb.extend(episodes(4, done=False))
    assert set(drawn(rb, 8)) == {(0, 1), (1, 2), (2, 3)}
    other.extend(episodes(2).set("number", torch.tensor([4, 5])))
    assert set(drawn(rb, 8)) == {(at, at + 1) for at in range(5)}
    step = TensorDict({"number": torch.tensor(2), "next": {"done": torch.tensor([True])}}, [])
    rb[2] = step  # an in-place change alters neither the length nor the write count
    assert set(drawn(rb, 8)) == {(0, 1), (1, 2), (3, 4), (4, 5)}
    rb.storage.set(2, step.clone().set(("next", "done"), torch.tensor([False])))
    assert set(drawn(rb, 8)) == {(at, at + 1) for at in range(5)}


def test_a_look_reads_what_was_written_since_the_one_before(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    at = RowEntries.at

    def noted(entries: RowEntries, path: Any, slots: Any) -> Any:
        read.extend(slots.tolist())
        return at(entries, path, slots)

    monkeypatch.setattr(RowEntries, "at", noted)
    # the core reads all that it can
    monkeypatch.setattr(boundaries, "cut_columns", lambda *_: None)
    rb = buffer(make(6), 4, slice_len=2)
    rb.extend(episodes(4))
    rb.sample()
    assert read == [0, 1, 2]  # the flags of steps that have a successor
    read.clear()
    rb.sample()
    assert read == []
    rb.add(episodes(1)[0])
    rb.sample()
    assert read == [3]
    read.clear()
    rb[1] = episodes(1)[0]
    rb.sample()
    assert read == [0, 1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stored", [("truncated", "terminated"), ("terminated",), ()])
def test_the_core_gives_the_slices_and_flags_that_are_found_entry_by_entry(
    stored: tuple[str, ...], streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = torch.arange(97)
    data = TensorDict({"number": number, "is_init": (number % 13 == 0)[:, None]}, [97])
    data["next", "done"] = (number % 19 == 18)[:, None].expand(97, 2)
    for name in stored:
        data["next", name] = (number % 7 == 1)[:, None].expand(97, 2)

    def batches() -> Any:
        sampler: Any = (StreamingSliceSampler if streaming else SliceSampler)(slice_len=4)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler)
        torch.manual_seed(3)
        for first in range(0, 97, 9):
            rb.extend(data[first : first + 9])
            for _ in range(2):
                yield rb.sample(20) if first else None

    expected = list(batches())
    monkeypatch.setattr(MarkColumns, "create", lambda *_: None)
    monkeypatch.setattr(boundaries, "cut_columns", lambda *_: None)
    for one, other in zip(expected, batches(), strict=True):
        if one is not None:
            assert set(one.keys(True, True)) == set(other.keys(True, True))
            assert (one == other).all()


def test_a_change_through_a_view_is_not_looked_for_and_one_by_the_buffer_is_seen(
    make_private: Any,
) -> None:
    rb = buffer(make_private(6), 400, slice_len=2)
    rb.extend(episodes(6))
    before = set(drawn(rb, 8))
    rb[2]["next", "done"].fill_(True)
    assert set(drawn(rb, 8)) == before
    rb.sampler._boundaries.forget()  # type: ignore[attr-defined]
    assert set(drawn(rb, 8)) == before - {(2, 3)}
    rb[2] = rb[2].clone().set(("next", "done"), torch.tensor([False]))
    assert set(drawn(rb, 8)) == before


def test_another_storage_is_another_table() -> None:
    rb = filled(episodes(3, 3), batch_size=300, slice_len=3)
    assert set(drawn(rb, 8)) == {(0, 1, 2), (3, 4, 5)}
    other = LazyTensorStorage(6)
    other.set(range(6), episodes(6))
    rb.set_storage(other)
    assert set(drawn(rb, 8)) == {(at, at + 1, at + 2) for at in range(4)}


def test_a_column_that_is_added_later_can_say_where_trajectories_end() -> None:
    rb = filled(episodes(6), batch_size=400, slice_len=2, end_keys=["mine", ("next", "done")])
    assert (2, 3) in drawn(rb, 8)
    rb["mine"] = torch.arange(6) == 2
    assert (2, 3) not in drawn(rb, 8)


def test_a_sampler_and_its_buffer_can_be_pickled(make: Any) -> None:
    rb = buffer(make(6), 400, slice_len=2, span=(False, 1), truncated_key="cut")
    rb.extend(episodes(6))
    rb.sample()
    sampler = pickle.loads(pickle.dumps(rb.sampler))
    assert repr(sampler) == repr(rb.sampler)
    one = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=400)
    assert one.sample()["cut"].any()


def test_a_checkpoint_keeps_where_the_ring_writes_next(tmp_path: Any) -> None:
    rb = buffer(LazyTensorStorage(6), 400, slice_len=2)
    rb.extend(episodes(4, done=False))
    rb.extend(episodes(4, done=False).apply(lambda entry: entry + 4 if entry.dim() == 1 else entry))
    before = set(drawn(rb, 8))
    assert before == {(at, at + 1) for at in range(2, 7)}
    rb.dumps(tmp_path / "checkpoint")
    other = buffer(LazyTensorStorage(6), 400, slice_len=2)
    other.loads(tmp_path / "checkpoint")
    assert set(drawn(other, 8)) == before


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TypeError, ValueError])
@pytest.mark.parametrize("options", [{}, {"num_slices": 2, "slice_len": 2}])
def test_either_the_number_or_the_length_of_slices_is_given(
    error: Any, options: dict[str, int]
) -> None:
    with pytest.raises(error, match="exactly one of num_slices and slice_len"):
        SliceSampler(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_slices": 0}, ValueError, "num_slices must be at least 1, got 0"),
        ({"slice_len": -2}, ValueError, "slice_len must be at least 1, got -2"),
        ({"slice_len": 2.5}, TypeError, "slice_len must be an integer, got 2.5"),
        ({"slice_len": 2, "span": -1}, ValueError, "span must be a bool, .* got -1"),
        ({"slice_len": 2, "span": (1, 2, 3)}, ValueError, "span must be a bool"),
        ({"slice_len": 2, "span": 0.5}, ValueError, "span must be a bool"),
        (
            {"slice_len": 2, "end_key": "a", "end_keys": ["b"]},
            RuntimeError,
            "cannot be combined, got 'a' and",
        ),
        ({"slice_len": 2, "end_keys": []}, ValueError, "end_keys is empty"),
        ({"slice_len": 2, "ends": torch.zeros(3)}, RuntimeError, "ends .* cache_values=True"),
        (
            {"slice_len": 2, "trajectories": torch.zeros(3)},
            RuntimeError,
            "trajectories .* cache_values=True",
        ),
        (
            {"slice_len": 2, "ends": torch.zeros(3), "cache_values": True, "traj_key": "a"},
            RuntimeError,
            "ends cannot be combined with end_key, end_keys and traj_key",
        ),
        (
            {"slice_len": 2, "ends": torch.zeros(3), "trajectories": torch.zeros(3)}
            | {"cache_values": True},
            RuntimeError,
            "ends and trajectories cannot be combined",
        ),
        (
            {"slice_len": 2, "fragmented": True, "step_key": None},
            ValueError,
            "step_key must be a key",
        ),
    ],
)
def test_arguments_are_checked_when_they_are_given(
    options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        SliceSampler(**options)


def test_a_span_leaves_something_of_a_slice() -> None:
    rb = filled(episodes(6), batch_size=4, num_slices=2, span=(0, 2))
    with pytest.raises(ValueError, match=r"right span must be at most 1 for .*, got 2"):
        rb.sample()


def test_torchrls_speed_options_are_accepted() -> None:
    rb = filled(episodes(6), batch_size=4, slice_len=2, compile={"mode": "default"}, use_gpu=True)
    assert rb.sample().shape == (4,)
    assert rb.sampler.num_slices is None
    assert rb.sampler.slice_len == 2


def test_without_replacement_is_an_option_too() -> None:
    sampler = SliceSampler(slice_len=2, replacement=False, drop_last=True)
    assert type(sampler) is SliceSamplerWithoutReplacement
    assert sampler.drop_last
    assert type(SliceSampler(slice_len=2, replacement=True)) is SliceSampler


def test_prefetched_slices_are_those_that_are_drawn_without() -> None:
    def samples(prefetch: int | None) -> list[list[int]]:
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30),
            sampler=SliceSampler(slice_len=3, strict_length=False),
            batch_size=12,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(1),
        )
        rb.extend(episodes(2, 10, 1, 17))
        return [rb.sample()["number"].tolist() for _ in range(5)]

    assert samples(3) == samples(None)


def test_a_memmap_in_a_directory_says_the_generation_of_its_steps(tmp_path: Any) -> None:
    rb = buffer(LazyMemmapStorage(6, scratch_dir=tmp_path / "buffer"), 40, slice_len=2)
    rb.extend(episodes(8, done=False))
    sample = rb.sample()
    assert torch.equal(sample["index_generation"], sample["number"])
    assert torch.equal(sample["index"], sample["number"] % 6)
    rb.storage.close()
