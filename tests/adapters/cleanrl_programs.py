"""Runs the examples in CleanRL's style, with small settings for tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from shmbuffer import attach
from tests.kit.programs import ROOT, Program, environment

BATCH = 8
SMALL = ("--learning-starts=40", f"--batch-size={BATCH}", "--eval-episodes=1", "--scratch-dir")
LINE = re.compile(r"(\d+) updates in \d+ s \(\d+ s CPU\): -\d+")


def run(example: str, steps: int, path: Path, *more: str) -> int:
    """Runs an example; returns the number of updates that it reports."""
    done = subprocess.run(
        [sys.executable, ROOT / example, *SMALL, path, "--total-timesteps", str(steps), *more],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = LINE.fullmatch(done.stdout.strip())
    assert found, done.stdout + done.stderr
    return int(found[1])


def assert_ratio_after_a_kill(example: str, path: Path, *more: str) -> None:
    """Kills the learner, restarts it, and compares the counts of both runs with the ratio."""
    command = sys.executable, str(ROOT / example), *SMALL, str(path), *more
    with Program(*command, "--total-timesteps", "90000") as program, attach(path) as rb:
        while rb.write_count < 90:
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert run(example, 60, path, *more) == 20  # it ends the collectors that the kill has left
    assert assert_ratio(path) >= 40


def assert_ratio(path: Path) -> int:
    """Compares the number of updates with that of steps; returns the number of updates."""
    with attach(path) as rb:
        written, updates = rb.write_count, rb.stats()["items_sampled"] // BATCH
    assert abs(written - 40 - updates) <= 20  # the limiter's error buffer
    return updates
