"""Fault after fault on one scenario: which there are, and what was found.

A program, too, started with the preloaded library:

    python -m tests.faults.sweep [--torch] [--broken]

reads a line of JSON for each scenario and answers with one. So what takes long, loading Python,
numpy and torch, is done once for all of them.
"""

from __future__ import annotations

import errno
import gc
import json
import random
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import filelock  # noqa: F401 - the first lock loads it, and that is not what is looked at here

from tests.faults.injector import SHORT, Call, Fault, faults_at
from tests.faults.runner import run
from tests.faults.scenario import Scenario
from tests.faults.scenarios import SCENARIOS

#: Of a call that is repeated nobody hears.
_REPEATED = (errno.EINTR, errno.EAGAIN, SHORT)
#: Calls that ask whether a client still holds its lock.
_ASKING = ("open", "fstat", "flock")


#: What torch maps by itself while a save's files are made. If it cannot map one, its descriptor
#: stays open; if it cannot close that, the map stays.
_WITH_TORCH = re.compile(r"/save/.*/storage/.*\.memmap$")


@dataclass
class Found:
    """What a sweep found.

    Attributes:
        calls: that the scenario makes without a fault.
        kinds: of these calls.
        cases: faults that were played.
        refused: of them, those that ended in an error; the others were of no consequence.
        problems: what must not be, one text each.
    """

    calls: int = 0
    cases: int = 0
    refused: int = 0
    kinds: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sweep(name: str, kind: str, *, count: int, seed: int, on: str = "", only: str = ".*") -> Found:
    """Play faults on a scenario.

    Args:
        name: of the scenario.
        kind: rows or records.
        count: how many faults, drawn with the seed; 0: every errno at every call, once and from
            then on, of a process that stays and of one that dies.
        seed: of the draw.
        on: a regular expression; only calls are meant whose kind and path have it in them.
        only: another one; only faults are meant that a problem names so.
    """
    make = SCENARIOS[name]
    first = run(make, kind, None, stays=True)
    found = Found(calls=len(first.calls))
    if first.problems:
        found.problems = [f"{name} of {kind} without a fault: {text}" for text in first.problems]
        return found
    found.kinds = sorted({call.kind for call in first.calls})
    cases = [
        (fault, stays)
        for at, call in enumerate(first.calls)
        if re.search(on, f"{call.kind} {call.path}")
        if not (call.kind in ("mmap", "close") and _WITH_TORCH.search(call.path))
        for fault in faults_at(at, call)
        for stays in (True, False)
        if re.fullmatch(only, text_of(fault, stays))
    ]
    if count:
        cases = drawn(cases, first.calls, count, random.Random(f"{seed} {name} {kind}"))
    for fault, stays in cases:
        outcome = run(make, kind, fault, stays=stays)
        found.cases += 1
        found.refused += outcome.raised is not None
        call = first.calls[fault.at]
        heard = outcome.raised is not None or outcome.done
        reached = destination(first.calls, fault.at)
        if not heard and not is_of_no_consequence(fault, call, reached, make):
            outcome.problems.append("nobody heard of it")
        found.problems += [
            f"{name} of {kind}, {text_of(fault, stays)} ({call.kind} {call.path}): {problem}"
            for problem in outcome.problems
        ]
    return found


def text_of(fault: Fault, stays: bool) -> str:
    return f"{fault}, {'stays' if stays else 'dies'}"


def drawn(
    cases: list[tuple[Fault, bool]], calls: list[Call], count: int, random: random.Random
) -> list[tuple[Fault, bool]]:
    """Some of the cases: first those that differ in what is called on what, then any."""
    random.shuffle(cases)
    seen: set[tuple[str, str]] = set()
    fresh, others = [], []
    for case in cases:
        call = calls[case[0].at]
        key = (call.kind, re.sub(r"[0-9a-f]{16}|[0-9]+", "", call.path))
        (others if key in seen else fresh).append(case)
        seen.add(key)
    return (fresh + others)[:count]


def destination(calls: list[Call], at: int) -> str:
    """The path that a call is on; of a step on the way to a file, that of the file."""
    path = calls[at].path
    if calls[at].kind in ("open", "fstat"):
        for call in calls[at + 1 : at + 6]:
            path = call.path if call.path.startswith(f"{path}/") else path
    return path


def is_of_no_consequence(fault: Fault, call: Call, reached: str, make: type[Scenario]) -> bool:
    """Whether it is right that the caller hears nothing of this fault."""
    return (
        fault.error in _REPEATED
        or call.kind in ("close", "unlock")  # both are done whatever the system says
        or call.path.startswith("/proc/")  # a fact that is not known proves nothing
        or (call.kind in _ASKING and "/.shmbuffer/procs/" in reached)  # nor a lock: it is alive
        or call.path.endswith("/tmp")  # where the janitor looks for what was abandoned
        or (make.unheard is not None and make.unheard in reached)
        or re.fullmatch(r".*/shmbuffer-faulted-\w{8}", call.path) is not None  # it is the user's
        or (call.kind == "rmdir" and call.path.endswith("/buffer"))  # something else is in it
    )


def main() -> None:
    if "--torch" in sys.argv:
        from tests.faults.checkpoint_scenarios import SCENARIOS as WITH_TORCH

        with suppress(ModuleNotFoundError):
            import pyarrow.parquet  # noqa: F401 - once, and not in each child
        SCENARIOS.update(WITH_TORCH)
    if "--broken" in sys.argv:
        from tests.faults.broken_scenarios import SCENARIOS as BROKEN

        SCENARIOS.update({scenario.__name__: scenario for scenario in BROKEN})
    gc.freeze()  # so that a forked child does not write to what it only looks at
    for line in sys.stdin:
        print(json.dumps(asdict(sweep(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
