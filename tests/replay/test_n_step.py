"""N-step transitions that are computed at the draw equal transitions that were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    Recorder,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of
from tests.replay.slice_model import History, Item

pytestmark = pytest.mark.product(few=4)

GAMMA = 0.5


def steps(count: int, ends: tuple[int, ...] = (), cuts: tuple[int, ...] = ()) -> TensorDict:
    """Makes steps 0, 1, ... with reward 2 ** step that end at ``ends`` and are cut at ``cuts``."""
    number = torch.arange(count)
    terminated, truncated = (torch.isin(number, torch.tensor(at)) for at in (ends, cuts))
    after = {
        "obs": number + 1,
        "reward": 2.0**number,
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    return TensorDict({"obs": number, "next": TensorDict(after, [count])}, [count])


def buffer(storage: Any, unit: NStep, **kwargs: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, sample_unit=unit, **kwargs)


def transitions(sample: TensorDict) -> set[tuple[Any, ...]]:
    """Returns both observations, reward, gamma, steps and the three flags of each row."""
    after = sample["next"]
    columns = (
        *(sample["obs"], after["obs"], after["reward"], sample["gamma"]),
        *(sample["steps_to_next_obs"], after["terminated"], after["truncated"], after["done"]),
    )
    return set(zip(*(column.tolist() for column in columns), strict=True))


# -- which transitions there are -------------------------------------------------------------------


def test_ends_of_episodes_of_the_buffer_and_of_the_ring_make_transitions_shorter() -> None:
    rb = buffer(LazyTensorStorage(9), NStep(3, GAMMA))
    rb.extend(steps(11, ends=(4,), cuts=(7,)))  # 0 and 1 have been overwritten
    no, yes = False, True
    assert transitions(rb.sample(400)) == {
        (2, 5, 4 + 4 + 4, 0.125, 3, yes, no, yes),
        (3, 5, 8 + 8, 0.25, 2, yes, no, yes),
        (4, 5, 16, 0.5, 1, yes, no, yes),
        (5, 8, 3 * 32, 0.125, 3, no, yes, yes),
        (6, 8, 2 * 64, 0.25, 2, no, yes, yes),
        (7, 8, 128, 0.5, 1, no, yes, yes),
        (8, 11, 3 * 256, 0.125, 3, no, no, no),
        (9, 11, 2 * 512, 0.25, 2, no, no, no),
        (10, 11, 1024, 0.5, 1, no, no, no),
    }


def test_one_step_is_what_is_stored() -> None:
    rb = buffer(LazyTensorStorage(8), NStep(1, GAMMA))
    rb.extend(steps(8, ends=(3,)))
    sample = rb.sample(50)
    stored = rb.storage.get(sample["index"])
    for key in ("obs", "reward", "done"):
        assert torch.equal(sample["next", key], stored["next", key])
    assert (sample["gamma"] == GAMMA).all()


def test_the_newest_step_of_an_open_episode_is_found_with_more_steps_later() -> None:
    rb = buffer(LazyTensorStorage(8), NStep(2, GAMMA, done_key=("next", "done")))
    data = steps(8)
    rb.extend(data[:3])
    assert (2, 3, 4.0, 0.5, 1) in {one[:5] for one in transitions(rb.sample(100))}
    rb.extend(data[3:])
    assert (2, 4, 4.0 + 4.0, 0.25, 2) in {one[:5] for one in transitions(rb.sample(100))}


def test_without_a_flag_nothing_but_the_newest_step_ends_a_transition() -> None:
    rb = buffer(LazyTensorStorage(8), NStep(3, GAMMA, done_key=None))
    rb.extend(steps(8, ends=(3,)))
    assert (2, 5, 12.0, 0.125, 3) in {one[:5] for one in transitions(rb.sample(200))}


def expected(one: list[Item], at: int, n: int) -> tuple[int, float, float, bool]:
    """Returns the last number, reward, gamma and done of the transition from a step."""
    of = one[at : at + n]
    reward = sum(GAMMA**k * (item.number % 8) for k, item in enumerate(of))
    return of[-1].number, reward, GAMMA ** len(of), of[-1].done


@pytest.mark.product("make n")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_transition_is_that_of_the_definition(
    make: Any, n: int, lanes: int, seed: int
) -> None:
    history, capacity = History(seed, lanes=lanes), 14 + seed
    storage = make(capacity * lanes, ndim=min(lanes, 2))
    rb = buffer(storage, NStep(n, GAMMA, reward_key=("next", "r")), batch_size=60)
    for written in (capacity // 2, 3 * capacity + seed):
        while len(history.rows) < written:
            data = history.steps(min(history.chunk(5), written - len(history.rows)))
            data["next", "r"] = (data["number"] % 8).float()
            data["next", "number"] = data["number"].clone()
            rb.extend(data)
        found = {
            item.number: expected(one, at, n)
            for one in history.trajectories(capacity)
            for at, item in enumerate(one)
        }
        sample = rb.sample()
        after = sample["next"]
        columns = (after["number"], after["r"], sample["gamma"], after["done"].squeeze(-1))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, row in zip(sample["number"].tolist(), rows, strict=True):
            assert row == found[number]


def test_collectors_and_streams_are_never_summed_together(directory: Any) -> None:
    rb = buffer(directory(24), NStep(3, 1.0), batch_size=100)
    collectors = [TensorDictReplayBuffer(storage=directory(24)) for _ in range(2)]
    for _ in range(10):
        for who, collector in enumerate(collectors):
            reward = 10.0 ** torch.tensor([2 * who, 2 * who + 1])
            after = TensorDict({"reward": reward, "done": reward < 0}, [2])
            data = TensorDict({"obs": reward.clone(), "next": after}, [2])
            collector.extend(data, streams=[0, 1])
    sample = rb.sample()
    assert torch.equal(sample["next", "reward"], sample["obs"] * sample["steps_to_next_obs"])
    assert set(sample["steps_to_next_obs"].tolist()) == {1, 2, 3}


# -- the same as written so ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_it_is_what_the_recorder_writes(tmp_path: Path, n: int) -> None:
    """Two environments have episodes of 1 to 6 steps: terminated, truncated, and one left open."""
    opened = {
        name: TensorDictReplayBuffer(
            storage=LazyMemmapStorage(200, scratch_dir=tmp_path / name, shared_init=True), **how
        )
        for name, how in {
            "at once": {},
            "at the draw": {"sample_unit": NStep(n, 0.9)},
        }.items()
    }
    recorders = [
        Recorder(opened["at once"], 2, n_step=n, gamma=0.9),
        Recorder(opened["at the draw"], 2, n_step=1, gamma=0.9),
    ]
    draw = np.random.default_rng(0)
    for recorder in recorders:
        recorder.reset(np.array([[0.0, 0.0], [1.0, 0.0]], np.float32))
    done = np.zeros(2, np.bool_)
    for step in range(1, 60):
        obs = np.array([[0.0, step], [1.0, step]], np.float32)
        if done.any():
            for recorder in recorders:
                recorder.reset(obs - np.float32(0.5), done)
        reward = draw.normal(size=2).astype(np.float32)
        ends, cuts = draw.random(2) < 0.2, draw.random(2) < 0.1
        given = (obs, np.array([step, -step]), reward, ends, cuts)
        for recorder in recorders:
            recorder.step(*given)
        done = ends | cuts
    for recorder in recorders:
        recorder.close()
    written = opened["at once"][:]
    by_name = {tuple(row.tolist()): at for at, row in enumerate(written["observation"])}
    assert len(by_name) == len(written) == len(opened["at the draw"])
    sample = opened["at the draw"].sample(2_000)
    same = written[[by_name[tuple(row.tolist())] for row in sample["observation"]]]
    assert len(set(sample["index"].tolist())) == len(written)
    for key in ("observation", "action", "policy_version", "gamma"):
        assert torch.equal(sample[key], same[key]), key
    for key in ("observation", "reward", "terminated", "truncated", "done"):
        assert torch.equal(sample["next", key], same["next", key]), key
    for one in opened.values():
        one.close()


# -- what a sample is ------------------------------------------------------------------------------


def test_index_weights_and_priorities_are_those_of_the_first_step(directory: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=directory(10), sample_unit=NStep(3, GAMMA)
    )
    index = rb.extend(steps(10, ends=(4,)))
    rb.update_priority(index, 1.0 + index)
    sample, info = rb.sample(30, return_info=True)
    assert torch.equal(sample["index"], sample["obs"])
    assert torch.equal(sample["index_generation"], sample["obs"])
    assert torch.allclose(sample["_weight"], 1 / (1.0 + sample["obs"]))
    assert set(info) == {"index", "index_generation", "_weight", "priority_weight"}
    sample["td_error"] = 100.0 + sample["obs"]
    rb.update_tensordict_priority(sample)
    tree = ring_of(rb).tree
    for number in sample["obs"].tolist():
        assert tree.priorities(np.array([number])) == 100 + number


def test_lanes_have_coordinates_and_rewards_their_shape_and_dtype() -> None:
    rb = buffer(LazyTensorStorage(20, ndim=2), NStep(2, GAMMA), batch_size=6)
    data = torch.stack([steps(10), steps(10)])
    data["next", "reward"] = torch.ones(2, 10, 3, dtype=torch.float64)
    rb.extend(data)
    sample = rb.sample()
    assert sample["index"].shape == (6, 2)
    assert torch.equal(sample["index"][:, 0], sample["obs"])
    assert sample["next", "reward"].shape == sample["gamma"].shape == (6, 3)
    assert sample["next", "reward"].dtype == sample["gamma"].dtype == torch.float64
    assert sample["steps_to_next_obs"].dtype == torch.int64
    whole = buffer(LazyTensorStorage(10), NStep(2, GAMMA))
    counted = steps(10)
    counted["next", "reward"] = torch.ones(10, dtype=torch.int64)
    whole.extend(counted)
    assert set(whole.sample(50)["next", "reward"].tolist()) == {1.5, 1.0}


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_nothing_that_is_stored_changes_in_any_storage(storage: Any) -> None:
    rb = buffer(storage(10), NStep(3, GAMMA))
    data = steps(10, ends=(4,))
    data["gamma"] = torch.full((10,), 0.75)
    rb.extend(data)
    sample = rb.sample(40)
    found = {one[:4] for one in transitions(torch.stack(list(sample.unbind(0))))}
    assert (2, 5, 12.0, 0.125) in found
    now = rb[:]
    now = now if isinstance(now, TensorDict) else torch.stack(list(now))
    for key in ("obs", "gamma", ("next", "obs"), ("next", "reward")):
        assert torch.equal(now.get(key), data.get(key))


def test_a_plain_buffer_gives_dicts_and_a_tensorclass_stays_one() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=NStep(2, GAMMA), batch_size=50)
    rb.extend(steps(10).to_dict())
    sample = rb.sample()
    assert torch.equal(sample["next"]["obs"], sample["obs"] + sample["steps_to_next_obs"])
    typed = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=NStep(2, GAMMA), batch_size=50)
    data = steps(10)
    typed.extend(Step(obs=data["obs"], next=data["next"], batch_size=[10]))
    found, info = typed.sample(return_info=True)
    assert isinstance(found, Step)
    assert torch.equal(found.next["obs"], found.obs + info["steps_to_next_obs"])
    assert set(info["gamma"].tolist()) == {0.25, 0.5}


@tensorclass  # type: ignore[misc, unused-ignore]
class Step:
    """A step, as a tensorclass."""

    obs: torch.Tensor
    next: TensorDict


@pytest.mark.product(few=1)
def test_the_same_seed_gives_the_same_transitions_ahead_and_by_any_sampler(make: Any) -> None:
    for sampler in (None, lambda: PrioritizedSampler(20, 0.7, 0.9)):
        batches = []
        for prefetch in (None, 3):
            generator = torch.Generator().manual_seed(5)
            rb = buffer(
                make(20), NStep(3, GAMMA), sampler=sampler, batch_size=4,
                prefetch=prefetch, generator=generator,
            )  # fmt: skip
            rb.extend(steps(20, ends=(7,)))
            batches.append([transitions(rb.sample()) for _ in range(6)])
        assert batches[0] == batches[1]


def test_transforms_see_the_transition() -> None:
    rb = buffer(
        LazyTensorStorage(10),
        NStep(2, GAMMA),
        transform=lambda data: data.set("target", data["next", "reward"] + data["gamma"]),
    )
    rb.extend(steps(10))
    sample = rb.sample(5)
    assert torch.equal(sample["target"], sample["next", "reward"] + sample["gamma"])


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "gamma": 0.9}, "n must be at least 1, got 0"),
        ({"n": 2, "gamma": 1.1}, "gamma must be from 0 to 1, got 1.1"),
        ({"n": 2, "gamma": 0.9, "reward_key": "reward"}, r"such as \('next', 'reward'\), got 'rew"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NStep(**arguments)


def test_items_without_a_reward_are_refused() -> None:
    rb = buffer(LazyTensorStorage(10), NStep(2, GAMMA, reward_key=("next", "r")))
    rb.extend(steps(10))
    with pytest.raises(KeyError, match=r"no entry \('next', 'r'\); pass the name of the reward"):
        rb.sample(3)
    assert repr(NStep(2, GAMMA)) == "NStep(n=2, gamma=0.5)"
