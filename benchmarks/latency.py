"""How long does the slowest call take?

Calls are timed one by one; reading the clock takes about 50 ns. The last percentiles also include
interrupts and other programs, so they describe the machine as much as the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.comparison import Setting
from benchmarks.library import ARRAYS, INDEX, TENSORDICT, Library, Operation
from benchmarks.measure import Contender, Series, interleave

ITEMS = ("S",)
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
OPERATIONS = {
    "extend(32), prioritized": (TENSORDICT, ARRAYS),
    "sample(256), prioritized": (TENSORDICT, ARRAYS),
    "cycle(256)": (INDEX,),
}


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    with ExitStack() as stack:
        contenders = []
        libraries = setting.open_all(stack, prioritized=True)
        for name, forms in OPERATIONS.items():
            call, count = name.partition(")")[0].split("(")
            for form in forms:
                operation = Operation(call, int(count), form)
                contenders += [
                    _contender(setting, library, operation, name)
                    for library in libraries
                    if library.prepare(operation, setting.block_s)
                ]
        return interleave(setting.rounds, contenders, setting.load)


def _contender(setting: Setting, library: Library, operation: Operation, name: str) -> Contender:
    series = [Series(title(name, p), library.name, operation.form, "s") for p in PERCENTILES]

    def measure() -> Sequence[list[float]]:
        # A call of a slow library is not repeated for longer than a round with writers takes.
        few = max(library.round(operation, 1))
        count = max(10, min(setting.calls, int(setting.contest_s / few)))
        took = library.calls(operation, count)
        return [[float(np.percentile(took, at))] for at in PERCENTILES.values()]

    return Contender(tuple(series), measure)


def title(operation: str, percentile: str) -> str:
    """Returns the title of a plot in the table."""
    return f"{operation}: {percentile}"
