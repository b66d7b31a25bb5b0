"""The program in the guide is killed and resumed, and learns to balance the pole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from shmbuffer import LazyTensorStorage, ReplayBuffer
from tests.docs.blocks import blocks_of

STATED_RETURN = 150
PAGE = "docs/guides/a-whole-program.md"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (block,) = (block for block in blocks_of(PAGE) if block.title == "train.py")
    lines = [line for line in block.code.splitlines() if line.strip()]
    assert len(lines) <= 60
    path = tmp_path / "train.py"
    path.write_text(block.code)
    return path


def updates_of(program: Path, seed: int, last: int) -> Iterator[int]:
    """Runs the program, kills it with its collectors after a line, and yields its output."""
    running = subprocess.Popen(
        [sys.executable, program.name, str(seed)],
        cwd=program.parent,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    with running:
        try:
            for line in running.stdout:
                updates, _ = map(int, line.split())
                yield updates
                if updates >= last:
                    break
        finally:
            if last < 4_000:
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == (-signal.SIGKILL if last < 4_000 else 0)


def mean_return(policy: torch.nn.Module, episodes: int = 100) -> float:
    """Returns the mean return of greedy episodes, which is accurate to about 10."""
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    (obs, _), total, alive = envs.reset(seed=1), 0.0, np.ones(episodes, np.bool_)
    while alive.any():
        with torch.no_grad():
            action = policy(torch.from_numpy(obs)).argmax(1).numpy()
        obs, reward, terminated, truncated, _ = envs.step(action)
        total, alive = total + float(reward @ alive), alive & ~(terminated | truncated)
    envs.close()
    return total / episodes


def learned_by(program: Path) -> float:
    """Returns the mean return of the greedy policy of the saved target network.

    The target network averages the last hundred updates. The online network is better or worse by a
    quarter from save to save.
    """
    target = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000))
    target.load_state_dict(buffer.loads(program.parent / "run/save")["target"])
    return mean_return(target)


@pytest.mark.full  # each run is four processes that load torch
@pytest.mark.slow
def test_it_goes_on_from_its_last_save_when_everything_is_killed(program: Path) -> None:
    assert list(updates_of(program, seed=0, last=500)) == [500]
    assert list(updates_of(program, seed=0, last=1_000)) == [1_000]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_reaches_the_stated_return(program: Path, seed: int) -> None:
    *_, killed = updates_of(program, seed, last=1_500)
    assert killed == 1_500
    *_, last = updates_of(program, seed, last=4_000)
    assert last == 4_000
    assert learned_by(program) >= STATED_RETURN
