"""The example learns to flip eight bits from missed goals, and fails without hindsight."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.selection import seeds

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hindsight_dqn.py"
BITS, STEPS = 8, 12_000


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    torch.set_num_threads(1)
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_eight_bits_are_solved_with_hindsight(example: dict[str, Any], seed: int) -> None:
    *_, (step, success) = example["train"](BITS, STEPS, seed=seed)
    assert success >= example["SOLVED"]
    assert step < STEPS


@pytest.mark.full
def test_the_same_agent_without_hindsight_does_not_solve_them(example: dict[str, Any]) -> None:
    curve = list(example["train"](BITS, STEPS, hindsight=False))
    assert len(curve) == STEPS // 2_000
    # random actions succeed with a rate of about 0.03
    assert max(success for _, success in curve) < 0.2


def test_an_episode_ends_at_its_goal_or_after_as_many_steps_as_there_are_bits(
    example: dict[str, Any],
) -> None:
    environments = example["BitFlips"](4, 2)
    environments.observation = torch.zeros(2, 4, dtype=torch.bool)
    environments.goal = torch.tensor([[True, False, False, False], [True] * 4])
    after = environments.step(torch.tensor([0, 0]))["next"]
    assert after["terminated"].flatten().tolist() == [True, False]
    assert after["reward"].flatten().tolist() == [0, -1]
    environments.goal[0] = ~environments.observation[0]
    for step in range(3):
        environments.goal[0] = ~environments.observation[0]
        after = environments.step(torch.tensor([step % 2, 0]))["next"]
    assert after["done"].flatten().tolist() == [False, True]
    assert not after["terminated"].any()
    assert environments.taken.flatten().tolist() == [3, 0]


@pytest.mark.full
def test_the_script_says_how_it_goes() -> None:
    command = [sys.executable, str(EXAMPLE), "--bits", "2", "--steps", "4000"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "solved"
    assert "goals reached 100.0%" in lines[-2]
