"""The state of each child process of a coordinator.

     running ──returns, is stopped, or gets Ctrl-C──▶ ended
        └──dies of a signal or an exception──▶ the death is reported ──restart──▶ running

Each child also has a file in the buffer's directory (memory/clients/roster.py). If the coordinator
is killed, the file remains, so that the next coordinator can find the *orphans*: living processes
that an earlier coordinator has spawned.
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
"""Treatment of orphans that have the name of a new process; see ``Coordinator.spawn``."""

log = logging.getLogger("shmbuffer.service")

HASTY_S = 5.0
"""A process that twice in a row dies within this number of seconds is restarted after a pause."""

LONGEST_PAUSE_S = 30.0
"""Longest pause before a restart, in seconds."""

NEVER = math.inf


class Spawned:
    """A process that a coordinator has spawned. A restart replaces the process in this object."""

    _closing = ForkLock()  # protects the descriptor, whose number can be reused once it is closed

    def __init__(
        self, start: Callable[[Spawned], SpawnProcess], *, name: str, index: int, restart: bool
    ) -> None:
        self._start = start
        self._process: SpawnProcess | None = None
        self._pidfd: int | None = None
        self._exitcode: int | None = None
        self._running = False
        self._young_deaths = 0
        self.file = ""  # name of the process's file in the roster
        self.failed = ""  # hash of the location of the last exception, for the next start
        self.times = 0  # number of consecutive deaths by an exception at that location
        self.name = name  # ``target-index``
        self.index = index
        self.pid = 0  # pid of the running process, or of the last process
        self.restart = restart  # True: the process is started again after a death
        self.restarts = 0  # number of restarts, including failed attempts
        self.failure: Exception | None = None  # error of the last attempt to start
        self.due_s = NEVER  # time of the next start, on the monotonic clock

    def begin(self) -> None:
        """Starts the process, or starts it again after its end. Stores an error in ``failure``."""
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
        # multiprocessing's sentinel is a pipe, which grandchildren inherit and keep open.
        with suppress(OSError):
            self._pidfd = os.pidfd_open(self.pid)

    def adopt(self, found: roster.LivingProcess) -> None:
        """Takes over an orphan instead of starting a process. Does nothing if it has just ended."""
        self._pidfd = identity.open_pidfd(found.identity)
        if self._pidfd is not None:
            self.pid, self.file = found.identity.pid, found.file
            self._started_s = time.monotonic()
            self._running = True

    def release(self) -> None:
        """Closes the descriptor of the process. The process continues to run."""
        with self._closing:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the process ends."""
        if self._pidfd is not None:
            return self._pidfd
        assert self._process is not None
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process. None while it runs, or if it was adopted and then killed."""
        return self._exitcode

    def is_alive(self) -> bool:
        """True if the process is running, or if the supervisor has not noticed its end yet."""
        return self._running

    def kill(self) -> None:
        """Sends SIGKILL to the process. If ``restart`` is set, the process is started again."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM, which raises SystemExit in the target.

        If ``restart`` is set, the process is started again.
        """
        self._send(signal.SIGTERM)

    def collect(self, words: roster.ExitRecord) -> int | None:
        """Records the end of the process.

        Args:
            words: what the process has written to its roster file before its end.

        Returns:
            The exit code, or None if an adopted process was killed.
        """
        code, failed = words.exitcode, words.failed
        if self._process is not None:
            self._process.join()
            while (code := self._process.exitcode) is None:
                time.sleep(0)  # another thread is in waitpid() for this process
            self._process = None
        self.times = self.times + 1 if failed and failed == self.failed else 1 if failed else 0
        self.failed = failed
        self.release()
        self._exitcode, self._running = code, False
        return code

    def _send(self, number: int) -> None:
        """Sends a signal to the process, if it is still running."""
        with self._closing:
            if self._pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)
                return
        if self._process is not None:
            self._process.kill() if number == signal.SIGKILL else self._process.terminate()

    def pause_s(self) -> float:
        """Returns the pause before the next start, in seconds.

        The pause is 0 after a single early death, and doubles after each further early death.
        """
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

    The caller of each method holds the supervisor's lock.

    Args:
        scratch_dir: directory of the buffer.
    """

    def __init__(self, scratch_dir: Path) -> None:
        self._scratch_dir = scratch_dir
        self.all: list[Spawned] = []

    def running(self) -> list[Spawned]:
        """Returns the running processes."""
        return [child for child in self.all if child.is_alive()]

    def waiting(self) -> list[Spawned]:
        """Returns the processes that are scheduled to be started."""
        return [child for child in self.all if child.due_s < NEVER]

    def have_ended(self) -> bool:
        """True if no process is running or scheduled to be started."""
        return not self.running() and not self.waiting()

    def orphans(self, name: str) -> list[roster.LivingProcess]:
        """Returns the orphans with this name, which an earlier coordinator has spawned."""
        living = roster.find_living(self._scratch_dir, {child.file for child in self.all})
        me = identity.current()  # in the roster if this coordinator was spawned by another one
        return [one for one in living if one.name == name and one.identity != me]


def take_over(
    scratch_dir: Path,
    orphans: Sequence[roster.LivingProcess],
    adopters: Sequence[Spawned],
    grace_s: float,
) -> None:
    """Lets new children adopt orphans with the same index, and ends all other orphans.

    Args:
        scratch_dir: directory of the buffer.
        orphans: the orphans, which have the same name.
        adopters: the children that can adopt an orphan, or none.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        BufferInUseError: an orphan could not be ended. Nothing was adopted.
    """
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
            f"{scratch_dir}: processes {orphans[0].name!r} of an earlier coordinator (pids "
            f"{', '.join(map(str, pids))}) are still running, and this process cannot end them, "
            f"because {why_left(left[0])}; end them yourself, or pass orphans='leave'",
            path=scratch_dir,
            pids=pids,
        )
    for result, what in (("ended", "ended"), ("killed", "killed because they ignored SIGTERM")):
        if ended := [str(who.pid) for who, as_found in how.items() if as_found == result]:
            log.warning(
                "%s: processes %s of an earlier coordinator were still running and were %s (pids "
                "%s)",
                *(scratch_dir, orphans[0].name, what, ", ".join(ended)),
            )
