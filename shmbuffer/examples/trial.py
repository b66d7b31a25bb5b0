"""A run that is killed on purpose, seen from the outside: start, listen, kill, recover, go on.

    Trial ──starts, listens, kills──▶ coordinator ──spawns, restarts──▶ collectors
      └─────starts, listens, kills──▶ learner

The process of the trial only watches: it has no part in the run, and knows of it what the others
tell. After all of them were killed it recovers the directory, asks the items themselves whether
one was lost or torn, and starts everybody again, who go on from what is in the buffers.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shmbuffer import AttachTimeout, BufferNotFoundError, RecoveryReport, attach, recover
from shmbuffer.examples.cartpole import Config, Learning, Service
from shmbuffer.examples.crew import GRACE_S, Crew
from shmbuffer.examples.evidence import Evidence, examine

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
