"""Hindsight: which goals rows get, how often, and only from the row's own episode."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    HERReplayBuffer,
    HindsightStrategy,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    Storage,
    TensorDictReplayBuffer,
    TensorStorage,
    attach,
)
from shmbuffer.buffers import hindsight
from shmbuffer.samplers.item_entries import RowEntries
from shmbuffer.storages.movers.tensor_rows import Rows
from tests.kit.rings import ring_of
from tests.replay.conformance import RINGS, Maker, cases
from tests.replay.slice_model import History, Item

pytestmark = pytest.mark.product(few=4)

KEYS = {"goal_key": "goal", "achieved_goal_key": "at"}
STRATEGIES = ("future", "final", "episode", "random")
NO_GOAL = -1


def distance(rows: Any) -> torch.Tensor:
    """A reward that identifies the goal and the row from which it was computed."""
    reward: torch.Tensor = rows["goal"] - rows["number"].unsqueeze(-1)
    return reward.float()


def reached(rows: Any) -> torch.Tensor:
    return torch.eq(rows["next", "at"], rows["goal"])


def buffer(storage: Any, batch_size: int | None = None, **options: Any) -> HERReplayBuffer:
    options = {"reward_fn": distance, **KEYS, **options}
    return HERReplayBuffer(storage=storage, batch_size=batch_size, **options)


def with_goals(data: TensorDict) -> TensorDict:
    """Makes steps with a goal each; the achieved goal is the number of the step."""
    shape, number = data.batch_size, data["number"].unsqueeze(-1)
    data["goal"] = torch.full((*shape, 1), NO_GOAL)
    data["at"] = number + 1_000_000  # not the achieved goal
    data["next", "at"] = number.clone()
    data["next", "reward"] = torch.full((*shape, 1), float("nan"))
    return data


def episodes(*lengths: int, done: bool = True) -> TensorDict:
    """Makes numbered steps of whole episodes; without ``done``, the last episode stays open."""
    ends = torch.cat([torch.arange(length) == length - 1 for length in lengths])
    ends[-1] = done
    data = TensorDict({"number": torch.arange(len(ends))}, [len(ends)])
    data["next"] = TensorDict({"done": ends.unsqueeze(-1)}, [len(ends)])
    return with_goals(data)


def pairs(sample: Any) -> list[tuple[int, int]]:
    """Returns for each row its number and the number of the step whose goal it has."""
    return list(zip(sample["number"].tolist(), sample["goal"].flatten().tolist(), strict=True))


def aims(trajectories: list[list[int]], strategy: str) -> dict[int, list[int]]:
    """Returns the steps whose goal a step may get, all equally likely, by definition."""
    found = {}
    for one in trajectories:
        for at, number in enumerate(one):
            found[number] = {
                "future": one[at:],
                "final": one[-1:],
                "episode": one,
                "random": [other for each in trajectories for other in each],
            }[strategy]
    return found


class Each(Sampler):
    """Draws every item the same number of times, in order."""

    def __init__(self, times: int) -> None:
        self._times = times

    def sample(self, storage: Any, batch_size: int) -> Any:
        return torch.arange(len(storage)).repeat_interleave(self._times), {}


# -- which goals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_step_of_the_strategy_is_exactly_as_likely_as_any_other(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is drawn once for every number modulo 60, so all choices are equally frequent."""
    times = 60  # a multiple of 1 to 6 and of 10, the possible numbers of steps
    numbers = torch.arange(times).repeat(10)
    monkeypatch.setattr(hindsight, "random_numbers", lambda *_: numbers.numpy())
    rb = buffer(LazyTensorStorage(20), strategy=strategy, her_ratio=1.0, sampler=Each(times))
    rb.extend(episodes(1, 6, 3, done=False))
    expected = aims([[0], [1, 2, 3, 4, 5, 6], [7, 8, 9]], strategy)
    assert Counter(pairs(rb.sample(10))) == {
        (number, goal): times / len(goals) for number, goals in expected.items() for goal in goals
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_drawn_as_often_as_their_probabilities_say(strategy: str) -> None:
    rb = buffer(LazyTensorStorage(20), 40_000, strategy=strategy, her_ratio=1.0)
    rb.extend(episodes(1, 6, 3))
    sample = rb.sample()
    counts, rows = Counter(pairs(sample)), Counter(sample["number"].tolist())
    expected = aims([[0], [1, 2, 3, 4, 5, 6], [7, 8, 9]], strategy)
    assert set(counts) == {(number, goal) for number in expected for goal in expected[number]}
    for (number, goal), count in counts.items():
        mean = rows[number] / len(expected[number])
        assert abs(count - mean) < 5 * mean**0.5, (number, goal)  # five standard deviations


@pytest.mark.product(few=8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lanes", [1, 2])
def test_episodes_never_cross_collectors_lanes_holes_and_the_place_where_the_ring_writes(
    tmp_path: Path, strategy: str, seed: int, lanes: int
) -> None:
    def storage() -> LazyMemmapStorage:
        return LazyMemmapStorage(
            16 * lanes, scratch_dir=tmp_path / "buffer", shared_init=True, ndim=min(lanes, 2)
        )

    history = History(seed, lanes=lanes, ends=0.2)
    rb = buffer(storage(), 4000, strategy=strategy, her_ratio=1.0)
    collectors = [TensorDictReplayBuffer(storage=storage()) for _ in range(3)]
    for at in range(14):
        source = (at * 7 + seed) % 3
        collectors[source].extend(with_goals(history.steps(history.chunk(3), source)))
        if at == 9:
            ring = ring_of(collectors[source])
            ring.claims.claim(1)
            ring.claims.abort()
            history.hole(1)
        if at in (4, 13):
            legal = aims([_numbers(one) for one in history.trajectories(16)], strategy)
            found = set(pairs(rb.sample()))
            assert found <= {(number, goal) for number in legal for goal in legal[number]}
            assert {number for number, _ in found} == set(legal)
            assert strategy == "random" or len(found) == sum(map(len, legal.values()))
    for one in (rb, *collectors):
        one.close()


def _numbers(trajectory: list[Item]) -> list[int]:
    return [item.number for item in trajectory]


def test_episodes_never_cross_the_streams_of_a_collector() -> None:
    rb = buffer(LazyTensorStorage(40), 2000, strategy="episode", her_ratio=1.0)
    rb.extend(episodes(40, done=False), streams=[0, 1] * 20)
    found = pairs(rb.sample())
    assert {goal for _, goal in found} == set(range(40))
    assert all(number % 2 == goal % 2 for number, goal in found)


@pytest.mark.parametrize("flag", ["done", "terminated"])
def test_an_episode_ends_where_it_is_done_or_terminated(flag: str) -> None:
    data = episodes(3, 3)
    data["next"].rename_key_("done", flag)
    rb = buffer(LazyTensorStorage(6), 500, strategy="final", her_ratio=1.0)
    rb.extend(data)
    assert set(pairs(rb.sample())) == {(at, 2 if at < 3 else 5) for at in range(6)}


def test_the_next_sample_sees_what_was_written_and_emptied() -> None:
    rb = buffer(LazyTensorStorage(6), 500, strategy="final", her_ratio=1.0)
    rb.extend(episodes(3, done=False))
    assert {goal for _, goal in pairs(rb.sample())} == {2}
    rb.extend(episodes(5)[3:])
    assert {goal for _, goal in pairs(rb.sample())} == {4}
    rb.extend(episodes(3))  # overwrites the first two steps
    assert set(pairs(rb.sample())) == {(0, 2), (1, 2), (2, 2), (2, 4), (3, 4), (4, 4)}
    rb.empty()
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(episodes(2))
    assert {goal for _, goal in pairs(rb.sample())} == {1}


# -- which rows, and what becomes of them ----------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "rows"), [(0.0, 0), (0.05, 0), (0.1, 1), (0.5, 5), (0.8, 8), (0.99, 9), (1.0, 10)]
)
def test_the_first_rows_get_goals_and_the_others_are_as_they_are_stored(
    ratio: float, rows: int
) -> None:
    rb = buffer(LazyTensorStorage(20), 10, her_ratio=ratio)
    rb.extend(episodes(20))
    sample = rb.sample()
    assert (sample["goal"][:rows] >= 0).all()
    assert (sample["goal"][rows:] == NO_GOAL).all()
    assert torch.equal(sample["next", "reward"][:rows], distance(sample)[:rows])
    assert sample["next", "reward"][rows:].isnan().all()


def test_without_rows_for_a_goal_nothing_has_to_say_where_episodes_end() -> None:
    rb = buffer(LazyTensorStorage(4), 4, her_ratio=0.0)
    rb.extend(TensorDict({"number": torch.arange(4)}, [4]))
    assert sorted(rb.sample().keys()) == ["index", "number"]


every_part = pytest.mark.parametrize(
    "maker", cases(writers=("tensordict round robin",)), indirect=True, ids=str
)


@pytest.mark.product
@every_part
@pytest.mark.parametrize("prefetch", [None, 2])
def test_every_storage_and_sampler_has_hindsight_and_nothing_stored_changes(
    maker: Maker, prefetch: int | None
) -> None:
    options = {"reward_fn": distance, **KEYS, "her_ratio": 0.5, "prefetch": prefetch}
    rb = maker.buffer(16, "HERReplayBuffer", batch_size=8, **options)
    data = episodes(5, 3, 8)
    data["episode"] = torch.tensor([0] * 5 + [1] * 3 + [2] * 8)
    rb.extend(data)
    legal = aims([[*range(5)], [*range(5, 8)], [*range(8, 16)]], "future")
    for _ in range(5):
        sample = rb.sample()
        found = pairs(sample)
        half = len(found) // 2
        assert all(goal in legal[number] for number, goal in found[:half])
        assert all(goal == NO_GOAL for _, goal in found[half:])
        assert torch.equal(sample["next", "reward"][:half], distance(sample)[:half])
    stored = rb[torch.arange(16)]
    for key in ("number", "goal", "at", ("next", "at"), ("next", "done")):
        assert torch.equal(stored[key], data[key]), key
    assert stored["next", "reward"].isnan().all()


@pytest.mark.parametrize("kind", RINGS)
def test_a_sample_says_where_its_rows_are_and_takes_priorities_back(
    kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {}
    if kind == "directory":
        options = {"scratch_dir": tmp_path / "buffer", "shared_init": True}
    cls = LazyTensorStorage if kind == "memory" else LazyMemmapStorage
    sampler = PrioritizedSampler(20, 1.0, 1.0, eps=0.0)
    rb = buffer(cls(20, **options), 20, her_ratio=1.0, sampler=sampler)
    rb.extend(episodes(20))
    sample = rb.sample()
    assert torch.equal(sample["index"], sample["number"])
    assert ("index_generation" in sample.keys()) == (kind == "directory")  # noqa: SIM118
    sample["td_error"] = (sample["number"] == 3).float()
    for start in (0, 20):  # all rows, including those that were not drawn
        rb.update_priority(torch.arange(20), (torch.arange(20) == 3).float())
        assert rb.update_tensordict_priority(sample).applied == 20, start
        assert rb.update_priority(sample).applied == 20
    assert set(rb.sample()["number"].tolist()) == {3}
    rb.close()


def test_the_goal_under_next_and_nested_entries_are_set_too() -> None:
    data = episodes(4)
    data["state", "goal"] = data.pop("goal")
    data["next", "state"] = TensorDict({"goal": data["state", "goal"].clone()}, [4])
    data["info", "at"] = data.pop("at")
    data["next", "info"] = TensorDict({"at": data["next"].pop("at")}, [4])
    rb = buffer(
        LazyTensorStorage(4),
        100,
        strategy="final",
        her_ratio=1.0,
        reward_fn=lambda rows: rows["state", "goal"],
        goal_key=("state", "goal"),
        achieved_goal_key=("info", "at"),
    )
    rb.extend(data)
    sample = rb.sample()
    for key in (("state", "goal"), ("next", "state", "goal"), ("next", "reward")):
        assert (sample[key] == 3).all()
    named = buffer(
        rb.storage,
        10,
        strategy="final",
        reward_fn=lambda rows: rows["state", "goal"],
        goal_key=("state", "goal"),
        achieved_goal_key=("next", "info", "at"),
        her_ratio=1.0,
    )
    assert (named.sample()["state", "goal"] == 3).all()


def test_items_without_next_have_hindsight_too() -> None:
    data = episodes(3, 4).flatten_keys("_")
    keys = {"achieved_goal_key": "next_at", "reward_key": "next_reward", "end_key": "next_done"}
    rb = buffer(LazyTensorStorage(7), 100, strategy="final", her_ratio=1.0, **keys)
    rb.extend(data)
    sample = rb.sample()
    assert set(pairs(sample)) == {(at, 2 if at < 3 else 6) for at in range(7)}
    assert torch.equal(sample["next_reward"], distance(sample))


@pytest.mark.parametrize("shape", [[-1], [-1, 1]])
@pytest.mark.parametrize("stored", [[4], [4, 1]])
def test_rewards_may_come_with_or_without_the_last_dimension(
    shape: list[int], stored: list[int]
) -> None:
    data = episodes(4)
    data["next", "reward"] = data["next", "reward"].reshape(stored)
    rb = buffer(
        LazyTensorStorage(4),
        100,
        her_ratio=1.0,
        reward_fn=lambda rows: distance(rows).reshape(shape),
    )
    rb.extend(data)
    sample = rb.sample()
    assert torch.equal(sample["next", "reward"].flatten(), distance(sample).flatten())


def test_the_reward_function_sees_the_rows_with_new_goals_and_no_others() -> None:
    seen = []

    def reward_fn(rows: Any) -> torch.Tensor:
        seen.append((type(rows), pairs(rows), "index" in rows.keys()))  # noqa: SIM118
        return distance(rows)

    rb = buffer(LazyTensorStorage(20), 10, reward_fn=reward_fn)
    rb.extend(episodes(20))
    sample = rb.sample()
    assert seen == [(TensorDict, pairs(sample)[:8], False)]


def test_transforms_see_the_new_goals() -> None:
    class Beside:
        """A module that concatenates the observation and the goal."""

        def __call__(self, data: Any) -> Any:
            return data.set("input", torch.cat((data["number"].unsqueeze(-1), data["goal"]), -1))

    rb = buffer(LazyTensorStorage(20), 10, transform=Beside())
    rb.extend(episodes(20))
    sample = rb.sample()
    assert torch.equal(sample["input"][:, 1:], sample["goal"])
    assert (sample["input"][:8, 1] >= 0).all()


FLAGS = {  # terminated, truncated
    "goes on": (False, False),
    "was terminated": (True, False),
    "was cut off": (False, True),
    "both": (True, True),
}


@pytest.mark.parametrize("kept", ["all", "no truncated", "no terminated", "done alone"])
def test_a_step_is_terminated_where_the_new_goal_ends_the_episode_and_stays_cut_off(
    kept: str,
) -> None:
    terminated, truncated = torch.tensor([*FLAGS.values()]).unsqueeze(-1).unbind(1)
    data = with_goals(TensorDict({"number": torch.arange(4)}, [4]))
    data["next", "done"] = terminated | truncated
    if kept in ("all", "no truncated"):
        data["next", "terminated"] = terminated
    if kept in ("all", "no terminated"):
        data["next", "truncated"] = truncated
    for ends in (True, False):
        rb = buffer(
            LazyTensorStorage(4),
            her_ratio=1.0,
            sampler=Each(1),
            strategy="random",
            terminated_fn=lambda rows, ends=ends: torch.full((len(rows),), ends),
        )
        rb.extend(data)
        after = rb.sample(4)["next"]
        cut_off = {
            "all": truncated,
            "no terminated": truncated,
            "no truncated": truncated & ~terminated,
            "done alone": torch.zeros_like(truncated),
        }[kept]
        assert torch.equal(after["done"], cut_off | ends)
        if "terminated" in after.keys():  # noqa: SIM118
            assert (after["terminated"] == ends).all()
        if "truncated" in after.keys():  # noqa: SIM118
            assert torch.equal(after["truncated"], truncated)


def test_without_a_terminated_fn_flags_are_as_they_are_stored() -> None:
    rb = buffer(LazyTensorStorage(4), her_ratio=1.0, sampler=Each(1), strategy="random")
    rb.extend(data := episodes(2, 2))
    assert torch.equal(rb.sample(4)["next", "done"], data["next", "done"])


def test_slices_end_where_they_end_and_are_terminated_where_the_new_goal_is_reached() -> None:
    data = episodes(6)
    data["next", "terminated"] = data["next", "done"].clone()
    rb = buffer(
        LazyTensorStorage(6),
        12,
        her_ratio=1.0,
        sampler=SliceSampler(slice_len=3),
        terminated_fn=reached,
    )
    rb.extend(data)
    sample = rb.sample()
    assert torch.equal(sample["next", "terminated"], reached(sample))
    last = torch.tensor([False, False, True] * 4).unsqueeze(-1)
    assert torch.equal(sample["next", "truncated"], last)
    assert torch.equal(sample["next", "done"], last | reached(sample))
    assert reached(sample).any()


# -- who draws, and from what ----------------------------------------------------------------------


def goals_of(rb: Any, batches: int = 3) -> list[tuple[int, int]]:
    return [pair for _ in range(batches) for pair in pairs(rb.sample())]


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_the_generator_decides_rows_and_goals_and_torchs_own_is_left_alone(sampler: Any) -> None:
    found = []
    for seed, prefetch in [(0, None), (0, None), (0, 3), (1, None)]:
        generator = torch.Generator().manual_seed(seed)
        rb = buffer(
            LazyTensorStorage(40), 20, generator=generator, prefetch=prefetch, sampler=sampler()
        )
        rb.extend(episodes(40))
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append(goals_of(rb))
        assert torch.equal(torch.get_rng_state(), before)
        rb.close()
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]


def test_learners_of_one_copy_each_have_goals_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "buffer"

    def learner(**options: Any) -> HERReplayBuffer:
        storage = LazyMemmapStorage(40, scratch_dir=path, shared_init=True)
        return buffer(storage, 20, her_ratio=1.0, **options)

    with TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=path)) as writer:
        writer.extend(episodes(40))
        by_rank = []
        for rank in (0, 1, 2, 1):
            torch.manual_seed(0)
            with learner(rank=rank, sampler=Each(1)) as rb:  # only the goals may differ
                by_rank.append(goals_of(rb))
        assert by_rank[1] == by_rank[3]
        assert len({tuple(found) for found in by_rank}) == 3
        with (
            learner(strategy="final") as last,
            learner(strategy="episode", reward_fn=lambda rows: -distance(rows)) as any_of,
        ):
            sample, other = last.sample(), any_of.sample()
            assert set(sample["goal"].flatten().tolist()) == {39}
            assert len(set(other["goal"].flatten().tolist())) > 5
            assert torch.equal(other["next", "reward"], -distance(other))
        with attach(path) as plain:
            assert type(plain) is TensorDictReplayBuffer
            assert (plain.sample(20)["goal"] == NO_GOAL).all()


class Overtaken(RandomSampler):
    """A sampler with which other writers overwrite items between its first draws and the read."""

    def __init__(self, others: Any, times: int, step: int) -> None:
        super().__init__()
        self.others, self.times, self.written = others, times, step

    def sample(self, storage: Any, batch_size: int) -> Any:
        found = super().sample(storage, batch_size)
        if self.times:
            self.times -= 1
            self.others.extend(numbered(self.written, 6))
            self.written += 6
        return found


def numbered(first: int, count: int) -> TensorDict:
    """Makes numbered steps from ``first`` on; an episode ends at every third step."""
    data = episodes(*[3] * ((count + 2) // 3))[:count]
    for key in ("number", "at", ("next", "at")):
        data[key] = data[key] + first
    return data


@pytest.mark.parametrize("times", [1, 3])
def test_rows_that_are_written_over_before_they_are_read_are_drawn_again(
    directory: Any, times: int
) -> None:
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(numbered(0, 6))
    sampler = Overtaken(others, times, 6)
    rb = buffer(directory(6), 12, sampler=sampler, her_ratio=1.0)
    sample = rb.sample()
    assert torch.equal(sample["index_generation"], sample["number"])
    for number, goal in pairs(sample):
        assert number >= 6 * times
        assert number <= goal < 3 * (number // 3 + 1)


def test_a_row_that_another_item_has_taken_the_place_of_gets_no_goal_of_that(
    directory: Any,
) -> None:
    """The sampler has the ticket of the earlier item, whose slot holds another item since."""
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(numbered(0, 6))

    class Late(Overtaken):
        def _again(self, storage: Any, index: Any) -> Any:
            asked.append(index)
            return super()._again(storage, index)

    asked: list[Any] = []
    rb = buffer(directory(6), 12, sampler=Late(others, 2, 6), her_ratio=1.0)
    sample = rb.sample()
    assert len(asked) == 2
    assert torch.equal(sample["index_generation"], sample["number"])


def test_a_goal_that_is_written_over_while_it_is_copied_is_not_taken(
    directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step with the goal is older than its row, and the row stays where it is."""

    class Newest(Sampler):
        def sample(self, storage: Any, batch_size: int) -> Any:
            return torch.full((batch_size,), 5), {}

    others = TensorDictReplayBuffer(storage=directory(6))
    rb = buffer(directory(6), 4, strategy="episode", her_ratio=1.0, sampler=Newest())
    others.extend(numbered(0, 6))
    monkeypatch.setattr(hindsight, "random_numbers", lambda *_: np.zeros(4, np.int64))
    assert set(pairs(rb.sample())) == {(5, 3)}
    take, writes = RowEntries.take, [numbered(6, 4)]  # reaches the slot of step 3

    def overtaken(self: Any, path: Any, elements: Any) -> Any:
        if writes:
            others.extend(writes.pop())
        return take(self, path, elements)

    monkeypatch.setattr(RowEntries, "take", overtaken)
    assert set(pairs(rb.sample())) == {(5, 4)}
    assert not writes


def test_it_gives_up_where_others_write_faster_than_it_reads(directory: Any) -> None:
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(numbered(0, 6))
    rb = buffer(directory(6), 12, sampler=Overtaken(others, 10**9, 6))
    with pytest.raises(RuntimeError, match="each of 16 attempts; use a larger buffer"):
        rb.sample()


def test_only_the_goals_are_read_beside_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = buffer(LazyTensorStorage(100), 10)
    rb.extend(episodes(100))
    rb.sample()
    read: list[Any] = []
    for cls, name in ((RowEntries, "take"), (type(rb.storage.mover()), "read")):  # type: ignore[attr-defined]
        method = getattr(cls, name)

        def noted(self: Any, *args: Any, method: Any = method, name: str = name) -> Any:
            read.append((name, *args[:-1], len(args[-1])))
            return method(self, *args)

        monkeypatch.setattr(cls, name, noted)
    rb.sample()
    assert issubclass(type(rb.storage.mover()), Rows)  # type: ignore[attr-defined]
    assert read == [("take", ("next", "at"), 8), ("read", 10)]


def test_flags_are_looked_at_once_a_write(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at, looks = RowEntries.at, []
    monkeypatch.setattr(RowEntries, "at", lambda *args: looks.append(1) or at(*args))
    rb, data = buffer(make(40), 10), episodes(20)
    data["next", "done"] = data["next", "done"].float()  # the core reads integers
    for start in (0, 10):
        rb.extend(data[start : start + 10])
        for _ in range(3):
            rb.sample()
        assert len(looks) == 1
        looks.clear()


# -- what is refused, and the rest -----------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_from_0_to_1(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"her_ratio must be from 0 to 1 .* got {ratio}"):
        buffer(LazyTensorStorage(4), her_ratio=ratio)


def test_a_strategy_is_named_or_given() -> None:
    assert buffer(LazyTensorStorage(4)).strategy is HindsightStrategy.FUTURE
    given = buffer(LazyTensorStorage(4), strategy=HindsightStrategy.EPISODE)
    assert given.strategy == "episode"
    with pytest.raises(ValueError, match="'past' is not a valid HindsightStrategy"):
        buffer(LazyTensorStorage(4), strategy="past")


@pytest.mark.parametrize(
    ("missing", "argument"),
    [
        ("goal", "goal_key"),
        (("next", "at"), "achieved_goal_key"),
        (("next", "reward"), "reward_key"),
    ],
)
def test_an_entry_that_is_missing_is_named_with_its_argument(missing: Any, argument: str) -> None:
    rb = buffer(LazyTensorStorage(4), 4, reward_fn=reached if missing != "goal" else distance)
    rb.extend(episodes(4).exclude(missing))
    with pytest.raises(KeyError) as caught:
        rb.sample()
    assert f"needs the entry {missing!r}, which the items do not have" in caught.value.args[0]
    assert caught.value.args[0].endswith(f"or pass the key of another entry as {argument}")


def test_items_that_do_not_say_where_episodes_end_are_refused() -> None:
    rb = buffer(LazyTensorStorage(4), 4)
    rb.extend(episodes(4).exclude(("next", "done")))
    with pytest.raises(KeyError, match=r"end_keys \('next', 'done'\), \('next', 'terminated'\)"):
        rb.sample()


@pytest.mark.parametrize("which", ["reward_fn", "terminated_fn", "goal"])
def test_what_does_not_fit_its_entry_is_refused(which: str) -> None:
    options = {which: lambda rows: torch.zeros(len(rows), 2)} if which != "goal" else {}
    rb = buffer(LazyTensorStorage(4), 4, her_ratio=1.0, **options)
    data = episodes(4)
    if which == "goal":
        data["goal"] = torch.zeros(4, 3)
    rb.extend(data)
    with pytest.raises(ValueError, match=r"the shape \[4, \d\] of the rows, got \[4, \d\]"):
        rb.sample()


@pytest.mark.parametrize("answer", [None, np.zeros(4, np.float32)], ids=["None", "array"])
def test_an_answer_that_is_no_tensor_is_refused(answer: Any) -> None:
    rb = buffer(LazyTensorStorage(4), 4, her_ratio=1.0, reward_fn=lambda rows: answer)
    rb.extend(episodes(4))
    with pytest.raises(TypeError, match=f"tensor, got a {type(answer).__name__}"):
        rb.sample()


def test_a_queue_and_out_cannot_be_had_with_it() -> None:
    rb = buffer(LazyMemmapStorage(8), 4, rate_limiter=RateLimiter(max_times_sampled=1))
    rb.extend(episodes(8))
    with pytest.raises(ValueError, match="cannot be combined with hindsight"):
        rb.sample()
    rb = buffer(LazyTensorStorage(8), 4)
    rb.extend(episodes(8))
    with pytest.raises(ValueError, match="only supported if one native call can make the sample"):
        rb.sample(out=rb.sample())
    assert "sample: by parts: hindsight also chooses items" in repr(rb.plan)


def test_it_says_what_it_does() -> None:
    said = repr(buffer(LazyTensorStorage(4), strategy="final", her_ratio=0.5))
    assert said.startswith("HERReplayBuffer(\n    strategy='final', her_ratio=0.5,\n    storage=")


def test_a_buffer_can_be_pickled(directory: Any) -> None:
    rb = buffer(directory(8), 8, strategy="final")
    rb.extend(episodes(8))
    rb.sample()
    with pickle.loads(pickle.dumps(rb)) as copy:
        assert {goal for _, goal in pairs(copy.sample())} == {7, NO_GOAL}


def test_a_save_keeps_what_is_stored_and_where_the_draws_are(tmp_path: Path) -> None:
    made = [
        buffer(LazyTensorStorage(40), 20, generator=torch.Generator(), her_ratio=1.0)
        for _ in range(2)
    ]
    made[0].extend(episodes(10, 30))
    made[0].sample()
    made[0].dumps(tmp_path / "save")
    made[1].loads(tmp_path / "save")
    assert goals_of(made[0]) == goals_of(made[1])
    made[1].load_state_dict(made[0].state_dict())
    assert goals_of(made[0]) == goals_of(made[1])


def test_a_foreign_storage_needs_get_set_and_a_length() -> None:
    class Foreign(Storage):
        def __init__(self) -> None:
            super().__init__(10)
            self.items = TensorDict({}, [0])

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            self.items = data.clone()

        def get(self, index: Any) -> Any:
            return self.items[index]

        def __len__(self) -> int:
            return len(self.items)

    rb = buffer(Foreign(), 100, strategy="final", her_ratio=1.0)
    rb.extend(data := episodes(3, 4))
    assert set(pairs(rb.sample())) == {(at, 2 if at < 3 else 6) for at in range(7)}
    assert torch.equal(rb[:]["goal"], data["goal"])


def test_the_callers_tensors_have_hindsight_too() -> None:
    data = episodes(3, 4)
    rb = buffer(TensorStorage(data.clone()), 100, strategy="final", her_ratio=1.0)
    rb.extend(data)
    assert set(pairs(rb.sample())) == {(at, 2 if at < 3 else 6) for at in range(7)}
    assert (rb[:]["goal"] == NO_GOAL).all()
