"""A run that is killed on purpose, seen from the outside: start, listen, kill, recover, go on.

    Trial ──starts, listens, kills──▶ coordinator ──spawns, restarts──▶ collectors
      └─────starts, listens, kills──▶ learner

The process of the trial only watches: it has no part in the run, and knows of it what the others
tell. After all of them were killed it recovers the directory, asks the items themselves whether
one was lost or torn, and starts everybody again, who go on from what is in the buffers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from shmbuffer import AttachTimeout, BufferNotFoundError, RecoveryReport, attach, recover
from shmbuffer.examples.cartpole import Config, Evaluation, Learning, Service, learn, serve
from shmbuffer.examples.evidence import Evidence, examine

GRACE_S = 15.0
"""How long processes may take to end when they are told to, before they are killed."""

FRUITLESS_STARTS = 3
"""After so many starts in a row that brought the run no further, it is given up."""


@dataclass(frozen=True)
class Plan:
    """When to kill, in steps (None: never), and when the run has come to its end.

    All are killed before the ring has come round: then every item that was ever acknowledged has to
    be there, and `examine` is at its strictest.
    """

    kill_collector_at: int | None = 5_000
    kill_all_at: int | None = 15_000
    goal: float = 475.0
    max_s: float = 600.0


@dataclass(frozen=True)
class Kill:
    """Processes that were killed at once; ``planned`` is False where somebody else began it."""

    what: Literal["a collector", "all"]
    step: int
    pids: tuple[int, ...]
    planned: bool = True


@dataclass(frozen=True)
class Status:
    """How the run is doing at a moment; ``stats`` are the coordinator's."""

    seconds: float
    step: int
    mean_return: float | None
    stats: dict[str, float]


class Watcher(Protocol):
    """Whoever wants to know what happens."""

    def event(self, text: str) -> None:
        """Something happened."""

    def status(self, status: Status) -> None:
        """Some time has passed."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        solved: whether an evaluation after all kills reached the goal.
        evaluations: steps and mean returns.
        seconds: from the first start to the end of the last process.
        kills: what was killed.
        reports: of the recoveries, one a buffer and kill.
        evidence: what the items say, after each recovery and in the end.
        torn_samples: items that the learner was given and that did not fit their stamp.
        stats: the counters of the replay buffer in the end.
    """

    solved: bool
    evaluations: tuple[tuple[int, float], ...]
    seconds: float
    kills: tuple[Kill, ...]
    reports: tuple[RecoveryReport, ...]
    evidence: tuple[Evidence, ...]
    torn_samples: int
    stats: dict[str, float]

    @property
    def mean_return(self) -> float | None:
        """Of the last evaluation."""
        return self.evaluations[-1][1] if self.evaluations else None

    @property
    def lost(self) -> int:
        """Items that were acknowledged and are gone: what is lost once stays lost."""
        return max((each.lost for each in self.evidence), default=0)

    @property
    def torn(self) -> int:
        """Items that did not fit their stamp, in the buffer or as they were sampled."""
        return max((each.torn for each in self.evidence), default=0) + self.torn_samples

    @property
    def recovery_ms(self) -> float:
        """What all recoveries took."""
        return sum(report.duration_ms for report in self.reports)


class Trial:
    """One run, from its start until it is solved or out of time.

    Args:
        run_dir: the directory of the run, which holds none yet.
        config: of the run.
        collectors: how many.
        plan: what to kill when, and what is good enough.
        watcher: is told what happens.
    """

    def __init__(
        self, run_dir: Path, config: Config, collectors: int, plan: Plan, watcher: Watcher
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._collectors = collectors
        self._plan = plan
        self._watcher = watcher
        self._stats: dict[str, float] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._kills: list[Kill] = []
        self._reports: list[RecoveryReport] = []
        self._evidence: list[Evidence] = []
        self._torn_samples = 0

    def play(self) -> Outcome:
        """Runs it.

        Raises:
            RuntimeError: the processes end by themselves as often as they are started.
        """
        self._began_s = time.monotonic()
        self._say(f"the run is in {self._run_dir}")
        on_existing: Literal["error", "recover"] = "error"
        furthest, fruitless = -1, 0
        while True:
            self._say(f"starting a coordinator, {self._collectors} collectors and a learner")
            with Crew(self._run_dir, self._config, self._collectors, on_existing) as crew:
                self._watch(crew)
            if self._is_over():
                break
            fruitless = 0 if self._step > furthest else fruitless + 1
            if fruitless == FRUITLESS_STARTS:
                raise RuntimeError(f"{self._run_dir}: started again and again, and {crew.losses()}")
            furthest = max(furthest, self._step)
            self._recover()
            on_existing = "recover"
        self._examine()
        return Outcome(
            solved=self._is_solved(),
            evaluations=tuple(self._evaluations),
            seconds=self._seconds,
            kills=tuple(self._kills),
            reports=tuple(self._reports),
            evidence=tuple(self._evidence),
            torn_samples=self._torn_samples,
            stats=self._stats,
        )

    # ---- while it runs ----

    def _watch(self, crew: Crew) -> None:
        """Listens and kills, until the run is over or all of the crew are dead."""
        torn_before = self._torn_samples
        deaths: tuple[str, ...] = ()
        while not self._is_over():
            for report in crew.reports(timeout_s=0.2):
                if isinstance(report, Service):
                    self._stats = report.stats
                    for death in report.deaths[len(deaths) :]:
                        self._say(f"coordinator: {death}")
                    deaths = report.deaths
                elif isinstance(report, Learning):
                    self._torn_samples = torn_before + report.torn
                else:
                    self._evaluations.append((report.step, report.mean_return))
            if not crew.is_whole:
                self._say(f"{crew.losses()}; the others are killed")
                self._kill_all(crew, planned=False)
                return
            if self._is_due("a collector", self._plan.kill_collector_at):
                if crew.collectors and self._all_have_joined:
                    pid = crew.kill_collector()
                    self._note(Kill("a collector", self._step, (pid,)))
            elif self._is_due("all", self._plan.kill_all_at) and (
                len(crew.collectors) == self._collectors  # the one that was killed is back
            ):
                self._kill_all(crew, planned=True)
                return
            self._watcher.status(Status(self._seconds, self._step, self._mean_return, self._stats))

    def _kill_all(self, crew: Crew, *, planned: bool) -> None:
        self._note(Kill("all", self._step, crew.kill_all(), planned))
        self._stats |= dict.fromkeys(("inserts_per_s", "samples_per_s", "clients_alive"), 0)

    def _note(self, kill: Kill) -> None:
        self._kills.append(kill)
        pids = ", ".join(map(str, kill.pids))
        self._say(f"step {kill.step:,}: killed {kill.what} with SIGKILL (pid {pids})")

    def _is_due(self, what: str, at: int | None) -> bool:
        done = any(kill.what == what and kill.planned for kill in self._kills)
        return at is not None and self._step >= at and not done

    # ---- after all were killed ----

    def _recover(self) -> None:
        for name in ("replay", "weights"):
            with suppress(BufferNotFoundError):  # the coordinator did not come so far
                report = _recovered(self._run_dir / name)
                self._reports.append(report)
                self._say(str(report))
        self._examine()

    def _examine(self) -> None:
        """Asks the items, and brings the counters up to date; nobody else is there."""
        try:
            replay = attach(self._run_dir / "replay", timeout=0)
        except AttachTimeout:  # as above
            return
        with replay:
            found = examine(replay, self._run_dir / "ledgers")
            self._stats |= replay.stats()
        self._evidence.append(found)
        self._say(
            f"looked at {found.items:,} items; {found.acknowledged:,} were acknowledged to their "
            f"writers: {found.lost:,} of them lost, {found.torn:,} torn"
        )

    # ---- what is known ----

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _step(self) -> int:
        return int(self._stats.get("write_count", 0))

    @property
    def _all_have_joined(self) -> bool:
        """Whether each process has a handle: one that is still starting has nothing to lose."""
        return self._stats.get("clients_alive", 0) >= self._collectors + 2

    @property
    def _mean_return(self) -> float | None:
        return self._evaluations[-1][1] if self._evaluations else None

    def _is_over(self) -> bool:
        return self._is_solved() or self._seconds >= self._plan.max_s

    def _is_solved(self) -> bool:
        """Whether all planned kills were done, and an evaluation after them reached the goal."""
        planned = sum(
            at is not None for at in (self._plan.kill_collector_at, self._plan.kill_all_at)
        )
        done = [kill for kill in self._kills if kill.planned]
        if len(done) < planned or not self._evaluations:
            return False
        step, mean_return = self._evaluations[-1]
        return mean_return >= self._plan.goal and all(step > kill.step for kill in done)

    def _say(self, text: str) -> None:
        self._watcher.event(text)


def _recovered(path: Path) -> RecoveryReport:
    """Recovers a directory whose last users may be about to disappear."""
    deadline_s = time.monotonic() + GRACE_S
    while True:
        report = recover(path)
        if report.reason != "in use" or time.monotonic() > deadline_s:
            return report
        time.sleep(0.01)


class Crew:
    """The processes of a run, from their start until they were dismissed or killed.

    The coordinator and its collectors are a process group, so that one signal reaches them all.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        collectors: int,
        on_existing: Literal["error", "recover"],
    ) -> None:
        self.collectors: tuple[int, ...] = ()
        self._all_killed = False
        self._coordinator = _Role(serve, run_dir, config, collectors, on_existing)
        self._learner = _Role(learn, run_dir, config)

    @property
    def is_whole(self) -> bool:
        """Whether neither the coordinator nor the learner has ended."""
        return not (self._coordinator.has_ended or self._learner.has_ended)

    def reports(self, timeout_s: float) -> Iterator[Service | Learning | Evaluation]:
        """Yields what the coordinator and the learner say, as soon as they say something."""
        roles = {role.control: role for role in (self._coordinator, self._learner)}
        for control in wait(list(roles), timeout_s):
            for report in roles[control].heard():  # type: ignore[index]
                if isinstance(report, Service):
                    self.collectors = report.collectors
                yield report

    def kill_collector(self) -> int:
        """Kills one collector; returns its pid."""
        pid = self.collectors[0]
        self.collectors = self.collectors[1:]  # until the coordinator says that it is back
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> tuple[int, ...]:
        """Kills everybody, and returns who that was once they are dead."""
        self._all_killed = True
        coordinator, learner = self._coordinator.process, self._learner.process
        watched = [fd for pid in self.collectors if (fd := _pidfd(pid)) is not None]
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
        """Says who has ended by himself."""
        return ", ".join(
            f"{role.name} ended with exit code {role.exit_code()}"
            for role in (self._coordinator, self._learner)
            if role.has_ended
        )

    def __enter__(self) -> Self:
        """Starts them; whoever has started is killed if a signal comes meanwhile."""
        try:
            for role in (self._coordinator, self._learner):
                role.start()
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Tells everybody to end, and waits; whoever does not is killed.

        Who has said nothing yet is still starting; that is not worth a wait.
        """
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
    """A process, and the wire to it."""

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
        self._theirs.close()  # so that the wire ends with the process

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
    """Runs a role in a process group of its own: Ctrl-C in a terminal is for the trial alone."""
    os.setpgrp()
    logging.getLogger("shmbuffer").setLevel(logging.ERROR)  # the trial says who has died
    target(*args)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
