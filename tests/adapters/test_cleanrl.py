"""The example in CleanRL's style runs both of its loops, and resumes after a kill."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmbuffer import attach
from tests.adapters.cleanrl_programs import SMALL, assert_ratio_after_a_kill, run
from tests.docs.blocks import blocks_of
from tests.kit.programs import ROOT, environment

pytest.importorskip("gymnasium", reason="the example needs it")


@pytest.mark.full
def test_its_own_loop_updates_once_a_step(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="its replay buffer")
    assert run("examples/cleanrl_sac.py", 60, tmp_path / "unused", "--collectors", "0") == 20
    assert not (tmp_path / "unused").exists()


@pytest.mark.full
def test_collectors_and_learner_keep_that_ratio_also_after_a_kill(tmp_path: Path) -> None:
    assert_ratio_after_a_kill("examples/cleanrl_sac.py", tmp_path / "sac")


@pytest.mark.full
@pytest.mark.parametrize("collectors", [0, 2])
def test_dqn_on_stacks_of_frames_runs_both_of_its_loops(tmp_path: Path, collectors: int) -> None:
    pytest.importorskip(
        "stable_baselines3", reason="the replay buffer of the loop without collectors"
    )
    options = ("--total-timesteps", "200", "--collectors", str(collectors))
    done = subprocess.run(
        [sys.executable, ROOT / "examples/cleanrl_dqn.py", *SMALL, tmp_path / "dqn", *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"40 updates in \d+ s: \d+% caught", done.stdout.strip()), done.stderr
    if collectors:
        with attach(tmp_path / "dqn") as rb:
            assert rb[0]["obs"].shape == (12, 12)
            assert rb[:]["next", "done"].any()


@pytest.mark.parametrize("page", ["stable-baselines3", "cleanrl", "dataloader"])
def test_the_program_of_a_page_has_at_most_40_lines(page: str) -> None:
    blocks = blocks_of(f"docs/guides/{page}.md")
    (program,) = (block for block in blocks if block.title and block.language == "python")
    assert sum(1 for line in program.code.splitlines() if line.strip()) <= 40
