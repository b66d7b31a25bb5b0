"""Random kills: processes that use the C core and numpy die at any instruction.

    python -m tests.torture.kills --seconds 60 --seed 1

A round is one directory with a ring, writers, learners and a coordinator, all drawn from the seed.
One more process forks beside a working thread, and another one is interrupted (SIGINT) in every
call. Some processes are in containers: they have their own namespaces and another boot id. The
campaign kills, stops or terminates processes at random times and replaces them. Meanwhile it copies
the directory.

From time to time all processes stand still, or all of them are killed. In the second case a copy
may be put back, and the directory is recovered by processes of which some are killed as well. Then
a new process reads the directory, both with the engine and without it, and compares the contents
with the logs of all processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory import Engine
from tests.torture.arena import Arena, Chair, forked
from tests.torture.command import Figures, Say, added, main, repeatable, seeds
from tests.torture.containers import are_possible
from tests.torture.copies import Copies
from tests.torture.history import NO_OUTCOME, History, Kind
from tests.torture.image import Image
from tests.torture.mixed import visit
from tests.torture.plan import Plan
from tests.torture.roles import read, roles, sample
from tests.torture.rules import violations
from tests.torture.visitor import CoreVisitor

#: Number of kills in a round.
KILLS = 250
#: Longest time between two events. Times are drawn uniformly on a logarithmic scale.
LONGEST_S = 0.02
EVENTS = {
    "writer": 28,
    "learner": 8,
    "coordinator": 6,
    "forker": 10,
    "visitor": 10,
    "interrupt": 60,
    "copy": 16,
    "all": 9,
    "stop": 3,
    "term": 2,
    "look": 4,
}
#: Smallest and largest share of a round's processes that are in containers.
CONTAINED = (0.2, 0.6)
#: Probabilities with which 0, 1, ... copies are put back, one after the other, when all are dead.
PUT_BACK = (0.1, 0.15, 0.25, 0.25, 0.25)


def pause_of(rng: np.random.Generator, longest: float = LONGEST_S) -> float:
    """Draws a number of seconds, log-uniformly from one microsecond to ``longest``."""
    return float(np.exp(rng.uniform(np.log(1e-6), np.log(longest))))


def round_of_kills(folder: Path, seed: int, *, kills: int = KILLS) -> Figures:
    """Plays a round in one directory with about ``kills`` kills; returns what was checked."""
    rng = np.random.default_rng(seed)
    plan = Plan.drawn(rng, records=bool(rng.random() < 0.5))
    path = folder / "buffer"
    with Engine.open(path, plan.settings) as engine:
        engine.define(plan.schema)
    chairs = ["writer"] * plan.writers + ["learner"] * plan.learners
    chairs += ["coordinator", "forker", "forker", "visitor"]
    apart = containers_of(folder, chairs, rng)
    playing = {**roles(path, plan), "visitor": lambda who: visit(who, CoreVisitor(who, path, plan))}
    with Arena(folder / "logs", playing, chairs, seed, containers=apart) as arena:
        copies = Copies(path, arena.logs, plan.capacity)

        def look() -> Figures:
            with Engine.open(path, None) as engine:
                settle(engine)
                assert engine.ring() is not None
                copies.recovered(engine.ring().head, engine.ring().write_count)
                return audit(engine, path, arena.logs, plan, seed, boots=1 + bool(apart))

        return fight(arena, rng, kills, copies, look, lambda: Engine.open(path, None))


def containers_of(folder: Path, chairs: list[str], rng: np.random.Generator) -> dict[int, Path]:
    """Draws the chairs that are in containers; returns the boot id file of each by number."""
    boot_id = folder / "boot_id"
    boot_id.write_text(f"{uuid.UUID(bytes=rng.bytes(16))}\n")
    drawn = np.flatnonzero(rng.random(len(chairs)) < rng.uniform(*CONTAINED)) + 1
    return dict.fromkeys(drawn.tolist(), boot_id) if are_possible(boot_id) else {}


def fight(
    arena: Arena,
    rng: np.random.Generator,
    kills: int,
    copies: Copies,
    audit: Callable[[], Figures],
    recover: Callable[[], object],
) -> Figures:
    """Kills and audits until ``kills`` processes have died, and audits once more at the end."""
    figures: Figures = {"rounds": 1, "kills": 0, "audits": 0}
    names, weights = list(EVENTS), np.array(list(EVENTS.values()), float)
    if not any(chair.container for chair in arena.chairs):
        figures["rounds_without_containers"] = 1

    def kill(victims: list[Chair], number: int = signal.SIGKILL, *, whole: bool = True) -> None:
        contained = sum(chair.container is not None for chair in victims)
        died = arena.kill(victims, number, whole=whole)
        added(figures, {"kills": died} if number == signal.SIGKILL else {"terminated": 1})
        added(figures, {"namespaces_killed": contained if number == signal.SIGKILL else 0})

    def check(more: Figures) -> None:
        added(figures, {"audits": 1, **more, **_latest(audited(audit), figures)})
        copies.noted()

    arena.fill()
    while True:
        time.sleep(pause_of(rng))
        event = str(rng.choice(names, p=weights / weights.sum()))
        over = figures["kills"] >= kills
        if over or event == "all":
            kill(arena.chairs)
            arena.end_orphans()
            figures["kills"] += _recoveries_killed(recover, rng)
            check({"recoveries": 1})
            for _ in range(int(rng.choice(len(PUT_BACK), p=PUT_BACK))):
                if copies.put_back(rng):
                    figures["kills"] += _recoveries_killed(recover, rng)
                    check({"recoveries": 1, "restores": 1})
            if over:
                return figures
        elif event == "look":
            arena.still()
            check({})
            arena.go()
        elif event == "copy":
            added(figures, {"copies": int(copies.make())})
        else:
            victim = _victim(arena, rng, "visitor" if event == "interrupt" else event)
            if event == "interrupt":
                arena.interrupt(victim)
            elif event == "stop":
                arena.stop(victim, pause_of(rng))
            elif event == "term":
                kill([victim], signal.SIGTERM)
            else:
                kill([victim], whole=bool(rng.random() < 0.5))
        arena.fill()


def _latest(audit: Figures, figures: Figures) -> Figures:
    """Returns the counts of an audit, and the growth of the round's logs since the last one."""
    return {
        name: figure - figures.get(name, 0) if name.startswith("logged_") else figure
        for name, figure in audit.items()
    }


def _victim(arena: Arena, rng: np.random.Generator, role: str) -> Chair:
    chairs = [chair for chair in arena.chairs if chair.role == role] or arena.chairs
    return chairs[int(rng.integers(len(chairs)))]


def _recoveries_killed(recover: Callable[[], object], rng: np.random.Generator) -> int:
    """Kills some recovering processes, one after the other. Each restarts the recovery."""
    killed = 0
    while rng.random() < 0.5:
        pid = forked(recover)
        time.sleep(pause_of(rng, 0.01))
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), f"recovery ended with {status}"
        killed += status == -signal.SIGKILL
    return killed


def audited(look: Callable[[], Figures]) -> Figures:
    """Audits the directory in a new process, while all others stand still."""
    hear, tell = os.pipe()
    pid = forked(lambda: os.write(tell, json.dumps(look()).encode()))
    os.close(tell)
    with os.fdopen(hear, "rb") as told:
        answer = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the audit failed with {status}; its traceback is above"
    found: Figures = json.loads(answer)
    return found


def settle(engine: Engine) -> None:
    """Finishes what the dead processes left, such as the mutex and claimed slots."""
    engine.stats()
    engine.seat.reap_dead()


def audit(
    engine: Engine, path: Path, logs: Path, plan: Plan, seed: int, *, boots: int = 1
) -> Figures:
    """Checks the directory by the documented format and by the engine, and compares both."""
    ring = engine.ring()
    assert ring is not None
    image, history = Image(path), History.read(logs)
    broken = violations(history, image, mean_words=plan.mean_words, boots=boots)
    assert not broken, "\n".join(["rules are broken", *broken])
    report = engine.check()
    assert report.ok, str(report)
    there = read(ring, plan)
    assert sorted(there) == image.committed.tolist()
    if there:
        keys, index, tickets, weights = sample(ring, plan, np.random.default_rng(seed), 64)
        require_drawn_from(image, index, tickets, weights)
        assert [there[slot] for slot in index.tolist()] == keys.tolist()
    return counted(history, len(there))


def require_drawn_from(
    image: Image,
    index: NDArray[np.int64],
    tickets: NDArray[np.int64],
    weights: NDArray[np.float32],
    beta: float = 0.5,
) -> None:
    """Checks H12 for a sample that was drawn by priority while the buffer did not change."""
    assert (image.tickets[index] == tickets).all()
    least = image.mass[image.mass > 0].min()
    expected = (image.mass[index] / least) ** -beta
    assert np.allclose(weights, expected, rtol=1e-5), "H12: a weight is wrong"


def counted(history: History, there: int) -> Figures:
    """Counts what an audit has checked."""
    return {
        "items_checked": there,
        "logged_writes": len(history.batches),
        "logged_open_writes": int(np.count_nonzero(history.batches["ticket"] == NO_OUTCOME)),
        "logged_samples": len(history.samples),
        "logged_updates": len(history.updates),
        "logged_forks": int(np.count_nonzero(history.marks["kind"] == Kind.FORKED)),
        "logged_interrupts": int(np.count_nonzero(history.marks["kind"] == Kind.INTERRUPTED)),
    }


def scratch() -> Path:
    """Returns a directory in memory if the machine has one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="shmbuffer-torture-", dir=base))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Plays rounds for about ``seconds`` seconds, and at least one."""
    return rounds(__spec__.name, round_of_kills, seconds, seed, say)


def rounds(
    module: str, play: Callable[[Path, int], Figures], seconds: float, seed: int, say: Say
) -> Figures:
    """Plays one round for each seed, in a folder of its own."""
    figures: Figures = {}
    began = time.monotonic()
    for one in seeds(seed, seconds):
        folder = scratch()
        try:
            with repeatable(module, one):
                added(figures, play(folder, one))
        finally:
            shutil.rmtree(folder)
        rate = figures["kills"] / (time.monotonic() - began)
        say(f"{module}: seed {one}, {figures['kills']:,} kills, {rate:.1f} a second")
    return figures


if __name__ == "__main__":
    sys.exit(main(campaign))
