"""Bookkeeping of the child processes of a coordinator.

     running ──returns, is stopped, or gets Ctrl-C──▶ ended
        └──dies of a signal or an exception──▶ the death is reported ──restart──▶ running

Each child also has a file in the directory (memory/clients/roster.py). If the coordinator is
killed, the file remains, and the next coordinator uses it to find the orphans.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal

from shmbuffer.errors import BufferInUseError
from shmbuffer.memory.clients import roster
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.service.stopping import end, why_left

Orphans = Literal["stop", "adopt", "leave"]
"""Possible treatments of orphans with the name of a new process; see ``Coordinator.spawn``."""

log = logging.getLogger("shmbuffer.service")

HASTY_S = 5.0
"""A process that dies twice in a row within this time is restarted only after a pause."""

LONGEST_PAUSE_S = 30.0

NEVER = math.inf


class Spawned:
    """A running process and, after a restart, its successor with the same name and index."""

    _closing = ForkLock()  # a closed descriptor's number may be reused

    def __init__(
        self, start: Callable[[Spawned], SpawnProcess], *, name: str, index: int, restart: bool
    ) -> None:
        self._start = start
        self._process: SpawnProcess | None = None
        self._pidfd: int | None = None
        self._exitcode: int | None = None
        self._running = False
        self._young_deaths = 0
        self.file = ""  # name of its file in the roster
        self.failed = ""  # hash of the location of the last exception, passed to the next start
        self.times = 0  # number of consecutive failures at that location
        self.name = name  # ``target-index``
        self.index = index
        self.pid = 0  # pid of the running process, or of the last one
        self.restart = restart
        self.restarts = 0  # failed attempts included
        self.failure: Exception | None = None  # error of the last start
        self.due_s = NEVER  # time of the next start on the monotonic clock

    def begin(self) -> None:
        """Starts the process or its successor; an error is stored in ``failure``."""
        self.due_s = NEVER
        self.restarts += self.pid != 0
        try:
            self._process = self._start(self)
        except Exception as error:
            self.failure = error
            return
        self._started_s = time.monotonic()
        self._exitcode, self._running, self.failure = None, True, None
        self.pid = self._process.pid or 0
        # multiprocessing's sentinel is a pipe that grandchildren inherit; a pidfd is the child's.
        with suppress(OSError):
            self._pidfd = os.pidfd_open(self.pid)

    def adopt(self, found: roster.LivingProcess) -> None:
        """Takes over a running process instead of starting one, unless it has just ended."""
        self._pidfd = identity.open_pidfd(found.identity)
        if self._pidfd is not None:
            self.pid, self.file = found.identity.pid, found.file
            self._started_s = time.monotonic()
            self._running = True

    def release(self) -> None:
        """Closes the descriptor of the process without ending the process."""
        with self._closing:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    @property
    def sentinel(self) -> int:
        """Descriptor that becomes readable when the process ends."""
        if self._pidfd is not None:
            return self._pidfd
        assert self._process is not None
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """Exit code; None while the process runs, or if it was adopted and then killed."""
        return self._exitcode

    def is_alive(self) -> bool:
        """True if the process is running, or its supervisor has not noticed its end yet."""
        return self._running

    def kill(self) -> None:
        """Sends SIGKILL to the process; with ``restart`` the process is started again."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM, which raises SystemExit in the process; ``restart`` starts it again."""
        self._send(signal.SIGTERM)

    def collect(self, words: roster.ExitRecord) -> int | None:
        """Returns the exit code of a process that has ended, or None."""
        code, failed = words.exitcode, words.failed
        if self._process is not None:
            self._process.join()
            while (code := self._process.exitcode) is None:
                time.sleep(0)  # another thread is reading the status for multiprocessing
            self._process = None
        self.times = self.times + 1 if failed and failed == self.failed else 1 if failed else 0
        self.failed = failed
        self.release()
        self._exitcode, self._running = code, False
        return code

    def _send(self, number: int) -> None:
        with self._closing:
            if self._pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)
                return
        if self._process is not None:
            self._process.kill() if number == signal.SIGKILL else self._process.terminate()

    def pause_s(self) -> float:
        """Returns the pause before the next start, in seconds; 0 after the first early death."""
        if time.monotonic() - self._started_s >= HASTY_S and self.times < 2:
            self._young_deaths = 0
            return 0.0
        self._young_deaths += 1
        if self._young_deaths == 1:
            return 0.0
        return min(0.25 * 2.0**self._young_deaths, LONGEST_PAUSE_S)

    def __repr__(self) -> str:
        state = "running" if self.is_alive() else f"exit code {self.exitcode}"
        return f"<Spawned {self.name} pid={self.pid} {state}>"


class Children:
    """All processes that a coordinator has spawned or adopted, including those that have ended.

    Callers hold the lock of the supervisor.
    """

    def __init__(self, scratch_dir: Path) -> None:
        self._scratch_dir = scratch_dir
        self.all: list[Spawned] = []

    def running(self) -> list[Spawned]:
        """Returns the running processes."""
        return [child for child in self.all if child.is_alive()]

    def waiting(self) -> list[Spawned]:
        """Returns the processes that are still to be started."""
        return [child for child in self.all if child.due_s < NEVER]

    def have_ended(self) -> bool:
        """True if no process is running or waiting to be started."""
        return not self.running() and not self.waiting()

    def orphans(self, name: str) -> list[roster.LivingProcess]:
        """Returns the living processes of this name that an earlier coordinator spawned."""
        living = roster.find_living(self._scratch_dir, {child.file for child in self.all})
        me = identity.current()  # is in the roster if a collector became the coordinator
        return [one for one in living if one.name == name and one.identity != me]


def take_over(
    scratch_dir: Path,
    orphans: Sequence[roster.LivingProcess],
    adopters: Sequence[Spawned],
    grace_s: float,
) -> None:
    """Assigns to each adopter an orphan with the same index, and ends all other orphans."""
    for child in adopters:
        for orphan in orphans:
            if orphan.index == child.index and not child.is_alive():
                child.adopt(orphan)
    adopted = {child.file for child in adopters}
    others = {one.identity: one for one in orphans if one.file not in adopted}
    how = end(others, grace_s)
    left = [who for who, result in how.items() if result == "left"]
    for who, orphan in others.items():
        if who not in left:
            roster.remove_file(scratch_dir, orphan.file)
    if left:
        for child in adopters:
            child.release()
        pids = [who.pid for who in left]
        raise BufferInUseError(
            f"{scratch_dir}: {orphans[0].name!r} of an earlier coordinator (pids "
            f"{', '.join(map(str, pids))}) are still running and cannot be ended by this process: "
            f"{why_left(left[0])}; end them, or pass orphans='leave'",
            path=scratch_dir,
            pids=pids,
        )
    for result, what in (("ended", "ended"), ("killed", "killed because they ignored SIGTERM")):
        if ended := [str(who.pid) for who, as_found in how.items() if as_found == result]:
            log.warning(
                "%s: an earlier coordinator's %s were still running: %s (pids %s)",
                *(scratch_dir, orphans[0].name, what, ", ".join(ended)),
            )
