"""A random version of the crash matrix, with every passing of a point and two deaths in a row."""

from __future__ import annotations

import itertools
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shmbuffer.memory import Engine
from tests.crash.deeds import PAIRS
from tests.crash.harness import (
    CAPACITY,
    EVICTIONS,
    RECORD_POINTS,
    called,
    native_points,
    require_sound,
    require_usable,
)
from tests.crash.situations import (
    Situation,
    fresh,
    is_committed_at,
    killed_at_passings,
    require_whole_or_absent,
)
from tests.crash.test_company import dies_in_company
from tests.crash.test_compound import two_deaths_and_nobody_left, two_deaths_beside_a_survivor
from tests.crash.test_creation import CALLS, killed_while_creating
from tests.crash.test_instructions import WALKS, mended_states, states_of_a_mender
from tests.crash.test_two_deaths import CASES, Death, after_one_death, points, two_deaths

REPORT_S = 30.0
COMPOUND_STRIDE = 3


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Plays rounds of kills for about ``seconds`` seconds. Each round has its own seed.

    Returns:
        The number of kills of each kind, and the number per second.

    Raises:
        AssertionError: a check failed. The message has the command that repeats the round.
    """
    began, said = time.monotonic(), time.monotonic()
    counts: Counter[str] = Counter(rounds=0, kills=0)
    for number in itertools.count(seed):
        run(number, counts)
        now = time.monotonic()
        if now - said > REPORT_S or now - began > seconds:
            say(f"{counts['rounds']} rounds, {counts['kills']} kills, seed {number}")
            said = now
        if now - began > seconds:
            break
    rate = counts["kills"] / max(time.monotonic() - began, 1e-9)
    return {**counts, "kills_per_second": round(rate, 1)}


def run(seed: int, counts: Counter[str]) -> None:
    """Plays one round."""
    folder = Path(tempfile.mkdtemp(prefix="shmbuffer-crash-campaign-", dir=_memory()))
    draw = random.Random(seed)
    sort, kills = draw.choice(SORTS)
    try:
        found = kills(folder, draw)
    except Exception as error:
        raise AssertionError(
            f"seed {seed} ({sort}): {error}; to repeat it: "
            f"python -m tests.crash.campaign --seconds 0 --seed {seed}"
        ) from error
    finally:
        shutil.rmtree(folder)
    counts["rounds"] += 1
    counts["kills"] += found
    counts[sort] += found


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def situation(draw: random.Random) -> Situation:
    """Draws a number of items in the ring, and a write of any size at any place."""
    before = draw.randrange(2 * CAPACITY)
    if draw.random() < 0.4:
        slots = tuple(draw.sample(range(CAPACITY), draw.randint(1, CAPACITY)))
        in_place = draw.random() < 0.5
        return Situation(before, tuple(range(100, 100 + len(slots))), slots, in_place=in_place)
    return Situation(before, tuple(range(100, 101 + draw.randrange(CAPACITY + 4))))


def writers(folder: Path, draw: random.Random, *, alone: bool) -> int:
    """Kills a writer at every passing of a few points; returns the number of kills."""
    now, kind = situation(draw), draw.choice(("rows", "records"))
    points = [
        point
        for point in native_points("write")
        if point not in EVICTIONS and (kind == "records" or point not in RECORD_POINTS)
        if now.passes(point)
    ]
    kills = 0
    for point in draw.sample(points, 3):

        def look(path: Path, engine: Engine, first: bool, point: str = point) -> None:
            if alone:
                called(lambda: fresh(path, now, expected=is_committed_at(point)))
                return
            engine.seat.reap_dead()
            assert require_whole_or_absent(engine, now) == is_committed_at(point)
            require_sound(engine)
            assert engine.ring() is not None
            require_usable(engine.ring(), 999)

        place = folder / point
        place.mkdir()
        kills += killed_at_passings(
            place, kind, point, now, look, alone=alone, passings=itertools.count()
        )
    return kills


def mending(folder: Path, draw: random.Random) -> int:
    """Kills a process, and then others while they repair after it; returns the number."""
    deed, point = draw.choice(PAIRS)
    two_deaths = draw.choice((two_deaths_beside_a_survivor, two_deaths_and_nobody_left))
    return 1 + two_deaths(folder / "buffer", deed, point, COMPOUND_STRIDE)


def in_company(folder: Path, draw: random.Random) -> int:
    """Kills a dozen processes, one after the other, beside a second writer and a learner."""
    pairs = [pair for pair in PAIRS if pair[0] in ("write", "update", "abort")]
    named = [(deed, point) for deed, point in pairs if point.startswith(f"{deed}.")]
    # These points are passed only if an item is overwritten, or if a priority is the largest so
    # far.
    seldom = ("write.mass", "update.max_priority")
    chosen = draw.sample([pair for pair in named if pair[1] not in seldom], 12)
    dies_in_company(folder / "buffer", [(deed, point, draw.randrange(4)) for deed, point in chosen])
    return len(chosen)


def creating(folder: Path, draw: random.Random) -> int:
    """Kills a creator at every passing of a random system call."""
    return killed_while_creating(folder, draw.choice(("rows", "records")), draw.choice(CALLS))


def one_after_the_other(folder: Path, draw: random.Random) -> int:
    """Kills two processes that create, define, resize, recover or remove, at any passing."""
    case, kind = CASES[draw.choice(list(CASES))], draw.choice(("rows", "records"))
    first = _any_death(points(case.first, folder / "watched", kind), draw)
    passed = after_one_death(folder / "once", kind, case, first)
    if not passed:
        return 1
    second, survivor = _any_death(passed, draw), draw.random() < 0.5
    return 1 + two_deaths(folder / "twice", kind, case, first, second, survivor=survivor)


def _any_death(passed: list[str], draw: random.Random) -> Death:
    at = draw.randrange(len(passed))
    return passed[at], passed[:at].count(passed[at])


def by_instruction(folder: Path, draw: random.Random) -> int:
    """Tries every state of a deed or of its repair; each state counts as a kill in the figures."""
    if platform.machine() != "x86_64":
        return 0
    kind = draw.choice(("rows", "records"))
    if draw.random() < 0.5:
        deed = draw.choice([deed for deed in WALKS if kind == "rows" or deed != "abort"])
        return mended_states(folder / "buffer", deed, alone=draw.random() < 0.5, kind=kind)
    point = draw.choice(
        [
            *("write.mark", "write.mass", "write.head", "write.goal", "write.leaf"),
            *("write.commit", "empty.word", "empty.leaf", "update.raw", "update.leaf"),
        ]
    )
    return states_of_a_mender(folder / "buffer", point, draw.randrange(3), kind)


SORTS: list[tuple[str, Callable[[Path, random.Random], int]]] = [
    ("writers_beside_a_survivor", partial(writers, alone=False)),
    ("writers_alone", partial(writers, alone=True)),
    ("second_deaths", mending),
    ("in_company", in_company),
    ("creators", creating),
    ("one_after_the_other", one_after_the_other),
    ("states_by_instruction", by_instruction),
]


if __name__ == "__main__":
    from tests.torture.command import main

    raise SystemExit(main(campaign))
