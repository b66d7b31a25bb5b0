"""How long is the mutex held, and what would be written and learned with more processors?

All calls take the same mutex, so more processors cannot shorten the sum of the locked sections. The
sections are measured in the released core, between which and libc `holds.c` is loaded. Rows that
begin with "modelled" are results of `scaling.py` for the measured sections. Rows that begin with
"measured" were measured on this machine.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import Setting
from benchmarks.library import INDEX, TENSORDICT, Operation
from benchmarks.measure import Contender, Series, interleave
from benchmarks.peer import Peer
from benchmarks.scaling import Role, simulate

ITEMS = ("S",)
WRITTEN, DRAWN = 32, 256
BESIDE = 4
PROCESSORS, WRITERS = 16, (1, 4, 16, 64)
MANY, STEP_US = 64, (0, 1, 3, 10)  # processors, a writer on each; time of an environment's step
OPERATIONS = (
    Operation("extend", 1, TENSORDICT),
    Operation("extend", WRITTEN, TENSORDICT),
    Operation("sample", DRAWN, TENSORDICT),
    Operation("update", DRAWN, INDEX),
    Operation("cycle", DRAWN, TENSORDICT),
)
_MODELLED_S = 0.2
_BUSY = "the mutex is held"
_SHARES = {"p50": 50, "p99": 99, "max": 100}


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    with ExitStack() as stack:
        scratch = stack.enter_context(setting.scratch())
        preload = str(compile_holds(scratch))
        log = scratch / "held.log"
        held = Peer("shmbuffer", sys.executable, log, module="benchmarks.held", preload=preload)
        stack.callback(held.end)
        held.open(str(scratch), setting.kind.name, setting.capacity, True)
        held.share(max(_beside()), WRITTEN)
        return interleave(setting.rounds, [_contender(setting, held)], setting.load)


def compile_holds(directory: Path) -> Path:
    """Compiles `holds.c`."""
    made = directory / "holds.so"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    source = Path(__file__).with_name("holds.c")
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run([*compiler, *flags, "-o", str(made), str(source), "-ldl"], check=True)
    return made


def _contender(setting: Setting, held: Peer) -> Contender:
    first = _round(setting, held)
    series = tuple(Series(what, "shmbuffer", form, _unit(form)) for what, form in first)

    def measure() -> Sequence[list[float]]:
        found = _round(setting, held)
        return [[found[key]] for key in first]

    return Contender(series, measure)


def _unit(form: str) -> str:
    if form in _SHARES:
        return "s"
    return "share" if form == _BUSY else "1/s"


def _round(setting: Setting, held: Peer) -> dict[tuple[str, str], float]:
    """Returns the results of a round, by title and form."""
    found: dict[tuple[str, str], float] = {}
    steps = {}
    for operation in OPERATIONS:
        sections = held.ask(
            "sections", operation=dataclasses.asdict(operation), calls=setting.calls
        )
        held_s = np.array(sections["held"]) / 1e9
        for at, one in enumerate(held_s, 1):
            name = f"{operation.call}({operation.count}), section {at} of {len(held_s)}: held"
            found |= {(name, form): at for form, at in _shares(one).items()}
        steps[operation] = _steps(held_s, np.array(sections["outside"]) / 1e9)
    here = len(os.sched_getaffinity(0))
    for writers in _beside():
        beside = held.ask("beside", writers=writers, batch=DRAWN, seconds=setting.contest_s)
        crowd = f"learner beside {writers} x extend({WRITTEN})"
        shares = _shares(np.array(beside["held"]) / 1e9)
        found |= {(f"{crowd}: held", form): at for form, at in shares.items()}
        measured = f"measured, {here} processors, {crowd}"
        found |= {(measured, name): beside[name] for name in ("items", "cycles")}
    modelled = [
        *((here, count, None) for count in _beside()),
        *((PROCESSORS, count, None) for count in WRITERS),
        *((MANY, MANY - 1, step_us) for step_us in STEP_US),
    ]
    for processors, writers, step_us in modelled:
        writer = steps[OPERATIONS[1]].copy()
        writer[:, 0] += (step_us or 0) * 1e-6 * WRITTEN  # the steps come before the call
        roles = [Role(writers, writer), Role(1, steps[OPERATIONS[4]])]
        outcome = simulate(roles, processors, _MODELLED_S)
        name = f"modelled, {processors} processors, learner beside {writers} x extend({WRITTEN})"
        name += "" if step_us is None else f", {step_us} us a step"
        found[name, "items"] = outcome.calls[0] * WRITTEN
        found[name, "cycles"] = outcome.calls[1]
        found[name, _BUSY] = outcome.busy
    return found


def _beside() -> list[int]:
    """Returns the numbers of writers: a few, and one for each other processor."""
    return sorted({1, BESIDE, max(1, len(os.sched_getaffinity(0)) - 1)})


def _steps(held: Any, outside: Any) -> Any:
    """Returns the measured calls as the model needs them; see `Role.steps`.

    The times before, between and after the sections are only known in total, so they are assumed to
    be equal.
    """
    steps = np.empty((len(outside), 2 * len(held)))
    steps[:, 0::2] = (outside / len(held))[:, None]
    steps[:, 1::2] = held.T
    return np.maximum(steps, 1e-9)


def _shares(values: Any) -> dict[str, float]:
    """Returns the percentiles of values."""
    return {name: float(np.percentile(values, at)) for name, at in _SHARES.items()}
