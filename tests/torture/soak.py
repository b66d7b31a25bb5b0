"""A long run with a kill every two seconds, in which memory and files must not grow.

    python -m tests.torture.soak --seconds 28800 --seed 1

The run has four writers and some learners. One writer, one learner and the coordinator are never
killed. Their memory, descriptors, maps and threads must not grow while other processes come and go.
The size of the directory and the number of locks on it must not grow either. The rules are checked
during the run, and items that have been overwritten are removed from the logs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shmbuffer.memory import Engine
from tests.torture.arena import Arena, Chair, Role
from tests.torture.command import Figures, Say, main, repeatable
from tests.torture.history import History
from tests.torture.image import Image
from tests.torture.kills import audit, audited, scratch, settle
from tests.torture.plan import Plan
from tests.torture.roles import roles
from tests.torture.rules import Rules
from tests.torture.slopes import Slope

CHAIRS = ["writer", "learner", "coordinator", "writer", "writer", "writer", "learner"]
SURVIVORS = 3
PACE_S = 0.001
KILL_EVERY_S = 2.0
#: Number of kills between two audits.
LOOK_EVERY = 15
#: Growth that is allowed over the whole run. Smaller growth is noise, or at least no leak.
ALLOWED = {"rss_kib": 2048.0}
#: Share of the run at the beginning that is not measured, because caches fill.
WARM_UP = 0.2


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Runs for about ``seconds`` seconds, but long enough that a line can be fitted."""
    folder = scratch()
    try:
        with repeatable(__spec__.name, seed):
            return soak(folder, seconds, seed, say)
    finally:
        shutil.rmtree(folder)


def soak(
    folder: Path,
    seconds: float,
    seed: int,
    say: Say,
    *,
    kill_every_s: float = KILL_EVERY_S,
    more_roles: Mapping[str, Role] | None = None,
) -> Figures:
    """Kills and audits until the time is over, and then fits the lines.

    Args:
        folder: folder for the buffer and the logs.
        seconds: duration of the run.
        seed: seed of the victims and of the processes.
        say: called with a message after each audit.
        kill_every_s: time between two kills.
        more_roles: roles that replace those of the chairs.
    """
    rng = np.random.default_rng(seed)
    record_bytes = 2**17 if rng.random() < 0.5 else 0
    plan = Plan(1024, 200, 32, record_bytes, 4, 2, 0.6)
    path = folder / "buffer"
    with Engine.open(path, plan.settings) as engine:
        engine.define(plan.schema)
    players = {**roles(path, plan), **(more_roles or {})}
    series = Series(path)
    kills = looks = 0
    end = time.monotonic() + seconds
    with Arena(folder / "logs", players, CHAIRS, seed, pace_s=PACE_S) as arena:

        def look() -> Figures:
            with Engine.open(path, None) as engine:
                settle(engine)
                found = audit(engine, path, arena.logs, plan, seed)
            forget_what_is_overwritten(path, arena.logs, plan)
            return found

        arena.fill()
        while time.monotonic() < end or kills < 10:
            time.sleep(kill_every_s)
            kills += arena.kill([arena.chairs[int(rng.integers(SURVIVORS, len(CHAIRS)))]])
            arena.fill()
            arena.still()
            series.measure(arena.chairs[:SURVIVORS])
            if kills % LOOK_EVERY == 1:
                found = audited(look)
                looks += 1
                say(f"soak: {kills} kills, {found['items_checked']} items checked")
            arena.go()
    slopes = series.slopes()
    for slope in slopes:
        say(f"soak: {slope}")
    for slope in slopes:
        allowed = ALLOWED.get(slope.name.partition(" of ")[0], 0.5)
        if slope.name != "written a second":
            assert slope.grown() < allowed, f"it grows: {slope}"
    figures: Figures = {"kills": kills, "looks": looks, "seconds": round(series.seconds)}
    for slope in slopes:
        if slope.name in ("locks", "files") or slope.name.startswith("rss_kib"):
            figures[f"{slope.name}, an hour"] = 3600 * slope.a_second
    return figures


def forget_what_is_overwritten(path: Path, logs: Path, plan: Plan) -> None:
    """Shortens the logs: of items that were overwritten, only the totals remain."""
    image, history = Image(path), History.read(logs)
    rules = Rules(history, image, plan.mean_words)
    assert not list(rules.moved())
    history.batches = rules.batches
    oldest = image.tickets[image.committed].min(initial=image.head)
    history.forget(logs, min(int(oldest), image.head - image.capacity))


class Series:
    """Values that are measured after each kill, while all processes stand still."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: list[float] = []
        self.values: dict[str, list[float]] = defaultdict(list)
        self._written = (time.monotonic(), 0)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    def measure(self, chairs: list[Chair]) -> None:
        """Measures the processes in these chairs, and the directory."""
        now = time.monotonic()
        self.times.append(now)
        for chair in chairs:
            for name, value in _process(chair.pid).items():
                self.values[f"{name} of {chair.role}"].append(value)
        files = [one for one in self.path.rglob("*") if one.is_file()]
        self.values["files"].append(len(files))
        ours = {_in_proc_locks(one.stat()) for one in files}
        locks = (field for line in _lines("/proc/locks") for field in line.split() if field in ours)
        self.values["locks"].append(len(list(locks)))
        written = Image(self.path).write_count
        since, before = self._written
        self.values["written a second"].append((written - before) / (now - since))
        self._written = (now, written)

    def slopes(self) -> list[Slope]:
        """Fits a line to each series without its warm-up."""
        first = int(len(self.times) * WARM_UP)
        return [
            Slope.of(name, self.times[first:], values[first:])
            for name, values in self.values.items()
        ]


def _in_proc_locks(found: os.stat_result) -> str:
    """Returns the name that /proc/locks uses for a file (proc_locks(5))."""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _process(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in _lines(f"/proc/{pid}/status"))
    return {
        "rss_kib": float(status["RssAnon"].split()[0]),
        "threads": float(status["Threads"]),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "mapped files": float(sum("/" in line for line in _lines(f"/proc/{pid}/maps"))),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


if __name__ == "__main__":
    sys.exit(main(campaign))
