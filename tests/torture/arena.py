"""Starts the processes of a round, stops and kills them, and fills empty chairs again.

Every process is forked from a process that has already imported what it needs. A word in shared
memory tells all processes to stand still. A process that ends without being told to, or that does
not stand still in time, has failed.

Each chair has its own process group. Processes that were forked by the process of a chair may
outlive it for a few calls. They then become children of the campaign, which waits for them. Some
chairs are in containers (containers.py).
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

#: Longest time until a survivor's next pause. After that it prints all stacks, and the round fails.
PATIENCE_S = 60.0
LOOK_S = 0.5
STACKS_S = 10.0
#: Longest time in which a process writes its stack.
STACK_S = 0.1
#: Interval at which a process that stands still checks whether it may go on.
STANDING_S = 0.001

#: Signals that may arrive before their handlers are installed. They are blocked until then, because
#: the first process of a pid namespace would not receive them.
STARTING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Actor:
    """Account, random numbers and controls that a process of the round is given.

    Attributes:
        who: the number of this process, which its items and priorities contain as well.
        log: the log to which it writes its account.
        rng: its own random number generator.
        goes_on: called between two calls of the library. It blocks while the process has to stand
            still.
        beside: returns the account of a second thread.
        child: forks a process that runs a function with an account and a random number generator
            of its own, and returns the pid of that process.
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
        number, role: the number of the chair and the role of its process.
        container: the boot id that the process sees in its own namespaces, or None if it is not in
            a container.
        life: how many times the chair has been filled.
        pid: the pid of its process, or 0 if the chair is empty.
        told: number of its forked children whose death has been written to the logs.
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
    """Starts, stops and kills the processes of one round.

    Args:
        logs: folder of the histories.
        roles: maps the name of a role to the function that a process with this role runs.
        chairs: the role of each chair.
        seed: seed of the random numbers of all processes.
        pace_s: how long a process rests between two calls, in seconds.
        containers: maps the number of each chair in a container to the boot id that it sees.
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
            # Another error is already being raised, or no caller asked for the outcome.
            with contextlib.suppress(AssertionError):
                self.end_orphans()
        adopt_orphans(False)
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()
        self._log.__exit__()
        for descriptor in self._stands:
            os.close(descriptor)
        self._turn.close()

    # Starting processes

    def fill(self) -> None:
        """Starts a process in each empty chair."""
        self._reap_orphans()
        for chair in self.chairs:
            if not chair.pid:
                chair.life += 1
                assert chair.life < LIVES
                chair.pid = self._start(chair)

    def _start(self, chair: Chair) -> int:
        body = partial(self._act, chair)
        # The signals are blocked until `_act` has installed its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, STARTING)
        try:
            if chair.container is not None:
                own_proc = bool((self.seed + chair.who) & 1)
                return contained(_leaves(body), chair.container, own_proc=own_proc)
            pid = forked(body)
            # The process may have done it itself, or may be dead.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTING)

    def _act(self, chair: Chair) -> None:
        if chair.container is None:
            os.setpgid(0, 0)
        interrupts.expect()
        # Otherwise the end of file would not show that the campaign is dead.
        os.close(self._stands[0])
        rng = np.random.default_rng([self.seed, chair.who])
        # The first process of a pid namespace needs handlers.
        if rng.random() < 0.5 or chair.container is not None:
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
        """Returns the account of a second thread, which the first thread stops between calls."""
        number = chair.number + THREADS
        who = who_of(number, chair.life)
        return self._another(str(number), who, lambda: True)

    def _child(self, chair: Chair, body: Callable[[Actor], None]) -> int:
        """Forks a child of a chair's process. It never stands still, but ends if the others do."""
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
        """Counts the processes that were forked in all lives of a chair."""
        return int(struct.unpack_from("<q", self._turn, 8 * chair.number)[0])

    def _leave(self, number: int, frame: object) -> None:
        self._leaving = True  # in case a finaliser loses the exception
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
        """Ends this process if the campaign, which reads the other end of the pipe, is dead."""
        poll = select.poll()
        poll.register(self._stands[1], 0)
        if poll.poll(0):
            os._exit(0)

    # Standing still

    def still(self) -> None:
        """Makes every process stand still between two calls."""
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
        """Lets every process go on."""
        self._next_turn()

    def _next_turn(self) -> None:
        """Increases the counter. All processes stand still while it is odd."""
        self._turn[0] = (self._turn[0] + 1) % 256

    def _ended(self) -> list[str]:
        """Describes the processes that ended without being told to."""
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
        """Returns the stacks of all processes, one group at a time so that they do not mix."""
        path, deadline = self.logs / "stacks", time.monotonic() + STACKS_S
        for group in [chair.pid for chair in self.chairs] + [pid for pid, _ in self._orphans]:
            before = size = path.stat().st_size
            os.killpg(group, signal.SIGUSR2)
            while time.monotonic() < deadline:  # a stopped process writes no stack
                time.sleep(STACK_S)
                if before < size == path.stat().st_size:
                    break
                size = path.stat().st_size
        return path.read_text()

    # Killing processes

    def kill(self, chairs: list[Chair], number: int = signal.SIGKILL, *, whole: bool = True) -> int:
        """Kills the processes of some chairs, waits, and returns how many died of the signal.

        Args:
            chairs: the chairs whose processes are killed.
            number: the signal that is sent.
            whole: also kill the processes that they have forked. Otherwise those go on alone.
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
        """Reaps dead orphans without waiting; returns True if any orphan is left."""
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
        """Reaps the dead processes of a group; returns True if a process of the group is alive."""
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
        """Kills the orphans that dead processes have forked, and waits until they have ended."""
        while self._reap_orphans():
            for group, _ in self._orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            time.sleep(STANDING_S)

    def interrupt(self, chair: Chair) -> None:
        """Sends SIGINT to the process of a chair, which then goes on."""
        os.kill(chair.pid, signal.SIGINT)

    def stop(self, chair: Chair, seconds: float) -> None:
        """Stops the process of a chair for some seconds."""
        os.kill(chair.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(chair.pid, signal.SIGCONT)


def forked(body: Callable[[], object]) -> int:
    """Forks a process that runs ``body``. Ending with SystemExit is not a failure."""
    return fork(_leaves(body))


def _leaves(body: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with contextlib.suppress(SystemExit):
            body()

    return run


def _nothing_more(*given: object) -> Any:
    """Raises an error, because the account of a second thread has no thread or child of its own."""
    raise NotImplementedError
