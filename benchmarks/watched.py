"""Measures how much `top` and a metrics server slow down a process that writes and samples.

    python -m benchmarks.watched [--items 1000000] [--pairs 4]

One process repeatedly writes 32 items, samples 256 by priority and updates 256 priorities, without
torch operations in between, so that a slowdown is as visible as possible. `shmbuffer top --interval
0.5`, and a coordinator whose metrics are requested each second, run on the other processors. `top`
and the requesting process are stopped (SIGSTOP) and continued in turn for a second each. Each pair
of seconds is therefore measured under the same load. The result is the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.format.schema import Schema

SEGMENT_S = 1.0
_WRITTEN, _DRAWN = 32, 256

_SCRAPE = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep(1.0)
"""


class Work:
    """The cycle of a process that writes and samples, on a full ring of small items."""

    def __init__(self, engine: Engine, items: int) -> None:
        leaves = tuple(Leaf((name,), "float32", (4,)) for name in ("obs", "next", "action"))
        ring = engine.define(Schema(leaves, items, (), {"kind": "tensordict"}))
        ring.tree.bind(0.6, 1e-8)
        self._ring, rng = ring, np.random.default_rng(1)
        self._given = rng.random(1 << 16)
        rows = np.ones((1 << 16, 4), np.float32)
        addresses = [rows.ctypes.data] * len(leaves)
        for at in range(0, items, 1 << 16):
            count = min(1 << 16, items - at)
            ring.write(addresses, count, self._given[:count])
        self._rows = rows
        self._source = addresses
        self._out = [np.empty((_DRAWN, 4), np.float32) for _ in leaves]
        self._index, self._tickets = np.empty(_DRAWN, np.int64), np.empty(_DRAWN, np.int64)
        self._weights = np.empty(_DRAWN, np.float32)
        self._key = 0

    def cycles(self, seconds: float) -> float:
        """Returns the number of cycles per second."""
        done, began = 0, time.perf_counter()
        out = [one.ctypes.data for one in self._out]
        while (now := time.perf_counter()) - began < seconds:
            self._ring.write(self._source, _WRITTEN, self._given[:_WRITTEN])
            self._key += 1
            self._ring.sample(
                *(_DRAWN, self._key, out, self._index.ctypes.data, self._tickets.ctypes.data),
                self._weights.ctypes.data,
                beta=0.4,
                prioritized=True,
            )
            self._ring.update(self._index, self._given[:_DRAWN], self._tickets)
            done += 1
        return done / (now - began)


@contextmanager
def observers(path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts `top`, a coordinator with metrics, and their client, on the other processors."""
    python = [sys.executable, "-m", "shmbuffer"]
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        with suppress(OSError):  # there is no other processor
            os.sched_setaffinity(process.pid, set(range(os.cpu_count() or 1)) - {_ours()})
        return process

    try:
        serve = start(
            *python, "serve", str(path), "--on-existing", "recover", "--metrics-port=0", "--json"
        )
        assert serve.stdout is not None
        port = json.loads(serve.stdout.readline())["metrics_port"]
        top = start(
            "sh",
            "-c",
            'exec "$@" >/dev/null',
            "sh",
            *python,
            "top",
            str(path),
            "--json",
            "--interval=0.5",
        )
        ask = start(sys.executable, "-c", _SCRAPE, f"http://127.0.0.1:{port}/metrics")
        time.sleep(2.0)
        yield [top, ask]  # the process that is asked may hold the lock just then, and is left alone
    finally:
        for process in reversed(started):  # the asking process first, then those that answer
            process.kill()
            process.communicate()


def _ours() -> int:
    return min(os.sched_getaffinity(0))


def measure(items: int, pairs: int, seconds: float = SEGMENT_S) -> dict[str, Any]:
    """Returns cycles per second without and with observers, and the loss in percent."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="shmbuffer-watched-", dir=base))
    try:
        with Engine.open(folder / "buffer", Settings(capacity=items, alpha=0.6)) as engine:
            work = Work(engine, items)
            processors = os.sched_getaffinity(0)
            with observers(folder / "buffer") as watching:
                os.sched_setaffinity(0, {_ours()})
                found = [_pair(work, watching, seconds) for _ in range(pairs)]
            os.sched_setaffinity(0, processors)
    finally:
        shutil.rmtree(folder)
    lost = [100 * (1 - watched / alone) for alone, watched in found]
    return {
        "alone": statistics.median(alone for alone, _ in found),
        "watched": statistics.median(watched for _, watched in found),
        "lost_percent": statistics.median(lost),
        "pairs": lost,
    }


def _pair(work: Work, watching: list[subprocess.Popen[str]], seconds: float) -> tuple[float, float]:
    found = []
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in watching:
            process.send_signal(number)
        found.append(work.cycles(seconds))
    return found[0], found[1]


def main() -> None:
    """Measures and prints the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    print(json.dumps(measure(args.items, args.pairs)))


if __name__ == "__main__":
    main()
