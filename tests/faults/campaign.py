"""Plays every errno at every libc call of all scenarios in turn, until the time is over.

python -m tests.faults.campaign --seconds 60 --seed 1
python -m tests.faults.campaign --only Create --kind rows --fault 'call 7: EIO once, dies'
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle

from tests.faults.scenarios import SCENARIOS
from tests.faults.sweeper import CHECKPOINTS, Sweeper
from tests.torture.command import main

#: Number of faults that are played on a scenario in one round.
_AT_A_TIME = 25


def campaign(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, int | float]:
    """Plays faults for about ``seconds`` seconds; each round draws other faults.

    Returns:
        The number of rounds (of all scenarios, with both kinds), of cases, and of refused calls.

    Raises:
        AssertionError: a check failed. The message has the command that repeats the fault.
    """
    end = time.monotonic() + seconds
    figures: dict[str, int | float] = {"scenarios": 0, "cases": 0, "refused": 0}
    with Sweeper("--torch") as sweeper:
        for number, (name, kind) in enumerate(_in_turn()):
            if time.monotonic() >= end:
                return figures
            found = sweeper.sweep(name, kind, count=_AT_A_TIME, seed=seed * 100_003 + number)
            figures["scenarios"] += 1
            figures["cases"] += found.cases
            figures["refused"] += found.refused
            say(f"{name} of {kind}: {found.cases} faults of {found.calls} calls")
    raise AssertionError("the turns have no end")


def _in_turn() -> Iterator[tuple[str, str]]:
    both = [(name, kind) for name in (*SCENARIOS, *CHECKPOINTS) for kind in ("rows", "records")]
    return cycle(case for case in both if case != ("Adopt", "records"))


def one() -> None:
    """Repeats one scenario, or one fault of a scenario."""
    parser = argparse.ArgumentParser(description="One scenario, whole.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=(*SCENARIOS, *CHECKPOINTS), required=True)
    parser.add_argument("--kind", choices=("rows", "records"), default="rows")
    parser.add_argument("--fault", default=".*", help="one fault of it, as a failure names it")
    asked = parser.parse_args()
    with Sweeper(*(["--torch"] if asked.only in CHECKPOINTS else [])) as sweeper:
        print(sweeper.sweep(asked.only, asked.kind, count=0, seed=asked.seed, only=asked.fault))


if __name__ == "__main__":
    if "--only" in sys.argv:
        one()
    else:
        sys.exit(main(campaign))
