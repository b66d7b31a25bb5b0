"""Starts and controls the program that plays faults."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Self

from tests.faults.injector import preloaded_environment
from tests.faults.sweep import Found

#: The scenarios in checkpoint_scenarios.py, which need a process with torch.
CHECKPOINTS = (
    *("Save", "SaveAgain", "SaveWithoutExchange", "SaveForTorchRL", "SavePacked"),
    *("Load", "LoadInPlace", "LoadMovedBack", "LoadPacked", "SaveTransformed"),
    *("LoadTransformed", "SaveInPlace", "SaveMembers", "Export"),
)


class Sweeper:
    """A running sweep.py, with its options."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.sweep", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=preloaded_environment(),
        )

    def sweep(
        self,
        name: str,
        kind: str,
        *,
        count: int = 0,
        seed: int = 0,
        on: str = "",
        only: str = ".*",
    ) -> Found:
        """Plays faults like `sweep.sweep`; fails with the problems and commands to repeat them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"name": name, "kind": kind, "count": count, "seed": seed, "on": on, "only": only}
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        found = Found(**json.loads(self._process.stdout.readline()))
        problems = found.problems
        again = f"python -m tests.faults.campaign --only {name} --kind {kind} --fault '<the fault>'"
        assert not problems, "\n\n".join([f"{len(problems)} problems; again: {again}", *problems])
        assert found.cases > 0, f"{name} of {kind} makes no call that this fault could be on"
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
