"""How fast are a learner's steps and the writes of other processes at the same time?

All processes begin at the same time. The learner samples 256 items by priority and updates the
priorities in the sample, and each writer extends by 32 items. A learner and four writers share the
CPUs, so the results depend on the number of CPUs, and the ratios less so.
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
    """Runs the benchmark."""
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
    """Returns the title of a plot in the table."""
    crowd = "no writer" if not writers else f"{writers} x extend({WRITTEN})"
    what = {"items": "items", "cycles": f"cycles({DRAWN})", "p99": f"p99 of cycle({DRAWN})"}
    return f"{crowd}: {what[name]}"
