"""What a benchmark asks of a library: make a buffer, be ready for an operation, be timed.

    benchmark ── Library ─┬─ ours.py                    in this process
                          └─ peer.py ══ pipes ══ peer_torchrl.py    in an interpreter of its own

The calls that are timed stand here, once: shmbuffer and torchrl have the same API, so the same
lines run for both.

Imported by the peers too: it must not import shmbuffer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from benchmarks.collector import Collector
from benchmarks.items import KINDS, POOL_BYTES, Kind, index_sets, priorities, tensordict
from benchmarks.measure import Timed

ALPHA, BETA = 0.6, 0.4
#: Of `Operation.form` for attach: of a peer that loads what it has saved.
LOADS = "loads a dump"
#: As many sets of indices that updates take turns with: their part of the tree is not in the cache.
COLD_SETS = 2000


@dataclass(frozen=True)
class Operation:
    """One call of the API.

    Attributes:
        call: ``"add"``, ``"extend"``, ``"sample"``, ``"update"``, ``"cycle"`` or ``"attach"``.
        count: items of a call.
        form: how the data come or go.
    """

    call: str
    count: int = 1
    form: str = "TensorDict"


class Library(Protocol):
    """A library with one open buffer at a time, here or in another interpreter."""

    name: str

    def versions(self) -> dict[str, str]:
        """Its own, and of what it stands on."""

    def open(self, directory: str, kind: str, capacity: int, prioritized: bool) -> None:
        """Make a buffer in a new directory, and fill it."""

    def share(self, writers: int, count: int) -> None:
        """Start processes that wait to write batches of ``count``."""

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Make inputs and warm up; False if there is no such operation."""

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Seconds a call, of each block."""

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Sample and update while ``writers`` write; see `Local.contend`."""

    def close(self) -> None:
        """Let go of the buffer and end its processes; its files stay."""


class Local(ABC):
    """A library in this process."""

    name: str
    forms: ClassVar[frozenset[str]]
    """Of `Operation.form`: those that there are."""
    modules: ClassVar[list[str]]
    """What a process that writes imports."""

    _buffer: Any

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        np.random.seed(0)  # what torchrl draws with
        self._collectors: list[Collector] = []
        self._timed: dict[Operation, Timed] = {}
        self._buffer = None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """See `Library.versions`."""

    @abstractmethod
    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """A buffer, empty."""

    @abstractmethod
    def opener(self) -> Callable[[], Any]:
        """How another process gets hold of the buffer; it can be pickled."""

    @abstractmethod
    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """How this process gets hold of the buffer once more, and how it lets go."""

    def open(self, directory: str, kind: str, capacity: int, prioritized: bool) -> None:
        """See `Library.open`."""
        self._kind, self._capacity = KINDS[kind], capacity
        self._directory = Path(directory) / "buffer"
        self._buffer = self.make(self._directory, capacity, prioritized)
        fill(self._buffer, self._kind, capacity)

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """See `Library.prepare`."""
        if operation.form not in self.forms:
            return False
        if operation.call == "attach":
            attach, release = self.attaching(operation.form)
            self._timed[operation] = Timed(attach, [()], block_s, release)
        else:
            call, inputs = self._call(operation)
            self._timed[operation] = Timed(call, inputs, block_s)
        return True

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """See `Library.round`."""
        return self._timed[operation].blocks(blocks)

    def share(self, writers: int, count: int) -> None:
        """See `Library.share`."""
        opener = self.opener()
        self._collectors = [
            Collector(opener, self._kind, count, seed, self.modules) for seed in range(writers)
        ]
        for collector in self._collectors:
            collector.wait_until_ready()

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Sample and update while others write, all within the same window of time.

        Returns:
            ``items``, ``cycles``: a second; ``p99``: of a cycle, in seconds.
        """
        cycle, inputs = self._call(Operation("cycle", batch))
        for (raw,) in inputs[:20]:
            cycle(raw)
        began = time.perf_counter() + 0.02  # for everybody to hear of it
        end = began + seconds
        for collector in self._collectors[:writers]:
            collector.write(began, end)
        took: list[float] = []
        while time.perf_counter() < began:
            pass
        at, now = 0, time.perf_counter()
        while now < end:
            cycle(*inputs[at])
            before, now = now, time.perf_counter()
            took.append(now - before)
            at = (at + 1) % len(inputs)
        items = sum(collector.written() for collector in self._collectors[:writers])
        return {
            "items": items / seconds,
            "cycles": len(took) / seconds,
            "p99": float(np.percentile(took, 99)),
        }

    def close(self) -> None:
        """See `Library.close`."""
        for collector in self._collectors:
            collector.end()
        self._collectors.clear()
        self._timed.clear()
        self._buffer = None

    def _call(self, operation: Operation) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        """What is called, and with what."""
        buffer, count = self._buffer, operation.count
        if operation.call == "add":
            return buffer.add, [(item,) for item in self._kind.batches(0, operation.form)]
        if operation.call == "extend":
            return buffer.extend, [(batch,) for batch in self._kind.batches(count, operation.form)]
        if operation.call == "sample":
            return buffer.sample, [(count,)]
        sets = min(COLD_SETS, max(1, 20 * self._capacity // count))
        raw = priorities(count, sets)
        if operation.call == "update":
            index = index_sets(count, sets, self._capacity)
            return buffer.update_priority, list(zip(index, raw, strict=True))
        if operation.call == "cycle":
            return _cycle(buffer, count, operation.form), [(one,) for one in raw]
        raise ValueError(f"no operation {operation.call!r}")


def _cycle(buffer: Any, count: int, form: str) -> Callable[[torch.Tensor], Any]:
    """What a learner does with the buffer in every step."""

    def by_index(raw: torch.Tensor) -> None:
        sample = buffer.sample(count)
        buffer.update_priority(sample["index"], raw)

    def by_tensordict(raw: torch.Tensor) -> None:
        sample = buffer.sample(count)
        sample.set("td_error", raw)
        buffer.update_tensordict_priority(sample)

    return by_index if form == "index" else by_tensordict


def fill(buffer: Any, kind: Kind, count: int) -> None:
    """Write ``count`` items, the same ones over and over if they are many."""
    chunk = max(1, min(count, 100_000, POOL_BYTES // kind.nbytes))
    batch = tensordict(kind.arrays(chunk, np.random.default_rng(0)), [chunk])
    for start in range(0, count, chunk):
        buffer.extend(batch[: min(chunk, count - start)])
