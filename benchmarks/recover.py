"""How long does it take to recover a full buffer after kill -9 of all clients?

Two processes, the only clients, are killed while they write. The buffer is recovered by `recover`,
and after another such kill by the `attach` of the next process. The peers have no counterpart,
because they lose all data that were not saved.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import shmbuffer
from benchmarks.collector import Collector
from benchmarks.comparison import Setting
from benchmarks.library import TENSORDICT
from benchmarks.measure import Contender, Series, interleave
from benchmarks.ours import ShmBuffer, attach_to_write

ITEMS = ("S",)
WRITERS, WRITTEN = 2, 32


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    with setting.scratch() as scratch:
        directory = scratch / "buffer"
        ShmBuffer().leave_full(directory, setting.kind, setting.capacity)
        contenders = [
            _contender(setting, directory, "recover()", _recover),
            _contender(setting, directory, "attach()", _attach),
        ]
        return interleave(setting.rounds, contenders, setting.load)


def _contender(
    setting: Setting, directory: Path, form: str, recover: Callable[[Path, int], float]
) -> Contender:
    title = f"recover {setting.capacity:,} items"
    series = Series(title, "shmbuffer", form, "s")

    def die_and_recover() -> list[list[float]]:
        _kill_everybody(setting, directory)
        return [[recover(directory, setting.capacity)]]

    return Contender((series,), die_and_recover)


def _kill_everybody(setting: Setting, directory: Path) -> None:
    opener = functools.partial(attach_to_write, directory)
    collectors = [
        Collector(opener, setting.kind, WRITTEN, TENSORDICT, seed, ShmBuffer.modules)
        for seed in range(WRITERS)
    ]
    for collector in collectors:
        collector.wait_until_ready()
    now = time.perf_counter()
    for collector in collectors:
        collector.write(now, now + 10)  # longer than it will live
    time.sleep(setting.contest_s / 4)
    for collector in collectors:
        collector.kill()


def _recover(directory: Path, capacity: int) -> float:
    began = time.perf_counter()
    report = shmbuffer.recover(directory)
    took = time.perf_counter() - began
    if report.reason != "no client alive" or report.items < 0.9 * capacity:
        raise RuntimeError(f"that was no recovery of a full buffer:\n{report}")
    return took


def _attach(directory: Path, capacity: int) -> float:
    began = time.perf_counter()
    buffer = shmbuffer.attach(directory)
    took = time.perf_counter() - began
    with buffer:
        if len(buffer) < 0.9 * capacity:
            raise RuntimeError(f"only {len(buffer)} of {capacity} items are there")
    return took
