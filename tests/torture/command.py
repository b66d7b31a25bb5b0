"""The command line of a campaign, which runs for some time, prints figures and repeats failures.

    python -m tests.torture.kills --seconds 60 --seed 1

A campaign is a function in its own module. It begins with the case of the given seed and goes on
with seeds that are derived from it. If the seed of a failed case is given on the command line, the
campaign therefore begins with that case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Figures = dict[str, int | float]
Say = Callable[[str], None]
Campaign = Callable[[float, int, Say], Figures]

_MASK = 2**64 - 1


def following(seed: int) -> int:
    """Returns the seed after this one (a step of splitmix64), below 2^48 so that it is short."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ mixed >> 31) >> 16


def seeds(seed: int, seconds: float) -> Iterator[int]:
    """Yields the given seed and then derived seeds until the time is over."""
    end = time.monotonic() + seconds
    yield seed
    while time.monotonic() < end:
        seed = following(seed)
        yield seed


@contextmanager
def repeatable(module: str, seed: int) -> Iterator[None]:
    """Adds the seed and the command that repeats it to any failure in the block."""
    try:
        yield
    except AssertionError as error:
        command = f"python -m {module} --seconds 1 --seed {seed}"
        raise AssertionError(f"{error}\nseed {seed}; to repeat: {command}") from error


def added(total: Figures, more: Figures) -> None:
    """Adds the figures of a case to the total, name by name."""
    for name, figure in more.items():
        total[name] = total.get(name, 0) + figure


def main(campaign: Campaign, arguments: list[str] | None = None) -> int:
    """Runs one campaign, with progress on stderr and the figures as one line of JSON on stdout."""
    parser = argparse.ArgumentParser(description=(sys.modules[campaign.__module__].__doc__ or ""))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    try:
        figures = campaign(given.seconds, given.seed, lambda line: print(line, file=sys.stderr))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0
