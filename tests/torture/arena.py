"""Processes that work, and die: chairs that are filled again, pauses to look, and who is to die.

Processes are forked from one that has loaded what they need, and told by a word of shared memory to
stand still. A process that ends by itself, or does not come to a stand, has failed.

Each chair has a process group of its own: what its process has forked may outlive it there for some
calls, as a child of ours, and is waited for. Some chairs are in containers (containers.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tests.crash.harness import fork
from tests.torture import interrupts
from tests.torture.containers import adopt_orphans, contained
from tests.torture.history import Log
from tests.torture.items import CHILDREN, LIVES, THREADS, who_of

#: How long a survivor may take to its next pause; it says where everybody is, and fails.
PATIENCE_S = 60.0
LOOK_S = 0.5
STACKS_S = 10.0
#: One who tells where it is writes on within this time.
STACK_S = 0.1
#: Between two looks of a stopped process whether it may go on.
STANDING_S = 0.001

#: What may come before there is a handler; the first of a pid namespace would not see it.
STARTING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Actor:
    """What a process is given.

    Attributes:
        who: its number; of its items and priorities too.
        log: its account.
        rng: its own draws.
        goes_on: asked between two calls; stands still in there while others look.
        beside: the account of a second thread.
        child: forks what it is given, with an account and draws of its own; the pid.
    """

    who: int
    log: Log
    rng: np.random.Generator
    goes_on: Callable[[], bool]
    beside: Callable[[], Actor]
    child: Callable[[Callable[[Actor], None]], int]


Role = Callable[[Actor], None]


@dataclass
class Chair:
    """A place for one process.

    Attributes:
        number, role: which, and of what kind.
        container: the boot id that it sees in namespaces of its own; None: it has ours.
        life: how often it was filled.
        pid: of its process; 0: it is empty.
        told: of so many of its forked children it is told that they are dead.
    """

    number: int
    role: str
    container: Path | None = None
    life: int = 0
    pid: int = 0
    told: int = 0

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
        containers: which chairs are in containers, by number, and the boot id that each sees.
    """

    def __init__(
        self,
        logs: Path,
        roles: Mapping[str, Role],
        chairs: list[str],
        seed: int,
        *,
        pace_s: float = 0.0,
        containers: Mapping[int, Path] | None = None,
    ) -> None:
        logs.mkdir()
        self.logs = logs
        self.roles = roles
        self.seed = seed
        self.pace_s = pace_s
        apart = containers or {}
        self.chairs = [Chair(n, role, apart.get(n)) for n, role in enumerate(chairs, 1)]
        assert len(self.chairs) <= CHILDREN
        self._log = Log(logs, 0, 0)
        self._leaving = self._acting = False
        self._turn = mmap.mmap(-1, mmap.PAGESIZE)
        self._stands = os.pipe()
        self._orphans: list[tuple[int, Chair]] = []
        adopt_orphans(True)
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
        self._orphans += [(chair.pid, chair) for chair in self.chairs if chair.pid]
        while self._orphans:
            with contextlib.suppress(AssertionError):  # there is an error already, or nobody asked
                self.end_orphans()
        adopt_orphans(False)
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()
        self._log.__exit__()
        for descriptor in self._stands:
            os.close(descriptor)
        self._turn.close()

    # Filling chairs.

    def fill(self) -> None:
        """Starts a process in each chair that is empty."""
        self._reap_orphans()
        for chair in self.chairs:
            if not chair.pid:
                chair.life += 1
                assert chair.life < LIVES
                chair.pid = self._start(chair)

    def _start(self, chair: Chair) -> int:
        body = partial(self._act, chair)
        signal.pthread_sigmask(signal.SIG_BLOCK, STARTING)  # until `_act` has its handlers
        try:
            if chair.container is not None:
                own_proc = bool((self.seed + chair.who) & 1)
                return contained(_leaves(body), chair.container, own_proc=own_proc)
            pid = forked(body)
            with contextlib.suppress(OSError):  # it may have done so itself, or be dead
                os.setpgid(pid, pid)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTING)

    def _act(self, chair: Chair) -> None:
        if chair.container is None:
            os.setpgid(0, 0)
        interrupts.expect()
        os.close(self._stands[0])  # so that it shows when the campaign is dead
        rng = np.random.default_rng([self.seed, chair.who])
        if rng.random() < 0.5 or chair.container is not None:  # which the first of all pids needs
            signal.signal(signal.SIGTERM, self._leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTING)
        log = Log(self.logs, chair.number, chair.who)
        beside, child = partial(self._beside, chair), partial(self._child, chair)
        try:
            self._acting = True
            self.roles[chair.role](Actor(chair.who, log, rng, self._goes_on, beside, child))
        finally:
            self._acting = False

    def _beside(self, chair: Chair) -> Actor:
        """It never stands still: the first thread holds it between two calls."""
        number = chair.number + THREADS
        who = who_of(number, chair.life)
        return self._another(str(number), who, lambda: True)

    def _child(self, chair: Chair, body: Callable[[Actor], None]) -> int:
        """It never stands still either: it ends when others look."""
        number = self._children(chair) + 1
        assert number < LIVES
        struct.pack_into("<q", self._turn, 8 * chair.number, number)
        turn = self._turn[0]

        def acts() -> None:
            who = who_of(chair.number + CHILDREN, number)
            body(self._another(str(who), who, lambda: self._turn[0] == turn))

        return forked(acts)

    def _another(self, name: str, who: int, goes_on: Callable[[], bool]) -> Actor:
        rng, log = np.random.default_rng([self.seed, who]), Log(self.logs, name, who)
        return Actor(who, log, rng, goes_on, _nothing_more, _nothing_more)

    def _children(self, chair: Chair) -> int:
        """How many processes the lives of a chair have forked."""
        return int(struct.unpack_from("<q", self._turn, 8 * chair.number)[0])

    def _leave(self, number: int, frame: object) -> None:
        self._leaving = True  # for the case that the exception is lost in a finaliser
        if self._acting:
            sys.exit(0)

    def _goes_on(self) -> bool:
        self._leave_the_dead()
        if (turn := self._turn[0]) & 1:
            os.write(self._stands[1], b".")
            while self._turn[0] == turn:
                time.sleep(STANDING_S)
                self._leave_the_dead()
        if self.pace_s:
            time.sleep(self.pace_s)
        return not self._leaving

    def _leave_the_dead(self) -> None:
        """Ends this process if nobody reads any more who stands: the campaign is gone."""
        poll = select.poll()
        poll.register(self._stands[1], 0)
        if poll.poll(0):
            os._exit(0)

    # RateStatus still.

    def still(self) -> None:
        """Everybody comes to a stand between two calls."""
        self._next_turn()
        deadline = time.monotonic() + PATIENCE_S
        standing = 0
        while self._reap_orphans():
            assert time.monotonic() < deadline, (
                f"H10: a forked child hangs\n{self._stacks_of_all()}"
            )
            time.sleep(STANDING_S)
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
        """Processes that ended by themselves."""
        ended = []
        for chair in self.chairs:
            pid, status = os.waitpid(chair.pid, os.WNOHANG)
            if pid:
                self._orphans.append((pid, chair))
                chair.pid = 0
                code = os.waitstatus_to_exitcode(status)
                ended.append(f"{chair.role} {chair.number} ended by itself with {code}")
        return ended

    def _stacks_of_all(self) -> str:
        """One group after the other: what two write at once cannot be read."""
        path, deadline = self.logs / "stacks", time.monotonic() + STACKS_S
        for group in [chair.pid for chair in self.chairs] + [pid for pid, _ in self._orphans]:
            before = size = path.stat().st_size
            os.killpg(group, signal.SIGUSR2)
            while time.monotonic() < deadline:  # one that is stopped tells nothing
                time.sleep(STACK_S)
                if before < size == path.stat().st_size:
                    break
                size = path.stat().st_size
        return path.read_text()

    # Dying.

    def kill(self, chairs: list[Chair], number: int = signal.SIGKILL, *, whole: bool = True) -> int:
        """Sends a signal that ends them, and waits; returns how many died of it.

        Args:
            chairs: whose.
            number: the signal.
            whole: kill what they have forked, too; else it goes on without them.
        """
        for chair in chairs:
            if whole and number == signal.SIGKILL:
                os.killpg(chair.pid, number)
            else:
                os.kill(chair.pid, number)
        died = 0
        for chair in chairs:
            status = os.waitstatus_to_exitcode(os.waitpid(chair.pid, 0)[1])
            self._orphans.append((chair.pid, chair))
            chair.pid = 0
            self._log.died(chair.who)
            self._log.died(who_of(chair.number + THREADS, chair.life))
            by_itself = 0 if number == signal.SIGTERM else -number
            assert status in (-number, by_itself), f"{chair.role} {chair.number} ended: {status}"
            died += status == -number
        return died

    def _reap_orphans(self) -> bool:
        """Waits for nobody; whether some are left."""
        for group, chair in list(self._orphans):
            if self._reap_group(group):
                continue
            self._orphans.remove((group, chair))
            if all(chair is not other for _, other in self._orphans) and not chair.pid:
                for number in range(chair.told + 1, self._children(chair) + 1):
                    self._log.died(who_of(chair.number + CHILDREN, number))
                chair.told = self._children(chair)
        return bool(self._orphans)

    def _reap_group(self, group: int) -> bool:
        """Whether somebody in it is alive."""
        while True:
            try:
                pid, status = os.waitpid(-group, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, -signal.SIGKILL), f"a forked child ended by itself with {code}"

    def end_orphans(self) -> None:
        """Kills what the dead have forked, and waits for it."""
        while self._reap_orphans():
            for group, _ in self._orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            time.sleep(STANDING_S)

    def interrupt(self, chair: Chair) -> None:
        """Sends SIGINT; it goes on."""
        os.kill(chair.pid, signal.SIGINT)

    def stop(self, chair: Chair, seconds: float) -> None:
        """Stops a process for some time."""
        os.kill(chair.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(chair.pid, signal.SIGCONT)


def forked(body: Callable[[], object]) -> int:
    """`fork`, of a body that may also end with SystemExit: that is no failure."""
    return fork(_leaves(body))


def _leaves(body: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with contextlib.suppress(SystemExit):
            body()

    return run


def _nothing_more(*given: object) -> Any:
    """Of an account beside another: it has none beside it, and no children."""
    raise NotImplementedError
