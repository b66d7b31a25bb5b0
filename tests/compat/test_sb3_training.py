"""Stable-Baselines3 trains in two processes, one of which is killed and resumed."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

import shmbuffer

pytest.importorskip("stable_baselines3", reason="scripts/compat runs these tests")
pytest.importorskip("ale_py", reason="scripts/compat runs these tests")
pytest.importorskip("cv2", reason="scripts/compat runs these tests")
pytest.importorskip("mujoco", reason="scripts/compat runs these tests")

from tests.compat.sb3_training import main

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([main.__module__])  # imports torch and the other modules once


class Training:
    """A process that trains, with its reports; it is killed at the end of the block."""

    def __init__(self, *command: Any) -> None:
        self.reports, other_end = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=main, args=(*command, other_end))
        self.process.start()
        other_end.close()

    def until(self, reached: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Returns the first report for which ``reached`` is true.

        EOFError if the process has ended.
        """
        while not reached(report := self.reports.recv()):
            pass
        return report

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.reports.close()


def rows_of(path: Path) -> Counter[bytes]:
    """Counts the stored transitions by their bytes."""
    with shmbuffer.attach(path) as rb:
        rows = rb[:].select("observation", "action", "next")
        leaves = [leaf.reshape(len(rows), -1) for leaf in rows.values(True, True)]
        return Counter(
            b"".join(one.numpy().tobytes() for one in row) for row in zip(*leaves, strict=True)
        )


@pytest.mark.parametrize("task", ["atari", "mujoco", "goals"])
def test_a_process_that_was_killed_goes_on_with_the_transitions_of_all(
    tmp_path: Path, task: str
) -> None:
    """With ``mujoco``, the process is a learner followed by its collector; otherwise a trainer."""
    replay = tmp_path / "replay"
    with Training(task, 1, tmp_path) as survivor:
        with Training(task, 0, tmp_path) as victim:
            killed = victim.until(lambda report: report["updates"] >= 20)
            lived = survivor.until(lambda report: report["stored"] >= 100)
            before = rows_of(replay)
            victim.kill()
        assert before.total() >= killed["stored"] + lived["stored"]
        with shmbuffer.attach(replay) as rb:
            target = rb.write_count + 60
            survivor.until(lambda _: rb.write_count >= target)
        with Training(task, 0, tmp_path) as resumed:
            back = resumed.until(lambda _: True)
            assert back["updates"] >= killed["updates"]
            assert back["items"] >= before.total()
            learned = resumed.until(lambda report: report["updates"] >= back["updates"] + 20)
            if task == "mujoco":
                survivor.until(lambda report: report["version"] >= learned["version"])
    after = rows_of(replay)  # no other process is left, so this one recovers the buffer
    assert not before - after
    assert after.total() >= before.total() + 60
