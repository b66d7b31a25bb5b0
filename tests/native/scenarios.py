"""Runs the stress program in all scenarios for a given time.

python -m tests.native.scenarios thread --seconds 12
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.native.program import FLAVOURS, build, missing_tool, run

#: Names of scenarios, and the options of the stress program.
SCENARIOS = {
    "rows": ("--capacity", "7"),
    "rows and deaths": ("--capacity", "13", "--mortal"),
    "lanes, emptied, and deaths": ("--capacity", "5", "--lanes", "2", "--upkeep", "--mortal"),
    "one slot and deaths": ("--capacity", "1", "--mortal"),
    "records": ("--capacity", "32", "--records", "4096"),
    "records and deaths": ("--capacity", "24", "--records", "4096", "--upkeep", "--mortal"),
    "one handle": ("--shared",),
    "one handle on records": ("--capacity", "16", "--records", "4096", "--shared", "--upkeep"),
    "limited, and deaths": ("--capacity", "11", "--limited", "--mortal"),
    "limited lanes, emptied": ("--capacity", "6", "--lanes", "3", "--limited", "--upkeep"),
    "limited records, and deaths": (
        *("--capacity", "24", "--records", "4096", "--limited", "--mortal"),
    ),
    "one limited handle": ("--capacity", "11", "--limited", "--shared"),
    "consumed, and deaths": ("--capacity", "13", "--consumed", "--mortal"),
    "consumed records, and deaths": (
        *("--capacity", "24", "--records", "4096", "--consumed", "--mortal"),
    ),
    "one consumed handle": ("--capacity", "11", "--consumed", "--shared"),
    "written once": ("--capacity", "2048", "--once"),
    "weights": ("--weights",),
    "weights, and deaths": ("--weights", "--mortal"),
    "weights, each copy once": ("--weights", "--once"),
}
MORTAL = tuple(name for name, options in SCENARIOS.items() if "--mortal" in options)


def shake(
    flavour: str,
    folder: Path,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    least: int = 1,
    rounds: int | None = None,
) -> Counter[str]:
    """Runs one scenario after the other, each time with another seed.

    Args:
        flavour: a name in `FLAVOURS`.
        folder: folder for the program.
        seconds: time after which no further run begins.
        seed: seed of the first run.
        say: called with a message after each round of all scenarios.
        least: least number of runs, even if they take longer.
        rounds: rounds of each run. The default depends on the flavour.

    Raises:
        FoundError: a fault was found. The message has a command that may repeat it. Threads run in
            another order each time.
    """
    program = build(flavour, folder)
    chosen = FLAVOURS[flavour]
    names = [name for name in SCENARIOS if chosen.deaths or name not in MORTAL]
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while counts["programs"] < least or time.monotonic() < deadline:
        number = counts["programs"]
        name = names[number % len(names)]
        often = ("--rounds", str(rounds or chosen.rounds), "--seed", str(seed + number))
        counts.update(run(flavour, program, *SCENARIOS[name], *often))
        counts["programs"] += 1
        if counts["programs"] % len(names) == 0:
            say(f"{flavour}: {counts['programs']} programs, {counts['checked']} items looked at")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("flavour", choices=FLAVOURS)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if missing := missing_tool(chosen.flavour, Path(folder)):
            raise SystemExit(f"{missing} does not work here")
        counts = shake(
            chosen.flavour,
            Path(folder),
            chosen.seconds,
            chosen.seed,
            print,
            least=len(SCENARIOS),
            rounds=chosen.rounds,
        )
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
