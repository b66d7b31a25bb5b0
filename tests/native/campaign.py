"""Runs the C core under every available sanitizer, and counts the branches that tests take.

    python -m tests.native.campaign --seconds 60 --seed 1

Branches are counted only if there is half an hour or more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.native import coverage
from tests.native.program import RELINK, FoundError, build, missing_tool, run
from tests.native.scenarios import shake
from tests.torture.command import main

#: Shares of the time for each flavour.
FLAVOURS = {"thread": 0.35, "address": 0.2, "leak": 0.1, "valgrind": 0.15, "plain": 0.1}
RELINKED = 0.1
WITH_BRANCHES_FROM_S = 1800


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Runs the stress program under each sanitizer, then counts branches if there is time.

    Raises:
        FoundError: a sanitizer or the program itself found a fault.
    """
    counts: Counter[str] = Counter()
    for flavour, share in FLAVOURS.items():
        with tempfile.TemporaryDirectory() as folder:
            if missing := missing_tool(flavour, Path(folder)):
                say(f"{flavour}: left out, {missing} does not work here")
                continue
            try:
                counts.update(shake(flavour, Path(folder), share * seconds, seed, say))
            except FoundError as error:
                again = f"python -m tests.native.scenarios {flavour} --seed {seed}"
                raise FoundError(f"{error}\nseed {seed}; to repeat: {again}") from error
    counts.update(_relinked(RELINKED * seconds, seed, say))
    if seconds >= WITH_BRANCHES_FROM_S:
        counts.update(_branches(seed, say))
    return dict(counts)


def _relinked(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int]:
    deadline, cases = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        program = build("plain", Path(folder), program=RELINK)
        while cases == 0 or time.monotonic() < deadline:
            run("plain", program, str(seed * 10**9 + cases), "5000")
            cases += 5000
    say(f"byte rings that were relinked: {cases}")
    return {"relinked": cases}


def _branches(seed: int, say: Callable[[str], None]) -> dict[str, int]:
    coverage.build_core()
    coverage.run_programs(rounds=1600)
    if status := coverage.run_suites([*coverage.SUITES, "-q", "--numprocesses=auto"]):
        raise FoundError(f"seed {seed}; to repeat: scripts/coverage; pytest says {status}")
    taken, of = coverage.figures(coverage.read_counters())
    say(f"branches of the C core that were taken: {taken} of {of}")
    return {"branches": of, "branches_taken": taken}


if __name__ == "__main__":
    sys.exit(main(campaign))
