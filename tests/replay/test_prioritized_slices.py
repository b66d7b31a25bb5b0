"""Slices of trajectories, drawn by the priority of their first step."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PriorityUpdate,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of
from tests.replay.slice_model import History, cut_up, drawn, slices
from tests.replay.test_slices import ForeignStorage, episodes
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)


def buffer(
    storage: Any, batch_size: int, alpha: float = 1.0, beta: float = 1.0, **options: Any
) -> TensorDictReplayBuffer:
    generator = options.pop("generator", None)
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=PrioritizedSliceSampler(64, alpha, beta, **options),
        batch_size=batch_size,
        generator=generator,
    )


def give(rb: Any, numbers: dict[int, float], other: float = 0.0) -> None:
    """Sets priorities by the number of the step."""
    there = rb[:]["number"].flatten().tolist()
    raw = torch.tensor([numbers.get(number, other) for number in there])
    index = torch.arange(len(there))
    if rb.storage.ndim > 1:
        along = rb[:]["number"].T if rb.dim_extend else rb[:]["number"]
        raw = torch.tensor([numbers.get(number, other) for number in along.flatten().tolist()])
        lanes = rb.storage.lanes()[0]
        index = torch.stack((index // lanes, index % lanes), -1)
    rb.update_priority(index, raw)


# -- where slices begin ----------------------------------------------------------------------------


def test_fragments_are_drawn_by_the_priority_of_their_first_step() -> None:
    rb = buffer(
        LazyTensorStorage(8), 40000, slice_len=2, traj_key="id", step_key="at", fragmented=True
    )
    data = {"number": torch.arange(6), "id": torch.tensor([4, 2, 4, 2, 4, 4])}
    rb.extend(TensorDict({**data, "at": torch.tensor([0, 7, 2, 6, 1, 4])}, [6]))
    assert (rb.sampler.step_key, rb.sampler.fragmented) == ("at", True)
    give(rb, {0: 1, 4: 3, 3: 4, 1: 9, 2: 9, 5: 9})
    found = drawn(rb)
    assert found.keys() == {(0, 4), (4, 2), (3, 1)}
    shares = [found[pair] / 20000 for pair in ((0, 4), (4, 2), (3, 1))]
    assert np.allclose(shares, [1 / 8, 3 / 8, 4 / 8], atol=0.02)


@pytest.mark.parametrize("far", [False, True])
def test_a_slice_begins_at_an_item_in_proportion_to_its_mass(far: bool) -> None:
    """With ``far``, nearly all mass is where no slice can begin, so most draws are rejected."""
    rb = buffer(LazyTensorStorage(9), 40000, alpha=2.0, num_slices=20000)
    rb.extend(episodes(4, 5))
    give(rb, {0: 1, 1: 2, 2: 3, 4: 4, 5: 1, 6: 1, 7: 1, 3: 1e6 * far, 8: 1e6 * far})
    found = drawn(rb)
    masses = {0: 1, 1: 4, 2: 9, 4: 16, 5: 1, 6: 1, 7: 1}
    assert set(found) == {(at, at + 1) for at in masses}
    for at, mass in masses.items():
        share = mass / sum(masses.values())
        error = 5 * (share * (1 - share) / 20000) ** 0.5
        assert found[(at, at + 1)] / 20000 == pytest.approx(share, abs=error)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_step_of_a_slice_has_the_weight_of_its_first(far: bool, dtype: torch.dtype) -> None:
    rb = buffer(LazyTensorStorage(9), 4000, beta=0.5, num_slices=2000, dtype=dtype, eps=0.0)
    rb.extend(episodes(4, 5))
    give(rb, {0: 1, 1: 2, 2: 3, 4: 4, 5: 5, 6: 6, 7: 7, 3: 0.5 if not far else 1e6, 8: 8})
    least = 0.5 if not far else 1.0
    sample, info = rb.sample(return_info=True)
    assert sample["_weight"].dtype is dtype
    first = sample["number"].view(-1, 2)[:, :1].expand(-1, 2).reshape(-1)
    mass = torch.where(first < 3, first + 1, first).double()
    torch.testing.assert_close(sample["_weight"], ((mass / least) ** -0.5).to(dtype))
    assert torch.equal(info["priority_weight"], sample["_weight"])
    assert torch.equal(sample["priority_weight"], sample["_weight"])


@pytest.mark.product("right strict lanes")
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("right", [False, True, 1])
def test_every_slice_is_one_of_the_definition_and_each_of_them_is_drawn(
    seed: int, lanes: int, strict: bool, right: Any
) -> None:
    history = History(seed, lanes=lanes, ends=0.2)
    rb = buffer(
        LazyTensorStorage(14 * lanes, ndim=min(lanes, 2)),
        1200,
        slice_len=3,
        strict_length=strict,
        span=(False, right),
    )
    for _ in range(4 + 3 * seed):
        rb.extend(history.steps(history.chunk(4)))
    # As in TorchRL, a trajectory may be short if slices may be cut off.
    legal = slices(history.trajectories(14), 3, strict=strict and not right, right=right)
    assert set(drawn(rb, 8)) == legal


def test_nothing_is_cut_off_at_the_left() -> None:
    with pytest.warns(UserWarning, match="the left side of span"):
        sampler = PrioritizedSliceSampler(8, 1.0, 1.0, slice_len=3, span=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=300)
    rb.extend(episodes(5))
    assert set(drawn(rb, 4)) == {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4), (4,)}


def test_a_huge_priority_dominates_the_next_sample() -> None:
    rb = buffer(LazyTensorStorage(9), 200, num_slices=100)
    rb.extend(episodes(4, 5))
    assert len(drawn(rb)) > 1
    assert rb.update_priority(torch.tensor([5]), 1e12) == PriorityUpdate(1, 0)
    assert set(drawn(rb)) == {(5, 6)}
    rb.update_priority(torch.tensor([8]), 1e24)  # no slice of two steps can begin there
    assert set(drawn(rb)) == {(5, 6)}


def test_one_trajectory_has_to_be_long_enough() -> None:
    rb = buffer(LazyTensorStorage(9), 6, slice_len=6)
    rb.extend(episodes(4, 5))
    with pytest.raises(RuntimeError, match="long enough for a slice of 6 steps"):
        rb.sample()
    rb = buffer(LazyTensorStorage(9), 10, slice_len=5)
    rb.extend(episodes(4, 5))
    give(rb, {0: 1e9}, other=1.0)
    assert set(drawn(rb)) == {(4, 5, 6, 7, 8)}


# -- priorities that are zero ----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1.0])
def test_a_trajectory_whose_priorities_are_all_zero_is_never_drawn(
    alpha: float, eps: float
) -> None:
    rb = buffer(LazyTensorStorage(12), 2000, alpha=alpha, slice_len=2, eps=eps)
    rb.extend(episodes(4, 4, 4))
    give(rb, dict.fromkeys((4, 5, 6, 7), 1.0) | {9: 3.0})
    found = drawn(rb, 3)
    assert {one[0] // 4 for one in found} == {1, 2}
    assert found[(9, 10)] > 0


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_a_trajectory_of_zero_priorities_is_never_drawn_in_lanes_of_a_full_ring(
    make: Any, alpha: float
) -> None:
    rb = buffer(make(16, ndim=2), 2000, alpha=alpha, slice_len=2)
    history = History(3, lanes=2, ends=0.35)
    for _ in range(9):
        rb.extend(history.steps(2))
    trajectories = [one for one in history.trajectories(8) if len(one) > 1]
    assert {one[0].lane for one in trajectories} == {0, 1}
    wanted = trajectories[::2]
    assert 1 < len(wanted) < len(trajectories)
    give(rb, {item.number: 1.0 for one in wanted for item in one})
    assert set(drawn(rb, 4)) == slices(wanted, 2)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("others", [0, 100])
def test_where_all_priorities_are_zero_each_slice_is_as_likely_as_any_other(
    eps: float, others: int
) -> None:
    rb = buffer(LazyTensorStorage(9 + others), 20000, slice_len=2, eps=eps)
    rb.extend(episodes(4, 5, *[1] * others))
    give(rb, {})
    sample = rb.sample()
    assert (sample["_weight"] == 1).all()
    found = Counter(cut_up(sample["number"], sample["next", "truncated"]))
    assert len(found) == 7
    assert min(found.values()) > 10000 / 7 * 0.85


def test_without_eps_a_slice_needs_an_item_to_begin_with() -> None:
    rb = buffer(LazyTensorStorage(9), 4, slice_len=2, eps=0.0)
    rb.extend(episodes(4, 5))
    give(rb, {3: 1.0, 8: 1.0})
    with pytest.raises(RuntimeError, match=r"no slice of 2 steps .* all 7 items .* eps is 0"):
        rb.sample()


# -- it is a prioritized sampler -------------------------------------------------------------------


def test_the_prioritized_slice_sampler_is_both_of_its_parents() -> None:
    sampler = PrioritizedSliceSampler(10, 0.7, 0.9, 1e-6, torch.double, "mean", num_slices=2)
    assert isinstance(sampler, SliceSampler)
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.9, 1e-6)
    assert (sampler.dtype, sampler.reduction) == (torch.double, "mean")
    assert sampler.default_priority == 1.0
    assert "num_slices=2" in repr(sampler)
    assert "alpha=0.7" in repr(sampler)


def test_priorities_come_with_the_data_and_with_a_sample(make: Any) -> None:
    rb = buffer(make(12), 200, slice_len=2)
    data = episodes(4, 4)
    data["td_error"] = torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0])
    rb.extend(data)
    assert set(drawn(rb)) == {(2, 3)}
    sample = rb.sample()
    sample["td_error"] = torch.ones(200)
    assert rb.update_tensordict_priority(sample).applied == 200
    rb.update_priority(torch.tensor([2]), 0.0)
    # In the first trajectory only 3 has a priority, where no slice begins; the second has none.
    assert set(drawn(rb)) == {(0, 1), (1, 2), (2, 3)}
    more = episodes(4)
    more["td_error"] = torch.tensor([0.0, 100, 0, 0])
    rb.extend(more.set("number", more["number"] + 8))
    assert (9, 10) in drawn(rb)


def test_a_new_item_has_the_largest_priority_that_was_given() -> None:
    rb = buffer(LazyTensorStorage(12), 4000, slice_len=2)
    rb.extend(episodes(4, 4))
    give(rb, {0: 1.0, 1: 3.0, 2: 0.0}, other=0.0)
    more = episodes(4)
    rb.extend(more.set("number", more["number"] + 8))
    found = drawn(rb)
    assert found[(1, 2)] / found[(0, 1)] == pytest.approx(3, rel=0.3)
    assert found[(8, 9)] / found[(1, 2)] == pytest.approx(1, rel=0.3)


def test_alpha_and_beta_can_be_changed_and_scheduled() -> None:
    rb = buffer(LazyTensorStorage(8), 20000, alpha=0.0, beta=0.0, slice_len=2)
    rb.extend(episodes(3))
    give(rb, {0: 1.0, 1: 4.0})
    found = drawn(rb)
    assert found[(1, 2)] / found[(0, 1)] == pytest.approx(1, rel=0.1)
    rb.sampler.alpha = 1.0
    rb.sampler.beta = 0.5
    sample = rb.sample()
    found = Counter(cut_up(sample["number"], sample["next", "truncated"]))
    assert found[(1, 2)] / found[(0, 1)] == pytest.approx(4, rel=0.1)
    scheduler = LinearScheduler(rb.sampler, "beta", final_value=1.0, num_steps=1)
    scheduler.step()
    assert rb.sampler.beta == 1.0


def test_it_finds_the_priorities_of_the_sampler_before_it() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, 1.0, 1.0), batch_size=200
    )
    rb.extend(episodes(4, 5))
    give(rb, {5: 1.0})
    rb.set_sampler(PrioritizedSliceSampler(9, 1.0, 1.0, slice_len=2))
    assert set(drawn(rb)) == {(5, 6)}


def test_a_state_brings_the_priorities_back() -> None:
    rb = buffer(LazyTensorStorage(9), 200, slice_len=2)
    rb.extend(episodes(4, 5))
    give(rb, {5: 1.0})
    other = buffer(LazyTensorStorage(9), 200, slice_len=2)
    other.extend(episodes(4, 5))
    assert len(drawn(other)) > 1
    other.sampler.load_state_dict(rb.sampler.state_dict())
    assert set(drawn(other)) == {(5, 6)}


def test_a_checkpoint_brings_the_priorities_back(tmp_path: Any) -> None:
    rb = buffer(LazyTensorStorage(9), 200, slice_len=2)
    rb.extend(episodes(4, 5))
    give(rb, {5: 1.0})
    rb.dumps(tmp_path / "checkpoint")
    other = buffer(LazyTensorStorage(9), 200, slice_len=2)
    other.loads(tmp_path / "checkpoint")
    assert set(drawn(other)) == {(5, 6)}


@pytest.mark.parametrize("cls", [ListStorage, ForeignStorage])
def test_a_storage_without_priorities_gets_a_table(cls: Any) -> None:
    rb = buffer(cls(9), 200, slice_len=2)
    rb.extend(episodes(4, 5))
    assert set(drawn(rb)) == {(at, at + 1) for at in range(8) if at != 3}
    rb.update_priority(torch.arange(9), torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 0, 0]))
    assert set(drawn(rb)) == {(6, 7)}


def test_a_second_sampler_on_a_storage_has_priorities_of_its_own() -> None:
    storage = LazyTensorStorage(9)
    one, other = buffer(storage, 200, slice_len=2), buffer(storage, 200, slice_len=2)
    one.extend(episodes(4, 5))
    give(one, {0: 1.0})
    give(other, {4: 1.0})
    assert set(drawn(one)) == {(0, 1)}
    assert set(drawn(other)) == {(4, 5)}


def test_a_seed_decides_the_slices() -> None:
    def first(seed: int, far: float) -> list[int]:
        rb = buffer(
            LazyTensorStorage(30),
            40,
            slice_len=2,
            generator=torch.Generator().manual_seed(seed),
        )
        rb.extend(episodes(10, 10, 10))
        give(rb, {9: far}, other=1.0)
        return rb.sample()["number"].tolist()

    for far in (1.0, 1e9):
        assert first(3, far) == first(3, far)
        assert first(3, far) != first(4, far)


def test_an_emptied_buffer_has_no_slices_and_then_those_that_are_written() -> None:
    rb = buffer(LazyTensorStorage(9), 200, slice_len=2)
    rb.extend(episodes(4, 5))
    rb.sample()
    rb.empty()
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(episodes(3))
    assert set(drawn(rb)) == {(0, 1), (1, 2)}


def test_a_plain_sample_of_the_sampler_has_coordinates_where_there_are_lanes() -> None:
    storage = LazyTensorStorage(12, ndim=2)
    rb = buffer(storage, 4, slice_len=2)
    number = torch.arange(12).view(2, 6)
    done = (number == 2).unsqueeze(-1)
    rb.extend(TensorDict({"number": number, ("next", "done"): done}, [2, 6]))
    index, info = rb.sampler.sample(storage, 40)
    steps, lanes = index
    assert torch.equal(steps[1::2], steps[::2] + 1)
    assert torch.equal(lanes[1::2], lanes[::2])
    assert not ((lanes[::2] == 0) & (steps[::2] == 2)).any()
    assert info["_weight"].shape == (40,)
    assert info["next", "truncated"].shape == (40, 1)


def test_it_can_be_pickled_with_its_buffer(directory: Any) -> None:
    rb = buffer(directory(9), 200, slice_len=2)
    rb.extend(episodes(4, 5))
    give(rb, {5: 1.0})
    other = pickle.loads(pickle.dumps(rb))
    assert set(drawn(other)) == {(5, 6)}
    other.close()


def test_arguments_of_both_are_checked() -> None:
    with pytest.raises(ValueError, match="alpha"):
        PrioritizedSliceSampler(10, -1.0, 1.0, slice_len=2)
    with pytest.raises(ValueError, match="num_slices and slice_len"):
        PrioritizedSliceSampler(10, 1.0, 1.0)
    with pytest.raises(TypeError, match="no variant without replacement"):
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, replacement=False)
    with pytest.raises(TypeError, match="pad_output"):
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, pad_output=True)


def test_the_largest_priority_can_be_that_of_the_stored_items() -> None:
    rb = buffer(LazyTensorStorage(4), 4, slice_len=2, max_priority_within_buffer=True)
    rb.extend(episodes(4))
    give(rb, {0: 100.0, 1: 2.0, 2: 2.0, 3: 2.0})
    rb.add(episodes(1)[0])
    assert rb.sampler.default_priority == 2.0
    assert np.nanmax(ring_of(rb).tree.priorities()) == 2.0
