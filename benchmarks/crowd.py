"""How much can many processes write to one ring, and does each write the same amount?

NumPy clients write batches of 32 items as fast as they can, to a ring that they fill every few
milliseconds, and to a large one. With more writers than processors, a writer is often preempted
between claim and commit. The others then reach its slots and have to wait.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.comparison import Setting
from benchmarks.items import KINDS
from benchmarks.library import ALPHA, ARRAYS
from benchmarks.measure import Series

ITEMS = ("S",)
WRITERS = (1, 4, 16, 64)
SLOTS = (10, 500)
"""Capacities of the rings in percent of the setting's capacity: 100,000 and 5,000,000."""
BATCH = 32
ITEMS_A_SECOND, LEAST = "items", "slowest of the fastest"


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    found: dict[tuple[int, int], tuple[Series, Series]] = {}
    for _ in range(setting.rounds):
        with setting.load.during_a_round():
            for slots in (max(1000, setting.capacity * part // 100) for part in SLOTS):
                for writers in WRITERS:
                    title = f"{writers} writers, {slots:,} slots"
                    items, least = found.setdefault(
                        (slots, writers),
                        (
                            Series(title, "shmbuffer", ITEMS_A_SECOND, "1/s"),
                            Series(title, "shmbuffer", LEAST, "share"),
                        ),
                    )
                    written = _contest(setting, slots, writers)
                    items.rounds.append([sum(written) / _seconds(setting)])
                    least.rounds.append([min(written) / max(1, *written)])
    return [series for pair in found.values() for series in pair]


def _seconds(setting: Setting) -> float:
    return 4 * setting.contest_s


def _contest(setting: Setting, slots: int, writers: int) -> list[int]:
    """Returns the number of items of each writer; writers are forks of a process without torch."""
    with setting.scratch() as scratch:
        asked = [str(scratch / "buffer"), setting.kind.name]
        numbers = [str(slots), str(writers), str(_seconds(setting))]
        program = [sys.executable, "-m", "benchmarks.crowd", *asked, *numbers]
        ended = subprocess.run(
            program, check=True, capture_output=True, cwd=Path(__file__).parents[1]
        )
    written: list[int] = json.loads(ended.stdout)
    return written


def main(path: str, kind: str, slots: int, writers: int, seconds: float) -> list[int]:
    """Lets processes write within the same period."""
    import shmbuffer.numpy
    from shmbuffer.memory import Engine, Settings

    batch = KINDS[kind].batches(BATCH, ARRAYS)[0]
    written = np.frombuffer(mmap.mmap(-1, 8 * writers), np.int64)
    with Engine.open(path, Settings(capacity=slots, alpha=ALPHA)):
        with shmbuffer.numpy.attach(path) as first:
            first.extend(batch)
        began = time.monotonic() + 0.1 + writers * 0.02  # for everybody to attach
        children = []
        for number in range(writers):
            if not (child := os.fork()):
                try:
                    _write(path, batch, began, began + seconds, written[number : number + 1])
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    found: list[int] = written.tolist()
    return found


def _write(path: str, batch: object, began: float, end: float, written: object) -> None:
    import shmbuffer.numpy

    buffer = shmbuffer.numpy.attach(path)
    buffer.extend(batch)
    time.sleep(max(0.0, began - time.monotonic()))
    count = 0
    while time.monotonic() < end:
        buffer.extend(batch)
        count += BATCH
    written[0] = count  # type: ignore[index]
    buffer.close()


if __name__ == "__main__":
    _path, _kind, *_numbers = sys.argv[1:]
    _counted = main(_path, _kind, int(_numbers[0]), int(_numbers[1]), float(_numbers[2]))
    print(json.dumps(_counted))
