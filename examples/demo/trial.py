"""Starts a run, kills its processes on purpose, recovers the buffer, and continues the run.

    Trial ──starts, listens, kills──▶ coordinator ──spawns, restarts──▶ collectors
      └─────starts, listens, kills──▶ learner

The process of the trial takes no part in the run, and only reads the reports of the other
processes. After it has killed all of them, it recovers the directory, examines the items for lost
or torn ones, and starts the processes again. They continue from the buffers.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from shmbuffer import AttachTimeout, BufferNotFoundError, RecoveryReport, attach, recover
from shmbuffer.examples.cartpole import Config, Learning, Service
from shmbuffer.examples.crew import GRACE_S, Crew
from shmbuffer.examples.evidence import Evidence, examine

FRUITLESS_STARTS = 3
"""Number of consecutive starts without progress after which the run is abandoned."""


@dataclass(frozen=True)
class TrialPlan:
    """Steps at which to kill (None: never), and limits of the run."""

    # All processes are killed before the goal is reached, so that the training has to continue,
    # and before the ring is full, so that each acknowledged item must still exist.

    kill_collector_at: int | None = 1_500
    kill_all_at: int | None = 3_000
    goal: float = 475.0
    max_s: float = 600.0


@dataclass(frozen=True)
class Kill:
    """Processes that were killed together; ``planned`` is False if a process had ended itself."""

    what: Literal["a collector", "all"]
    step: int
    pids: tuple[int, ...]
    planned: bool = True


class Watcher(Protocol):
    """Base class of objects that are informed about a trial."""

    def event(self, text: str) -> None:
        """Receives the description of an event."""

    def status(self, outcome: Any) -> None:
        """Receives the outcome of the run so far, at intervals."""


@dataclass
class Outcome:
    """Result of a run so far."""

    solved: bool = False  # True if an evaluation after all kills reached the goal
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # steps and mean returns
    seconds: float = 0.0  # time since the first start
    kills: list[Kill] = field(default_factory=list)
    # reports of the recoveries, one per buffer and kill
    reports: list[RecoveryReport] = field(default_factory=list)
    # results of examining the items, after each recovery and at the end
    evidence: list[Evidence] = field(default_factory=list)
    torn_samples: int = 0  # number of sampled items that did not match their stamp
    # counters of the replay buffer; during the run, those in the coordinator's last report
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of steps over all environments."""
        return int(self.stats.get("write_count", 0))

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last evaluation."""
        return self.evaluations[-1][1] if self.evaluations else None

    @property
    def lost(self) -> int:
        """Largest number of acknowledged items that were missing in any examination."""
        return max((each.lost for each in self.evidence), default=0)

    @property
    def torn(self) -> int:
        """Number of items, in the buffer and in samples, that did not match their stamp."""
        return max((each.torn for each in self.evidence), default=0) + self.torn_samples

    @property
    def recovery_ms(self) -> float:
        """Total time of all recoveries in milliseconds."""
        return sum(report.duration_ms for report in self.reports)


class Trial:
    """A run, from its start until the task is solved or the time limit is reached."""

    def __init__(self, run_dir: Path, config: Config, plan: TrialPlan, watcher: Watcher) -> None:
        self._run_dir = run_dir
        self._config = config
        self._plan = plan
        self._watcher = watcher
        self._outcome = Outcome()

    def play(self) -> Outcome:
        """Runs the trial, and returns its outcome."""
        outcome, self._began_s = self._outcome, time.monotonic()
        self._say(f"the run is in {self._run_dir}")
        on_existing: Literal["error", "recover"] = "error"
        furthest, fruitless = -1, 0
        while True:
            self._say(f"starting a coordinator, {self._config.collectors} collectors and a learner")
            with Crew(self._run_dir, self._config, on_existing) as crew:
                self._watch(crew)
            if self._is_over():
                break
            fruitless = 0 if outcome.step > furthest else fruitless + 1
            if fruitless == FRUITLESS_STARTS:
                raise RuntimeError(f"{self._run_dir}: started again and again, and {crew.losses()}")
            furthest = max(furthest, outcome.step)
            self._recover()
            on_existing = "recover"
        self._examine()
        return outcome

    # ---- during the run ----

    def _watch(self, crew: Crew) -> None:
        """Reads reports and kills processes, until the run is over or all processes are dead."""
        outcome, torn_before = self._outcome, self._outcome.torn_samples
        deaths: tuple[str, ...] = ()
        while not self._is_over():
            for report in crew.reports(timeout_s=0.2):
                if isinstance(report, Service):
                    outcome.stats = report.stats
                    for death in report.deaths[len(deaths) :]:
                        self._say(f"coordinator: {death}")
                    deaths = report.deaths
                elif isinstance(report, Learning):
                    outcome.torn_samples = torn_before + report.torn
                else:
                    outcome.evaluations.append((report.step, report.mean_return))
            if not crew.is_whole:
                self._say(f"{crew.losses()}; the others are killed")
                self._kill_all(crew, planned=False)
                return
            if self._is_due("a collector", self._plan.kill_collector_at):
                if crew.collectors and self._all_have_joined:
                    pid = crew.kill_collector()
                    self._note(Kill("a collector", outcome.step, (pid,)))
            elif self._is_due("all", self._plan.kill_all_at) and (
                len(crew.collectors)
                == self._config.collectors  # the killed collector was restarted
            ):
                self._kill_all(crew, planned=True)
                return
            self._watcher.status(outcome)

    def _kill_all(self, crew: Crew, *, planned: bool) -> None:
        self._note(Kill("all", self._outcome.step, crew.kill_all(), planned))
        self._outcome.stats |= dict.fromkeys(
            ("inserts_per_s", "batches_sampled_per_s", "clients_alive"), 0
        )

    def _note(self, kill: Kill) -> None:
        self._outcome.kills.append(kill)
        pids = ", ".join(map(str, kill.pids))
        self._say(f"step {kill.step:,}: killed {kill.what} with SIGKILL (pid {pids})")

    def _is_due(self, what: str, at: int | None) -> bool:
        done = any(kill.what == what and kill.planned for kill in self._outcome.kills)
        return at is not None and self._outcome.step >= at and not done

    # ---- after all were killed ----

    def _recover(self) -> None:
        with suppress(
            BufferNotFoundError
        ):  # the coordinator was killed before it created the buffer
            report = _recovered(self._run_dir / "replay")
            self._outcome.reports.append(report)
            self._say(str(report))
        self._examine()

    def _examine(self) -> None:
        """Examines the items, and updates the counters, after all other processes have ended."""
        try:
            replay = attach(self._run_dir / "replay", timeout=0)
        except AttachTimeout:  # the coordinator was killed before it created the schema
            return
        with replay:
            found = examine(replay, self._run_dir / "ledgers")
            self._outcome.stats |= replay.stats()
        self._outcome.evidence.append(found)
        self._say(
            f"looked at {found.items:,} items; {found.acknowledged:,} were acknowledged to their "
            f"writers: {found.lost:,} of them lost, {found.torn:,} torn"
        )

    # ---- state of the run ----

    @property
    def _all_have_joined(self) -> bool:
        """True if all processes have attached, so that a kill can lose something."""
        return self._outcome.stats.get("clients_alive", 0) >= self._config.collectors + 2

    def _is_over(self) -> bool:
        """True after the time limit, or once the goal was reached after all planned kills."""
        outcome, plan = self._outcome, self._plan
        outcome.seconds = time.monotonic() - self._began_s
        planned = [plan.kill_collector_at, plan.kill_all_at]
        done = [kill.step for kill in outcome.kills if kill.planned]
        if len(done) == len(planned) - planned.count(None) and outcome.evaluations:
            step, mean_return = outcome.evaluations[-1]
            outcome.solved = mean_return >= plan.goal and step > max(done, default=-1)
        return outcome.solved or outcome.seconds >= plan.max_s

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
