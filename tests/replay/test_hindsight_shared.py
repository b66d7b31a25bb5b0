"""Hindsight for several learners while collectors write and any process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmbuffer.memory.upkeep.check import check
from tests.kit.rings import engine_of
from tests.replay import hindsight_programs
from tests.replay.hindsight_programs import learner, require_right
from tests.replay.workers import began, collectors, kill, start

CAPACITY, BATCHES = 4_000, 40


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_goals_stay_in_their_episodes_while_collectors_and_learners_are_killed(
    tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "buffer"
    with (
        collectors(hindsight_programs.collector, path, CAPACITY, 2) as writing,
        collectors(hindsight_programs.learning, path, CAPACITY, 1) as learning,
    ):
        began(*writing, *learning)
        with learner(path, CAPACITY, strategy) as rb:
            lives = set()
            for turn in range(3):
                for _ in range(BATCHES):
                    sample = rb.sample()
                    require_right(sample, strategy)
                    lives.update(sample["life"].tolist())
                kill(writing[turn % 2])  # at any point
                kill(learning[0])  # it has not stopped because of an error
                require_right(rb.sample(), strategy)
                writing[turn % 2] = start(hindsight_programs.collector, path, CAPACITY, 2 + turn)
                learning[0] = start(hindsight_programs.learning, path, CAPACITY, turn)
                began(writing[turn % 2], learning[0])
            assert lives >= {0, 1, 2}
        for one in (*writing, *learning):
            kill(one)
    with learner(path, CAPACITY, strategy) as rb:  # no client is alive: recovered
        assert engine_of(rb).report.reason == "no client alive"
        for _ in range(BATCHES):
            require_right(rb.sample(), strategy)
    assert check(path).problems == []
