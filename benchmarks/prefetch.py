"""Does prefetching pay for a learner that works 0, 2 or 20 ms on each batch?

"sample" is the time of the call in a loop with the work in between. "step" is the time of both,
which shows how much threads slow down the work. Both are measured with and without ``prefetch=3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.comparison import Setting
from benchmarks.items import KINDS
from benchmarks.library import (
    BY_PRIORITY,
    FRAMES,
    LAZY_STACK,
    MEMMAP,
    RECORDS,
    TRANSFORMED,
    UNIFORM,
    Library,
    Loop,
    Operation,
)
from benchmarks.measure import Contender, Series, interleave

ITEMS = ("S",)
COUNTS = {UNIFORM: 256, BY_PRIORITY: 256, FRAMES: 64, RECORDS: 64, TRANSFORMED: 256}
WORK_MS = (0, 2, 20)
AHEAD = 3
MOST_FRAMES = 2000
WITHOUT = "without"  # stands in for a library, so that the report compares with it


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    return [series for what in COUNTS for series in _measured(setting, what)]


def _measured(setting: Setting, what: str) -> list[Series]:
    libraries = [one for one in setting.libraries if one.name in ("shmbuffer", "torchrl")]
    if what == FRAMES:
        kind, capacity = KINDS["L"], min(setting.capacity, MOST_FRAMES)
        setting = replace(setting, kind=kind, capacity=capacity, load=setting.load)
    stored = {"recording": "sequences", "storage": LAZY_STACK} if what == RECORDS else {}
    with ExitStack() as stack:
        for library in libraries:
            stack.enter_context(setting.open(library, **{"storage": MEMMAP, **stored}))
        contenders = [
            contender
            for work_ms in WORK_MS
            for call in ("loop", "step")
            for contender in _contenders(setting, libraries, call, what, work_ms)
            if work_ms or call == "loop"
        ]
        return interleave(setting.rounds, contenders, setting.load)


def _contenders(
    setting: Setting, libraries: Sequence[Library], call: str, what: str, work_ms: int
) -> list[Contender]:
    said = {"loop": "sample", "step": "step"}[call]
    name = f"{what}: {said}, {work_ms} ms of work"
    found = []
    for library in libraries:
        for ahead in (AHEAD, 0) if library is libraries[0] else (AHEAD,):
            operation = Operation(call, COUNTS[what], str(Loop(what, work_ms, ahead)))
            library.prepare(operation, max(setting.block_s, work_ms / 500))
            measure = partial(library.round, operation, setting.blocks)
            measure()  # until it is decided where batches are made
            who = library.name if ahead else WITHOUT
            series = Series(name, who, f"prefetch={ahead}", "s")
            found.append(Contender((series,), lambda measure=measure: [measure()]))
    return found
