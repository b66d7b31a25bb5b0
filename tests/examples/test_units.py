"""The examples of sample units learn their tasks within seconds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Any:
    return runpy.run_path(str(EXAMPLES / request.param))


@pytest.mark.full
@pytest.mark.parametrize("example", ["recurrent_r2d2.py"], indirect=True)
def test_a_recurrent_learner_with_burn_in_remembers_the_cue(example: Any) -> None:
    assert example["main"](0) >= example["GOAL"]


@pytest.mark.full
@pytest.mark.parametrize("example", ["nstep_dqn.py"], indirect=True)
def test_n_steps_carry_the_reward_back_in_fewer_updates(example: Any) -> None:
    found = example["main"](0)
    assert found[5] < found[1] < example["MOST_UPDATES"]
