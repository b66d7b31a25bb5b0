"""What is left of a learner's step, and what is written, while other processes write beside it?

In every window all processes begin at the same moment: the learner draws 256 by priority and sends
their priorities back in the sample, each writer extends by 32. A learner and four writers share the
CPUs that there are, so the figures depend on their number; the ratio does so less.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.comparison import Setting
from benchmarks.library import Library
from benchmarks.measure import Contender, Series, interleave

ITEMS = ("S",)
WRITERS = (0, 1, 2, 4, 8, 16)
WRITTEN, DRAWN = 32, 256
_UNITS = {"items": "1/s", "cycles": "1/s", "p99": "s"}


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    with ExitStack() as stack:
        libraries = [
            (library, most)
            for library in setting.open_all(stack, prioritized=True)
            if (most := library.share(max(WRITERS), WRITTEN))
        ]
        contenders = [
            _contender(setting, library, writers)
            for writers in WRITERS
            for library, most in libraries
            if writers <= most
        ]
        return interleave(setting.rounds, contenders, setting.load)


def _contender(setting: Setting, library: Library, writers: int) -> Contender:
    measured = [name for name in _UNITS if writers or name != "items"]
    series = tuple(
        Series(title(writers, name), library.name, "processes", _UNITS[name]) for name in measured
    )
    contend = partial(library.contend, writers, DRAWN, setting.contest_s)

    def window() -> Sequence[list[float]]:
        found = contend()
        return [[found[name]] for name in measured]

    return Contender(series, window)


def title(writers: int, name: str) -> str:
    """Of a figure, in a table."""
    crowd = "no writer" if not writers else f"{writers} x extend({WRITTEN})"
    what = {"items": "items", "cycles": f"cycles({DRAWN})", "p99": f"p99 of cycle({DRAWN})"}
    return f"{crowd}: {what[name]}"
