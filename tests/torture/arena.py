"""Processes that work, and die: chairs that are filled again, pauses to look, and who is to die.

Processes are forked from one that has loaded what they need, and told by a word of shared memory to
stand still. Whoever ends by itself, or does not come to a stand, has failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from tests.crash.harness import fork
from tests.torture.history import Log
from tests.torture.items import LIVES, who_of

#: How long a survivor may take to its next pause; it says where everybody is, and fails.
PATIENCE_S = 60.0
LOOK_S = 0.5
STACKS_S = 10.0
#: Between two looks of one who stands whether he may go on.
STANDING_S = 0.001


@dataclass(frozen=True)
class Actor:
    """What a process is given.

    Attributes:
        who: its number; of its items and priorities too.
        log: its account.
        rng: its own draws.
        goes_on: asked between two calls; stands still in there while others look.
    """

    who: int
    log: Log
    rng: np.random.Generator
    goes_on: Callable[[], bool]


Role = Callable[[Actor], None]


@dataclass
class Chair:
    """A place for one process."""

    number: int
    role: str
    life: int = 0
    pid: int = 0

    @property
    def who(self) -> int:
        return who_of(self.number, self.life)


class Arena:
    """The processes of one round.

    Args:
        logs: folder of the histories.
        roles: name -> what a process of it does.
        chairs: the role of each chair.
        seed: of what processes draw.
        pace_s: how long a process rests between two calls.
    """

    def __init__(
        self,
        logs: Path,
        roles: Mapping[str, Role],
        chairs: list[str],
        seed: int,
        *,
        pace_s: float = 0.0,
    ) -> None:
        logs.mkdir()
        self.logs = logs
        self.roles = roles
        self.seed = seed
        self.pace_s = pace_s
        self.chairs = [Chair(number, role) for number, role in enumerate(chairs, 1)]
        self._log = Log(logs, 0, 0)
        self._leaving = self._acting = False
        self._turn = mmap.mmap(-1, mmap.PAGESIZE)
        self._stands = os.pipe()
        self._stacks = (logs / "stacks").open("a")
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for chair in self.chairs:
            if chair.pid:
                os.kill(chair.pid, signal.SIGKILL)
                os.waitpid(chair.pid, 0)
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()
        self._log.__exit__()
        for descriptor in self._stands:
            os.close(descriptor)
        self._turn.close()

    # Filling chairs.

    def fill(self) -> None:
        """Starts a process in each chair that is empty."""
        for chair in self.chairs:
            if not chair.pid:
                chair.life += 1
                assert chair.life < LIVES
                chair.pid = forked(partial(self._act, chair))

    def _act(self, chair: Chair) -> None:
        rng = np.random.default_rng([self.seed, chair.who])
        if rng.random() < 0.5:
            signal.signal(signal.SIGTERM, self._leave)
        log = Log(self.logs, chair.number, chair.who)
        try:
            self._acting = True
            self.roles[chair.role](Actor(chair.who, log, rng, self._goes_on))
        finally:
            self._acting = False

    def _leave(self, number: int, frame: object) -> None:
        self._leaving = True  # for the case that the exception is lost in a finaliser
        if self._acting:
            sys.exit(0)

    def _goes_on(self) -> bool:
        if (turn := self._turn[0]) & 1:
            os.write(self._stands[1], b".")
            while self._turn[0] == turn:
                time.sleep(STANDING_S)
        if self.pace_s:
            time.sleep(self.pace_s)
        return not self._leaving

    # Standing still.

    def still(self) -> None:
        """Everybody comes to a stand between two calls."""
        self._next_turn()
        deadline = time.monotonic() + PATIENCE_S
        standing = 0
        while standing < len(self.chairs):
            if select.select([self._stands[0]], [], [], LOOK_S)[0]:
                standing += len(os.read(self._stands[0], len(self.chairs)))
            elif ended := self._ended():
                raise AssertionError(f"{', '.join(ended)}; the traceback is above")
            elif time.monotonic() > deadline:
                raise AssertionError(f"H10: somebody hangs\n{self._stacks_of_all()}")

    def go(self) -> None:
        """And goes on."""
        self._next_turn()

    def _next_turn(self) -> None:
        """Odd: everybody stands. What a process has seen of it dies with the process."""
        self._turn[0] = (self._turn[0] + 1) % 256

    def _ended(self) -> list[str]:
        """Who has ended by itself."""
        ended = []
        for chair in self.chairs:
            pid, status = os.waitpid(chair.pid, os.WNOHANG)
            if pid:
                chair.pid = 0
                code = os.waitstatus_to_exitcode(status)
                ended.append(f"{chair.role} {chair.number} ended by itself with {code}")
        return ended

    def _stacks_of_all(self) -> str:
        for chair in self.chairs:
            os.kill(chair.pid, signal.SIGUSR2)
        deadline, stacks = time.monotonic() + STACKS_S, ""
        while stacks.count("most recent call first") < len(self.chairs):
            if time.monotonic() > deadline:
                break  # one that is stopped tells nothing
            stacks = (self.logs / "stacks").read_text()
        return stacks

    # Dying.

    def kill(self, chairs: list[Chair], number: int = signal.SIGKILL) -> int:
        """Sends a signal that ends them, and waits; returns how many died of it."""
        for chair in chairs:
            os.kill(chair.pid, number)
        died = 0
        for chair in chairs:
            status = os.waitstatus_to_exitcode(os.waitpid(chair.pid, 0)[1])
            chair.pid = 0
            self._log.died(chair.who)
            by_itself = 0 if number == signal.SIGTERM else -number
            assert status in (-number, by_itself), f"{chair.role} {chair.number} ended: {status}"
            died += status == -number
        return died

    def stop(self, chair: Chair, seconds: float) -> None:
        """Stops a process for some time."""
        os.kill(chair.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(chair.pid, signal.SIGCONT)


def forked(body: Callable[[], object]) -> int:
    """`fork`, of a body that may also end with SystemExit: that is no failure."""

    def run() -> None:
        with contextlib.suppress(SystemExit):
            body()

    return fork(run)
