"""Does the cost of a call on a whole buffer depend on the capacity, or on the written items?

Buffers have capacities of a hundred thousand to a hundred million items. They contain only the
first write, one percent of the items, or all of them. They are on a disk unless `--dir` is given.
Full buffers that need more than half of the free memory are left out. The law of a row is the
exponent of its growth over the last two capacities: 0 is constant, and 1 is linear.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import shmbuffer
from benchmarks.comparison import Setting
from benchmarks.items import Kind
from benchmarks.library import TENSORDICT
from benchmarks.measure import Series
from benchmarks.ours import ShmBuffer
from shmbuffer.memory.upkeep import inspect
from shmbuffer.memory.upkeep.check import check
from shmbuffer.watch.buffer_state import read_state

ITEMS = ("S",)
STEPS = (10, 100, 1000, 10_000)
"""Capacities in percent of the setting's capacity: 100,000 to 100,000,000."""
EMPTY, SOME, FULL = "empty", "1 %", "full"
SHARES = {EMPTY: 0.0, SOME: 0.01, FULL: 1.0}
WRITTEN, DRAWN, CALLS = 32, 256, 200
ROWS = (
    "first write",
    f"sample({DRAWN})",
    f"first sample({DRAWN}) in slices",
    f"sample({DRAWN}) in slices",
    "attach, all have left",
    "attach, one was killed",
    "recover",
    "check",
    "inspect",
    "top: one look",
    "save",
)
_KILLED = """
import os, sys
import shmbuffer.numpy
from benchmarks.items import KINDS
buffer = shmbuffer.numpy.attach(sys.argv[1])
buffer.extend(KINDS[sys.argv[2]].batches(32, "arrays")[0])
os.kill(os.getpid(), 9)
"""


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    found: dict[tuple[str, str], Series] = {}
    for _ in range(setting.rounds):
        with setting.load.during_a_round():
            for step in STEPS:
                capacity = max(2 * DRAWN, setting.capacity * step // 100)
                for filled, share in SHARES.items():
                    if share == 1 and capacity * setting.kind.nbytes * 2 > _free_bytes() / 2:
                        continue
                    with setting.scratch() as scratch:
                        took = _measured(scratch, setting.kind, capacity, share)
                    for name in ROWS:
                        if name in took:
                            title = f"{name}, of {capacity:,}"
                            series = Series(title, "shmbuffer", filled, "s")
                            found.setdefault((title, filled), series).rounds.append([took[name]])
    return list(found.values())


def _measured(scratch: Path, kind: Kind, capacity: int, share: float) -> dict[str, float]:
    """Returns the time of each row in seconds."""
    path, took = scratch / "buffer", dict[str, float]()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took[name] = time.perf_counter() - began
        return result

    buffer = ShmBuffer().make(path, capacity, True)
    batch = kind.batches(WRITTEN, TENSORDICT)[0]
    timed("first write", lambda: buffer.extend(batch))
    kind.fill(buffer.extend, max(0, int(capacity * share) - WRITTEN), TENSORDICT)
    sampling = _median(lambda: buffer.sample(DRAWN))
    took[f"sample({DRAWN})"] = sampling
    timed("save", lambda: buffer.dumps(scratch / "save"))
    buffer.close()
    timed("attach, all have left", lambda: shmbuffer.attach(path)).close()
    _kill_one(path, kind)
    buffer = timed("attach, one was killed", lambda: shmbuffer.attach(path))
    buffer.set_sampler(shmbuffer.SliceSampler(slice_len=16, end_key="done", strict_length=False))
    timed(f"first sample({DRAWN}) in slices", lambda: buffer.sample(DRAWN))
    took[f"sample({DRAWN}) in slices"] = _median(lambda: buffer.sample(DRAWN))
    buffer.close()
    _kill_one(path, kind)
    timed("recover", lambda: shmbuffer.recover(path))
    report = timed("check", lambda: check(path))
    if not report.ok:
        raise RuntimeError(str(report))
    timed("inspect", lambda: inspect.inspect(path))
    timed("top: one look", lambda: read_state(str(path), None))
    return took


def _median(call: Callable[[], object]) -> float:
    found = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return sorted(found)[CALLS // 2]


def _kill_one(path: Path, kind: Kind) -> None:
    """Starts a NumPy client that writes a batch, and kills it."""
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(path), kind.name], check=False)
    if ended.returncode != -9:
        raise RuntimeError(f"the process to be killed ended with {ended.returncode}")


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def points(part: dict[str, Any]) -> dict[tuple[str, str], dict[int, float]]:
    """Returns the times by capacity for each row and filling."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for one in part["results"]:
        name, _, capacity = one["operation"].rpartition(", of ")
        at = found.setdefault((name, one["form"]), {})
        at[int(capacity.replace(",", ""))] = one["median"]
    return found


def law(costs: dict[int, float]) -> float:
    """Returns the exponent of the growth over the last two capacities."""
    (low, before), (high, after) = list(pairwise(sorted(costs.items())))[-1]
    return math.log(after / before) / math.log(high / low)


def markdown(part: dict[str, Any]) -> str:
    """Returns the table with one line for each row and filling."""
    found = points(part)
    capacities = sorted({capacity for costs in found.values() for capacity in costs})
    lines = [
        f"| | | {' | '.join(f'{capacity:,}' for capacity in capacities)} | law |",
        f"|---|---|{'---:|' * (len(capacities) + 1)}",
    ]
    for name in ROWS:
        for filled in SHARES:
            costs = found.get((name, filled))
            if costs is None:
                continue
            cells = [_shown(costs[one]) if one in costs else "-" for one in capacities]
            exponent = f"{law(costs):.1f}" if len(costs) > 1 else "-"
            lines.append(f"| {name} | {filled} | {' | '.join(cells)} | {exponent} |")
    return "\n".join(lines)


def _shown(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
