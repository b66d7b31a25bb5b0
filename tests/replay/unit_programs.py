"""Collectors and learners of the sample unit tests.

Each is a process that runs until it is killed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import (
    FrameStack,
    LazyMemmapStorage,
    NStep,
    SampleUnit,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
)

ENVS, WIDTH = 2, 64
PAUSE_S = 0.0005  # leaves time for the other processes on a machine with few cores
UNITS: dict[str, Callable[[], SampleUnit]] = {
    "windows": lambda: Sequence(3, burn_in=2, bootstrap=1, eta=0.9),
    "stopping windows": lambda: Sequence(4, "stop", dilation=2),
    "n steps": lambda: NStep(4, 0.5),
    "stacks": lambda: FrameStack(3, keys=("payload", "number")),
}


def opened(path: Path, capacity: int, unit: SampleUnit | None = None) -> Any:
    storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage, batch_size=32, sample_unit=unit
    )


def length_of(life: Any, env: Any) -> Any:
    """Returns the number of steps in each episode of an environment, in a collector's life."""
    return 5 + (life + env) % 4


def steps(life: int, numbers: list[int]) -> TensorDict:
    """Makes the next step of some environments of a collector's life; ``numbers`` counts them."""
    count = len(numbers)
    number, env = torch.tensor(numbers), torch.arange(count) % ENVS
    of, length = torch.full((count,), life), length_of(life, env)
    after = {
        "number": number + 1,
        "reward": number.double(),
        "done": (number % length == length - 1).unsqueeze(-1),
    }
    payload = number[:, None].expand(count, WIDTH).clone()
    return TensorDict(
        {"life": of, "env": env, "number": number, "payload": payload, "next": after}, [count]
    )


def collector(path: Path, capacity: int, life: int, connection: Any) -> None:
    """Writes a few steps of both of its environments at a time, almost as fast as it can."""
    torch.set_num_threads(1)
    buffer, written, sizes = opened(path, capacity), 0, random.Random(life)
    while not connection.poll():
        count = sizes.randint(1, 3)
        numbers = [written + at for at in range(count) for _ in range(ENVS)]
        buffer.extend(steps(life, numbers), streams=[0, 1] * count)
        if not written:
            connection.send("began")
        written += count
        time.sleep(PAUSE_S)
    buffer.close()


def learning(path: Path, capacity: int, which: int, connection: Any) -> None:
    """Samples and updates priorities; reports the first error and ends."""
    torch.set_num_threads(1)
    unit = list(UNITS.values())[which % len(UNITS)]()
    buffer, began = opened(path, capacity, unit), False
    while not connection.poll():
        learn(buffer, unit, buffer.sample(min_size=1))
        if not began:
            connection.send("began")
            began = True
        time.sleep(PAUSE_S)


def learn(buffer: Any, unit: SampleUnit, sample: Any) -> None:
    """Checks a sample and updates its priorities."""
    require_right(unit, sample)
    sample["td_error"] = torch.rand(len(sample)) + 0.1
    buffer.update_tensordict_priority(sample)


def require_right(unit: SampleUnit, sample: Any) -> None:
    """Checks that a sample is complete, from one life and environment, and right."""
    if isinstance(unit, FrameStack):
        require_right_stacks(sample)
        return
    number, life, env = sample["number"], sample["life"], sample["env"]
    assert torch.equal(sample["payload"], number[:, None].expand(-1, WIDTH))
    length = length_of(life, env)
    done = number % length == length - 1
    if isinstance(unit, NStep):
        count = sample["steps_to_next_obs"]
        assert ((count >= 1) & (count <= unit.n)).all()
        assert torch.equal(sample["next", "number"], number + count)
        last = number + count - 1
        assert torch.equal(last // length, number // length)  # of one episode
        assert torch.equal(sample["next", "done"].squeeze(-1), last % length == length - 1)
        k = torch.arange(unit.n)
        rewards = torch.where(k < count[:, None], 0.5**k * (number[:, None] + k), 0.0).sum(1)
        assert torch.equal(sample["next", "reward"], rewards)
        assert torch.equal(sample["gamma"], 0.5 ** count.double())
        return
    assert isinstance(unit, Sequence)
    total = unit.burn_in + unit.length + unit.bootstrap
    number, life, env, done, valid, length = (
        one.view(-1, total) for one in (number, life, env, done, sample["validity_mask"], length)
    )
    assert (life == life[:, :1]).all()
    assert (env == env[:, :1]).all()
    assert torch.equal(number // length, (number // length)[:, :1].expand(-1, total))
    follow = valid[:, 1:] & valid[:, :-1]
    assert (number.diff(dim=1) == unit.dilation)[follow].all()
    assert (number.diff(dim=1) >= 0).all()
    assert valid[:, unit.burn_in].all()
    assert not (done[:, :-1] & follow).any()


def require_right_stacks(sample: Any) -> None:
    """Checks that stacks are of one episode of one life and begin with its first or oldest step."""
    frames, after = sample["number"], sample["next", "number"]
    assert torch.equal(sample["payload"], frames[:, :, None].expand(-1, -1, WIDTH))
    length = length_of(sample["life"], sample["env"])[:, None]
    number = frames[:, -1:]
    assert torch.equal(frames // length, (number // length).expand_as(frames))
    moves = frames.diff(dim=1)
    assert ((moves == 0) | (moves == 1)).all()
    assert (moves.diff(dim=1) >= 0).all()  # only the first frame is repeated
    assert torch.equal(after, torch.cat([frames[:, 1:], number + 1], 1))
    done = number % length == length - 1
    assert torch.equal(sample["next", "done"], done)
