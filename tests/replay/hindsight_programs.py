"""Collectors and learners of the hindsight tests.

Each is a process that runs until it is killed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import HERReplayBuffer, LazyMemmapStorage, TensorDictReplayBuffer

NO_GOAL = -1


def opened(path: Path, capacity: int) -> LazyMemmapStorage:
    return LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)


def length_of(life: Any) -> Any:
    """Returns the number of steps in each episode of a collector's life."""
    return 7 + life % 5


def steps(life: int, first: int, count: int) -> TensorDict:
    """Makes steps of one life of a collector; a goal consists of a life and a step of that life."""
    number = torch.arange(first, first + count)
    of = torch.full((count,), life)
    length = length_of(life)
    after = {
        "at": torch.stack((of, number), -1),
        "reward": torch.zeros(count, 1),
        "done": (number % length == length - 1).unsqueeze(-1),
    }
    goal = torch.full((count, 2), NO_GOAL)
    payload = number[:, None].expand(count, 64).clone()
    return TensorDict(
        {"life": of, "number": number, "goal": goal, "payload": payload, "next": after}, [count]
    )


def collector(path: Path, capacity: int, life: int, connection: Any) -> None:
    """Writes small batches as fast as it can."""
    torch.set_num_threads(1)
    buffer, written, sizes = TensorDictReplayBuffer(storage=opened(path, capacity)), 0, random
    sizes.seed(life)
    while not connection.poll():
        count = sizes.randint(1, 4)
        buffer.extend(steps(life, written, count))
        if not written:
            connection.send("began")
        written += count
    buffer.close()


def learner(path: Path, capacity: int, strategy: str = "future") -> HERReplayBuffer:
    return HERReplayBuffer(
        distance,
        storage=opened(path, capacity),
        batch_size=64,
        her_ratio=0.75,
        strategy=strategy,
        goal_key="goal",
        achieved_goal_key="at",
    )


def distance(rows: Any) -> torch.Tensor:
    reward: torch.Tensor = rows["goal"][:, 1] - rows["number"]
    return reward.float()


def require_right(sample: Any, strategy: str = "future") -> None:
    """Checks that each goal is from the row's own episode and that the derived entries match it."""
    goals, number = sample["goal"], sample["number"]
    assert torch.equal(sample["payload"], number[:, None].expand(-1, 64))
    assert (goals[48:] == NO_GOAL).all()
    life, number, step = sample["life"][:48], number[:48], goals[:48, 1]
    assert torch.equal(goals[:48, 0], life)
    length = length_of(life)
    assert torch.equal(step // length, number // length)
    assert strategy == "episode" or (step >= number).all()
    assert torch.equal(sample["next", "reward"][:48, 0], (step - number).float())
    assert not sample["next", "reward"][48:].any()


def learning(path: Path, capacity: int, rank: int, connection: Any) -> None:
    """Samples as fast as possible; reports the first error and ends."""
    torch.set_num_threads(1)
    buffer, began = learner(path, capacity, "episode"), False
    while not connection.poll():
        require_right(buffer.sample(min_size=1), "episode")
        if not began:
            connection.send("began")
            began = True
