"""Does a learner stay fast and small while its collectors are replaced for hours?

64 NumPy clients have all 256 handles of a buffer except the learner's. Each client writes 32 items
fifty times per second through its handles in turn. Once per second, a client ends and is replaced:
by SIGKILL, without closing its handles, or after closing them. A learner samples 256 items by
priority and updates their priorities, and computes for a millisecond in between. `--rounds 60`
takes an hour.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import Setting
from benchmarks.items import KINDS
from benchmarks.library import ALPHA, ARRAYS, BETA, TENSORDICT
from benchmarks.measure import Series
from shmbuffer.memory.upkeep.check import check
from shmbuffer.numpy import attach

ITEMS = ("S",)
COLLECTORS = 64
HANDLES = 255
WRITTEN, DRAWN = 32, 256
PACE_S, TRAINS_S, ENDS_EVERY_S = 0.02, 0.001, 1.0
PERCENTILES = {"median": 50.0, "p99": 99.0, "p99.9": 99.9, "longest": 100.0}
LEAST = "slowest of the fastest collector"
LONGEST_WRITE = f"extend({WRITTEN}): longest"
OF_THE_LEARNER = ("memory", "descriptors", "maps")
LIFE, WRITES, LONGEST_NS = range(3)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    names = {f"cycle({DRAWN}): {name}": "s" for name in PERCENTILES}
    names |= {LONGEST_WRITE: "s", LEAST: "share"}
    names |= {f"{name}, times those of the first round": "x" for name in OF_THE_LEARNER}
    found = {name: Series(name, "shmbuffer", "", unit) for name, unit in names.items()}
    with setting.scratch() as scratch:
        for series, figure in zip(found.values(), _rounds(setting, scratch), strict=True):
            series.rounds.extend([value] for value in figure)
    return list(found.values())


def _rounds(setting: Setting, scratch: Path) -> list[list[float]]:
    """Measures the rounds; returns the results of each row."""
    import shmbuffer

    path, kept = scratch / "buffer", scratch / "written"
    buffer = shmbuffer.TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA,
        beta=BETA,
        storage=shmbuffer.LazyMemmapStorage(setting.capacity, scratch_dir=path, shared_init=True),
        batch_size=DRAWN,
    )
    buffer.extend(setting.kind.batches(WRITTEN, TENSORDICT)[0])
    written = np.memmap(kept, np.int64, "w+", shape=(COLLECTORS, 3))
    asked = [str(path), setting.kind.name, str(kept), str(HANDLES)]
    command = [sys.executable, "-m", "benchmarks.lives", *asked]
    rows, first = [], None
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[1]) as crowd:
        while not written[:, WRITES].all():  # until everybody is there
            if crowd.poll() is not None:
                raise RuntimeError("the collectors ended before all of them had written")
            time.sleep(0.01)
        for _ in range(setting.rounds):
            with setting.load.during_a_round():
                row = _round(buffer, written, 120 * setting.contest_s)
            held = _held()
            first = first or held
            rows.append([*row, *(now / then for now, then in zip(held, first, strict=True))])
        assert crowd.stdin is not None
        crowd.stdin.close()
        if crowd.wait(60):
            raise RuntimeError(f"the collectors ended with status {crowd.returncode}")
    found = check(path)
    buffer.close()
    if not found.ok:
        raise RuntimeError(f"the buffer is damaged after the run: {found}")
    return [list(row) for row in zip(*rows, strict=True)]


def _round(buffer: Any, written: Any, seconds: float) -> list[float]:
    import torch

    written[:, LONGEST_NS] = 0
    before, end, took = written.copy(), time.monotonic() + seconds, []
    while time.monotonic() < end:
        began = time.perf_counter()
        batch = buffer.sample()
        drawn = time.perf_counter()
        batch["td_error"] = torch.rand(DRAWN)
        learned = time.perf_counter()
        buffer.update_tensordict_priority(batch)
        took.append(time.perf_counter() - learned + drawn - began)
        time.sleep(TRAINS_S)
    after = written.copy()
    stayed = after[:, LIFE] == before[:, LIFE]
    writes = (after - before)[stayed, WRITES]
    least = writes.min() / writes.max() if len(writes) else float("nan")
    longest = after[:, LONGEST_NS].max() / 1e9
    return [*(float(np.percentile(took, at)) for at in PERCENTILES.values()), longest, least]


def _held() -> tuple[int, int, int]:
    """Returns the private memory in KiB, the open descriptors and the mappings of this process."""
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("RssAnon:")[2].split()[0])
    return memory, len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")


def main(path: str, kind: str, kept: str, handles: int) -> None:
    """Starts and replaces collectors until standard input is closed."""
    written = np.memmap(kept, np.int64, "r+").reshape(-1, 3)
    batch, chance = KINDS[kind].batches(WRITTEN, ARRAYS)[0], random.Random(1)
    shares = [len(part) for part in np.array_split(np.arange(handles), len(written))]
    seats = [_begin(path, batch, row, share) for row, share in zip(written, shares, strict=True)]
    while not select.select([sys.stdin], [], [], ENDS_EVERY_S)[0]:
        number = chance.randrange(len(seats))
        os.kill(seats[number], chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1]))
        os.waitpid(seats[number], 0)
        seats[number] = _begin(path, batch, written[number], shares[number])
    for child in seats:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _begin(path: str, batch: object, written: Any, share: int) -> int:
    if not (child := os.fork()):
        try:
            _collect(path, batch, written, share)
        finally:
            os._exit(1)
    return child


def _collect(path: str, batch: object, written: Any, share: int) -> None:
    """Writes until a signal. SIGTERM closes the handles, and SIGUSR1 ends the process."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    handles = [attach(path) for _ in range(share)]
    written[LIFE] += 1
    due = time.monotonic() + random.random() * PACE_S
    while not asked:
        time.sleep(max(0.0, due - time.monotonic()))
        due += PACE_S
        began = time.monotonic_ns()
        handles[int(written[WRITES]) % share].extend(batch)
        written[LONGEST_NS] = max(int(written[LONGEST_NS]), time.monotonic_ns() - began)
        written[WRITES] += 1
    for handle in handles:
        handle.close()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
