"""Starts, monitors, kills and ends the processes of a trial: a coordinator and a learner."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, Self

from shmbuffer.examples.cartpole import Config, Evaluation, Learning, Service, learn, serve

GRACE_S = 15.0
"""Seconds after which processes that have been told to end are killed."""


class Crew:
    """The processes of a run, from their start until they are ended or killed."""

    # The coordinator and its collectors are a process group, so that one signal reaches them all.

    def __init__(
        self, run_dir: Path, config: Config, on_existing: Literal["error", "recover"]
    ) -> None:
        self.collectors: tuple[int, ...] = ()
        self._all_killed = False
        self._coordinator = _Role(serve, run_dir, config, on_existing)
        self._learner = _Role(learn, run_dir, config)

    @property
    def is_whole(self) -> bool:
        """True if neither the coordinator nor the learner has ended."""
        return not (self._coordinator.has_ended or self._learner.has_ended)

    def reports(self, timeout_s: float) -> Iterator[Service | Learning | Evaluation]:
        """Yields reports of the coordinator and the learner as they arrive."""
        roles = {role.control: role for role in (self._coordinator, self._learner)}
        for control in wait(list(roles), timeout_s):
            for report in roles[control].heard():  # type: ignore[index]
                if isinstance(report, Service):
                    self.collectors = report.collectors
                yield report

    def kill_collector(self) -> int:
        """Kills one collector; returns its pid."""
        pid = self.collectors[0]
        self.collectors = self.collectors[1:]  # until the coordinator reports that it was restarted
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> tuple[int, ...]:
        """Kills all processes, and returns them once they are dead."""
        self._all_killed = True
        coordinator, learner = self._coordinator.process, self._learner.process
        watched = []
        for pid in self.collectors:
            with suppress(ProcessLookupError):
                watched.append(os.pidfd_open(pid))
        with suppress(ProcessLookupError):
            if coordinator.pid is not None:
                os.killpg(coordinator.pid, signal.SIGKILL)
        for process in (coordinator, learner):
            if process.pid is not None:
                process.kill()
                process.join()
        for fd in watched:
            select.select([fd], [], [], GRACE_S)
            os.close(fd)
        pids = [coordinator.pid, *self.collectors, learner.pid]
        return tuple(pid for pid in pids if pid is not None)

    def losses(self) -> str:
        """Returns the names of processes that ended without being told to."""
        return ", ".join(
            f"{role.name} ended with exit code {role.exit_code()}"
            for role in (self._coordinator, self._learner)
            if role.has_ended
        )

    def __enter__(self) -> Self:
        """Starts the processes. If a signal arrives meanwhile, those already started are killed."""
        try:
            for role in (self._coordinator, self._learner):
                role.start()
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes. Those that do not end, or are still starting, are killed."""
        if self._all_killed:
            return
        if not (self._learner.has_spoken and self._coordinator.has_spoken):
            self.kill_all()
            return
        deadline_s = time.monotonic() + GRACE_S
        for role in (self._learner, self._coordinator):
            role.control.close()
        for role in (self._learner, self._coordinator):
            role.process.join(max(0.0, deadline_s - time.monotonic()))
            if role.process.exitcode is None:
                self.kill_all()
                return


class _Role:
    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = target.__name__
        self.has_spoken = self.has_ended = False
        self.control, self._theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_apart, args=(target, *args, self._theirs), name=self.name
        )

    def start(self) -> None:
        self.process.start()
        self._theirs.close()  # so that the pipe is closed when the process ends

    def heard(self) -> Iterator[Service | Learning | Evaluation]:
        try:
            while self.control.poll():
                report = self.control.recv()
                self.has_spoken = True
                yield report
        except (EOFError, OSError):
            self.has_ended = True

    def exit_code(self) -> int | None:
        self.process.join(GRACE_S)
        return self.process.exitcode


def _apart(target: Callable[..., None], *args: Any) -> None:
    """Runs a role in its own process group, so that Ctrl-C in a terminal reaches only the trial."""
    os.setpgrp()
    logging.getLogger("shmbuffer").setLevel(logging.ERROR)  # the trial reports deaths
    target(*args)
