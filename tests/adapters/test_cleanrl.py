"""The examples in CleanRL's manner run both of their loops, and SAC continues after a kill."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shmbuffer import attach
from tests.adapters.cleanrl_programs import (
    LINE,
    SMALL,
    assert_ratio,
    assert_ratio_after_a_kill,
)
from tests.docs.blocks import blocks_of
from tests.kit.programs import ROOT

pytest.importorskip("gymnasium", reason="the example needs it")

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs an example as a script in this process, which has loaded torch; returns its output.

    Its collectors are processes of their own.
    """
    threads = torch.get_num_threads()

    def run_script(example: str, path: Path, **options: int) -> str:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        monkeypatch.setattr(sys, "argv", [example, *SMALL, str(path), *words])
        runpy.run_path(str(ROOT / example), run_name="__main__")
        return capsys.readouterr().out.strip()

    yield run_script
    torch.set_num_threads(threads)


@pytest.mark.parametrize("collectors", [0, 1])
def test_sac_runs_both_of_its_loops(run: Run, tmp_path: Path, collectors: int) -> None:
    if not collectors:
        pytest.importorskip("stable_baselines3", reason="its replay buffer")
    path = tmp_path / "sac"
    said = run("examples/cleanrl_sac.py", path, total_timesteps=60, collectors=collectors)
    updates = LINE.fullmatch(said)
    assert updates, said
    assert updates[1] == "20"
    assert path.exists() == bool(collectors)
    if collectors:
        assert assert_ratio(path) == 20


@pytest.mark.full
def test_collectors_and_learner_keep_that_ratio_also_after_a_kill(tmp_path: Path) -> None:
    assert_ratio_after_a_kill("examples/cleanrl_sac.py", tmp_path / "sac")


@pytest.mark.parametrize("collectors", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_dqn_on_stacks_of_frames_runs_both_of_its_loops(
    run: Run, tmp_path: Path, collectors: int
) -> None:
    if not collectors:
        pytest.importorskip("stable_baselines3", reason="its replay buffer")
    path = tmp_path / "dqn"
    said = run("examples/cleanrl_dqn.py", path, total_timesteps=200, collectors=collectors)
    assert re.fullmatch(r"40 updates in \d+ s: \d+% caught", said), said
    if collectors:
        with attach(path) as rb:
            assert rb[0]["obs"].shape == (12, 12)
            assert rb[:]["next", "done"].any()
            assert rb.stats()["items_sampled"] == 40 * 8


@pytest.mark.parametrize("page", ["stable-baselines3", "cleanrl", "dataloader"])
def test_the_program_of_a_page_has_at_most_40_lines(page: str) -> None:
    blocks = blocks_of(f"docs/guides/{page}.md")
    (program,) = (block for block in blocks if block.title and block.language == "python")
    assert sum(1 for line in program.code.splitlines() if line.strip()) <= 40
