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
from benchmarks.items import KINDS, Kind, index_sets, priorities
from benchmarks.measure import Timed
from benchmarks.recordings import RECORDINGS, Recording

ALPHA, BETA = 0.6, 0.4
#: Of `Operation.form` for attach: of a peer that loads what it has saved.
LOADS = "loads a dump"
#: Of `Library.open`: for items of fixed size; for items of any size; for those compressed.
MEMMAP, LAZY_STACK, COMPRESSED = "memmap", "lazy stack", "compressed"
#: Compressed by functions that the library is given, of zstandard; of torchrl only.
GIVEN_ZSTD = "compressed, given zstd"
#: Compressed, frames that several items have stored once; of shmbuffer only.
FRAMES_ONCE = "compressed, frames once"
#: Of zstd, or of whatever else a library compresses with.
LEVEL = 3
#: Of `Operation.form` for sample: what is done with a batch before the clock stops.
AS_IT_COMES, READ, LISTED = "as it comes", "all entries read", "entries as lists"
PADDED, NESTED = "padded", "nested"
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

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> None:
        """Make a buffer in a new directory, and fill it."""

    def share(self, writers: int, count: int) -> None:
        """Start processes that wait to write batches of ``count``."""

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Make inputs and warm up; False if there is no such operation."""

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Seconds a call, of each block."""

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Sample and update while ``writers`` write; see `Local.contend`."""

    def shrinks(self) -> float:
        """How many times less the items take in the storage than their tensors."""

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
    _kind: Kind | Recording

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
        """A buffer for items of fixed size, empty."""

    @abstractmethod
    def make_for_records(self, directory: Path, capacity: int, storage: str) -> Any:
        """A buffer for items of any size, empty."""

    @abstractmethod
    def feeding(self, form: str) -> Callable[[int], object]:
        """How so many items of any size are drawn as a network takes them: PADDED, NESTED."""

    @abstractmethod
    def opener(self) -> Callable[[], Any]:
        """How another process gets hold of the buffer; it can be pickled."""

    @abstractmethod
    def attaching(self, form: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """How this process gets hold of the buffer once more, and how it lets go."""

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> None:
        """See `Library.open`."""
        self._kind = KINDS[kind] if storage == MEMMAP else RECORDINGS[kind]
        self._capacity = capacity
        self._directory = Path(directory) / "buffer"
        if storage == MEMMAP:
            self._buffer = self.make(self._directory, capacity, prioritized)
        else:
            self._buffer = self.make_for_records(self._directory, capacity, storage)
        self._kind.fill(self._buffer, capacity)

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
        assert isinstance(self._kind, Kind)
        opener = self.opener()
        self._collectors = [
            Collector(opener, self._kind, count, seed, self.modules) for seed in range(writers)
        ]
        for collector in self._collectors:
            collector.wait_until_ready()

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Sample and update while others write, all within the same window of time.

        Everybody does it at least once, however little the machine lets them.

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
        """See `Library.shrinks`: of items that are all equally large."""
        assert isinstance(self._kind, Recording)
        return len(self._buffer) * self._kind.mean_bytes / float(self._buffer.storage.bytes())

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
            return self._sampling(operation.form), [(count,)]
        sets = min(COLD_SETS, max(1, 20 * self._capacity // count))
        raw = priorities(count, sets)
        if operation.call == "update":
            index = index_sets(count, sets, self._capacity)
            return buffer.update_priority, list(zip(index, raw, strict=True))
        if operation.call == "cycle":
            return _cycle(buffer, count, operation.form), [(one,) for one in raw]
        raise ValueError(f"no operation {operation.call!r}")

    def _sampling(self, form: str) -> Callable[[int], object]:
        if form in (PADDED, NESTED):
            return self.feeding(form)
        sample: Callable[[int], object] = self._buffer.sample
        if form not in (READ, LISTED):
            return sample
        how = {"as_list": True} if form == LISTED else {}
        return lambda count: _entries_of(sample(count), how)


def _entries_of(sample: Any, how: dict[str, bool]) -> dict[str, Any]:
    """Each entry of a sample: of a lazy stack all tensors in one, or in a list."""
    return {key: sample.get(key, **how) for key in sample.keys()}  # noqa: SIM118


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
