"""Plays the faults of one scenario, one after the other.

It is also a program that is started with the preloaded library:

    python -m tests.faults.sweep [--torch] [--broken]

The program reads one line of JSON for each scenario and answers with another one. Python, numpy and
torch, which take long to load, are therefore loaded only once.
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

#: Errors after which the call is repeated, so the caller does not notice them.
_REPEATED = (errno.EINTR, errno.EAGAIN, SHORT)
#: Calls that check whether a client still holds its lock.
_ASKING = ("open", "fstat", "flock")


#: Files that torch maps itself while a save is created. If torch cannot map a file, its descriptor
#: stays open. If it cannot close the descriptor, the map stays.
_WITH_TORCH = re.compile(r"/save/.*/storage/.*\.memmap$")


@dataclass
class Found:
    """The result of a sweep.

    Attributes:
        calls: number of calls that the scenario makes without a fault.
        kinds: the kinds of these calls.
        cases: number of faults that were played.
        refused: number of cases that raised an error. The other faults had no effect.
        problems: descriptions of violated rules, one text each.
    """

    calls: int = 0
    cases: int = 0
    refused: int = 0
    kinds: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sweep(name: str, kind: str, *, count: int, seed: int, on: str = "", only: str = ".*") -> Found:
    """Plays faults on a scenario.

    Args:
        name: the name of the scenario.
        kind: rows or records.
        count: number of faults, which are drawn with the seed. 0 plays every errno at every call,
            once and from then on, in a process that stays and in one that dies.
        seed: seed of the draw.
        on: a regular expression. Only calls are used whose kind and path match it.
        only: a regular expression. Only faults are used whose whole description matches it.
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
    """Draws cases: first those that differ in the kind and path of their call, then any."""
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
    """Returns the path of a call; for a step on the way to a file, the path of that file."""
    path = calls[at].path
    if calls[at].kind in ("open", "fstat"):
        for call in calls[at + 1 : at + 6]:
            path = call.path if call.path.startswith(f"{path}/") else path
    return path


def is_of_no_consequence(fault: Fault, call: Call, reached: str, make: type[Scenario]) -> bool:
    """True if the caller does not have to be told of this fault."""
    return (
        fault.error in _REPEATED
        or call.kind in ("close", "unlock")  # both are done even if they return an error
        or call.path.startswith("/proc/")  # an unknown fact proves nothing
        # nor does a lock: the client counts as alive
        or (call.kind in _ASKING and "/.shmbuffer/procs/" in reached)
        or call.path.endswith("/tmp")  # the janitor looks for abandoned files there
        or (make.unheard is not None and make.unheard in reached)
        # the directory belongs to the user
        or re.fullmatch(r".*/shmbuffer-faulted-\w{8}", call.path) is not None
        # the directory contains other files
        or (call.kind == "rmdir" and call.path.endswith("/buffer"))
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
    gc.freeze()  # so that a forked child does not write to objects that it only reads
    for line in sys.stdin:
        print(json.dumps(asdict(sweep(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
