"""What do batches of thousands of items cost with one thread, and with several?

The rows of "shmbuffer, 1 thread" show the same calls after ``set_threads(1)``. Batches that
take more than a quarter of a gigabyte are left out.
"""

from __future__ import annotations

import dataclasses

import shmbuffer
from benchmarks.comparison import Setting, compare
from benchmarks.library import ARRAYS, INDEX, TENSORDICT, Operation
from benchmarks.measure import Series
from benchmarks.ours import ShmBuffer

ITEMS = ("S", "M", "L")
SAMPLES, UPDATES, EXTENDS = (256, 4096, 32768), (256, 4096, 32768), (32, 4096, 131072)
MOST_BYTES = 256 << 20
ONE_THREAD = "1 thread"


class OneThread(ShmBuffer):
    """shmbuffer without further threads."""

    name = f"{ShmBuffer.name}, {ONE_THREAD}"

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Implements `Library.round`."""
        shmbuffer.set_threads(1)
        try:
            return super().round(operation, blocks)
        finally:
            shmbuffer.set_threads(None)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    setting = dataclasses.replace(setting, libraries=[*setting.libraries, OneThread()])
    return [
        *compare(setting, _samples(setting, "uniform"), prioritized=False),
        *compare(setting, _samples(setting, "prioritized") | _changes(setting), prioritized=True),
    ]


def _samples(setting: Setting, how: str) -> dict[Operation, str]:
    return {
        Operation("sample", count, form): f"sample({count}), {how}"
        for count in _fit(setting, SAMPLES)
        for form in (TENSORDICT, ARRAYS)
    }


def _changes(setting: Setting) -> dict[Operation, str]:
    return {
        Operation(call, count, form): f"{call}({count})"
        for call, form, counts in (("update", INDEX, UPDATES), ("extend", ARRAYS, EXTENDS))
        for count in _fit(setting, counts)
    }


def _fit(setting: Setting, counts: tuple[int, ...]) -> list[int]:
    most = min(setting.capacity, MOST_BYTES // setting.kind.nbytes)
    return [count for count in counts if count <= most]
