"""Hindsight in both libraries, when each step's achieved goal is the one after the step.

TorchRL reads goals from the root, shmbuffer from "next"; here both are the same. All items are
consecutive and from one collector, as TorchRL requires.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import described, ours, theirs

STEPS, BATCH = 20, 10


def steps(*lengths: int) -> TensorDict:
    """Makes episodes of these lengths; the last one is open."""
    number = torch.arange(STEPS)
    ends = torch.tensor(lengths).cumsum(0) - 1
    done = torch.isin(number, ends[:-1]).unsqueeze(-1)
    reached = number.unsqueeze(-1) * torch.tensor([1.0, 100.0])
    goal = torch.full((STEPS, 2), -1.0)
    after = {"desired_goal": goal, "achieved_goal": reached, "done": done, "terminated": done}
    return TensorDict(
        {
            "number": number,
            "desired_goal": goal,
            "achieved_goal": reached,
            "next": {**after, "reward": torch.zeros(STEPS, 1)},
        },
        [STEPS],
    )


def reward_fn(rows: Any) -> torch.Tensor:
    distance = (rows["next", "achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True)
    return -(distance > 0).float()


def made(family: Any, storage: str, **options: Any) -> Any:
    rb = family.HERReplayBuffer(
        reward_fn,
        storage=getattr(family, storage)(STEPS),
        sampler=family.SamplerWithoutReplacement(shuffle=False),
        batch_size=BATCH,
        **options,
    )
    rb.extend(steps(4, 6, 7, 3))
    return rb


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.8, 1.0])
def test_rows_with_the_final_goal_of_their_episode_are_the_same(storage: str, ratio: float) -> None:
    samples = []
    for family in (ours, theirs):
        rb = made(family, storage, strategy="final", her_ratio=ratio)
        samples.append([described(rb.sample().exclude("index")) for _ in range(2)])
    assert samples[0] == samples[1]


@pytest.mark.parametrize("strategy", ["future", "episode", "random"])
def test_the_same_goals_can_be_drawn_and_have_the_same_rewards(strategy: str) -> None:
    found = []
    for family in (ours, theirs):
        torch.manual_seed(0)
        rb = made(family, "LazyTensorStorage", strategy=family.HindsightStrategy(strategy))
        seen = set()
        for _ in range(800):
            sample = rb.sample()
            assert torch.equal(sample["desired_goal"], sample["next", "desired_goal"])
            goals, rewards = sample["desired_goal"][:, 0], sample["next", "reward"][:, 0]
            seen.update(
                zip(sample["number"].tolist(), goals.tolist(), rewards.tolist(), strict=True)
            )
        found.append(seen)
    assert found[0] == found[1]


def test_the_strategies_are_the_same() -> None:
    assert [*ours.HindsightStrategy] == [*theirs.HindsightStrategy]
    assert [one.name for one in ours.HindsightStrategy] == [
        one.name for one in theirs.HindsightStrategy
    ]


@pytest.mark.parametrize("options", [{"her_ratio": 1.5}, {"strategy": "past"}])
def test_both_refuse_the_same_arguments(options: dict[str, Any]) -> None:
    for family in (ours, theirs):
        with pytest.raises(ValueError, match=str(*options.values())):
            family.HERReplayBuffer(reward_fn, **options)


@pytest.mark.parametrize("missing", ["desired_goal", ("next", "done")])
def test_both_refuse_items_without_what_they_need(missing: Any) -> None:
    for family in (ours, theirs):
        rb = family.HERReplayBuffer(reward_fn, storage=family.LazyTensorStorage(STEPS))
        rb.extend(steps(20).exclude(missing, ("next", "terminated")))
        with pytest.raises(KeyError):
            rb.sample(4)
