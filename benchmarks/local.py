"""Common code of all libraries in their own process.

The peers import this module, so it must not import shmbuffer. Some of them do not have torch.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.collector import Collector
from benchmarks.items import KINDS, Kind, index_sets, priorities
from benchmarks.library import ARRAYS, COLD_SETS, MEMMAP, Operation
from benchmarks.measure import Timed

Call = tuple[Callable[..., Any], list[tuple[Any, ...]]]
"""A function, and the arguments of its calls in order."""


class Local(ABC):
    """A library in this process.

    Subclasses define how a buffer is created and which functions are called for an operation.
    """

    name: str
    distributions: ClassVar[tuple[str, ...]]
    """Distributions whose versions are reported."""
    modules: ClassVar[list[str]] = []
    """Modules that a process with a writer imports."""
    batches: ClassVar[str] = ARRAYS
    """Form of the data that collectors write and that a learner samples."""
    most_items: ClassVar[int] = sys.maxsize
    """Largest number of items in the buffer, because filling a larger one takes too long."""
    most_writers: ClassVar[int] = 0
    """Largest number of writers beside a learner; 0 if the buffer cannot be shared."""

    def __init__(self) -> None:
        np.random.seed(0)  # what torchrl, tianshou and stable-baselines3 draw with
        self._collectors: list[Collector] = []
        self._timed: dict[Operation, Timed] = {}
        self._buffer: Any = None
        self._kind: Kind
        self._capacity = 0
        self._prioritized = False

    @abstractmethod
    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Creates a buffer for items of fixed size."""

    @abstractmethod
    def call(self, operation: Operation) -> Call | None:
        """Returns the function and the arguments of an operation; None if it is not available."""

    def versions(self) -> dict[str, str]:
        """Implements `Library.versions`."""
        return {name: _version(name) for name in self.distributions}

    def fill(self, buffer: Any, capacity: int) -> None:
        """Writes items to a new buffer until it is full."""
        self._kind.fill(buffer.extend, capacity, self.batches)

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Implements `Library.open`."""
        if storage != MEMMAP:
            return False
        self._kind = KINDS[kind]
        self._capacity = min(capacity, self.most_items)
        self._prioritized = prioritized
        self._directory = Path(directory) / "buffer"
        self._buffer = self.make(self._directory, self._capacity, prioritized)
        if self._buffer is None:
            return False
        self.fill(self._buffer, self._capacity)
        return True

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        called = self.call(operation)
        if called is not None:
            self._timed[operation] = Timed(*called, block_s)
        return called is not None

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Implements `Library.round`."""
        return self._timed[operation].blocks(blocks)

    def calls(self, operation: Operation, count: int) -> list[float]:
        """Implements `Library.calls`."""
        return self._timed[operation].each(count)

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Returns a picklable function that opens the buffer in another process, for writes."""
        raise NotImplementedError(f"{self.name} is not shared between processes")

    def share(self, writers: int, count: int) -> int:
        """Implements `Library.share`."""
        writers = min(writers, self.most_writers)
        if not writers:
            return 0
        opener = self.opener()
        self._collectors = [
            Collector(opener, self._kind, count, self.batches, seed, self.modules)
            for seed in range(writers)
        ]
        for collector in self._collectors:
            collector.wait_until_ready()
        return writers

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Samples and updates while other processes write, all within the same period.

        Each process makes at least one call, even on a busy machine.

        Returns:
            ``items`` and ``cycles``: numbers per second. ``p99``: time of a cycle in seconds.
        """
        called = self.call(Operation("cycle", batch, self.batches))
        assert called is not None
        cycle, inputs = called
        for arguments in inputs[:20]:
            cycle(*arguments)
        began = time.perf_counter() + 0.02  # for everybody to hear of it
        end = began + seconds
        for collector in self._collectors[:writers]:
            collector.write(began, end)
        took: list[float] = []
        while time.perf_counter() < began:
            pass
        at, now = 0, time.perf_counter()
        while not took or now < end:
            cycle(*inputs[at])
            before, now = now, time.perf_counter()
            took.append(now - before)
            at = (at + 1) % len(inputs)
        items = sum(collector.rate() for collector in self._collectors[:writers])
        return {
            "items": items,
            "cycles": len(took) / (now - began),
            "p99": float(np.percentile(took, 99)),
        }

    def shrinks(self) -> float:
        """Implements `Library.shrinks`."""
        raise NotImplementedError(f"{self.name} is not measured with items of any size")

    def close(self) -> None:
        """Implements `Library.close`."""
        for collector in self._collectors:
            collector.end()
        self._collectors.clear()
        self._timed.clear()
        self._buffer = None

    def raw_priorities(self, count: int) -> list[Any]:
        """Returns the sets of priorities that updates use in turn."""
        return list(priorities(count, self._sets(count)))

    def indices(self, count: int) -> list[Any]:
        """Returns the sets of indices that updates use in turn; see `COLD_SETS`."""
        return list(index_sets(count, self._sets(count), self._capacity))

    def _sets(self, count: int) -> int:
        return min(COLD_SETS, max(1, 20 * self._capacity // count))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "from its source"))
