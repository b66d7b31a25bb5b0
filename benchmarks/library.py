"""What a benchmark asks of a library: make a buffer, be ready for an operation, be timed.

    benchmark ── Library ─┬─ ours.py                    in this process
                          └─ peer.py ══ pipes ══ served.py ── peers/torchrl.py, peers/cpprb.py, ...
                                                     each in an interpreter of its own

What all of them have in common once they are in their process is in `local.py`; the calls of
TorchRL's API, which shmbuffer has too, stand once, in `torchlike.py`.

Imported by the peers too: it must not import shmbuffer, and not all of them have torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ALPHA, BETA = 0.6, 0.4
#: Of `Operation.form`: how a batch comes or goes.
ARRAYS, TENSORDICT, INDEX = "arrays", "TensorDict", "index"
#: Of `Operation.form` for sample: into a TensorDict that the caller uses again and again.
OUT = "TensorDict, out="
#: Of `Operation.form` for attach: of a peer that loads what it has saved.
LOADS = "loads a dump"
#: Of `Operation.form` for save: where the storage has its files; where it has not.
IN_PLACE, ELSEWHERE = "in place", "elsewhere"
#: Of `Library.open`: for items of fixed size; for items of any size; for those compressed.
MEMMAP, LAZY_STACK, COMPRESSED = "memmap", "lazy stack", "compressed"
#: Compressed by functions that the library is given, of zstandard; of torchrl only.
GIVEN_ZSTD = "compressed, given zstd"
#: Of zstd, or of whatever else a library compresses with.
LEVEL = 3
#: Of `Operation.form` for sample: what is done with a batch before the clock stops.
AS_IT_COMES, READ, LISTED = "as it comes", "all entries read", "entries as lists"
PADDED, NESTED = "padded", "nested"
#: Steps of the windows: before the item that is drawn, from it on, and behind those.
WINDOW = (4, 8, 1)
#: Of `Operation.form` for hindsight and windows: whether items are written in between.
QUIET, AFTER_WRITE = "quiet", "after add(1)"
#: Of `Operation.form` for mixed: where the data set is.
IN_MEMORY, IN_FILES = "data set in memory", "data set in files"
#: Of `Operation.form` for slices: how they are drawn; by ids and steps, wherever items lie.
UNIFORM, BY_PRIORITY, FRAGMENTED = "uniform", "prioritized", "fragmented"
#: Of `Operation.form` for passes: what comes before a batch without replacement.
BEHIND_WRITES, FIRST_OF_PASS = "after extend(32)", "first of a pass"
#: Of `Operation.form` for labelled and beside: by the version of items, by their groups, or as
#: they come.
BY_STALENESS, IN_GROUPS, IN_STREAMS = "by staleness", "in groups", "in windows as they come"
#: Of `Loop.what`: small items, uniform or by priority; others; small items that are transformed.
FRAMES, RECORDS, TRANSFORMED = "frames", "records", "transforms"
#: As many sets of indices that updates take turns with: their part of the tree is not in the cache.
COLD_SETS = 2000


@dataclass(frozen=True)
class Loop:
    """The form of a learner's loop."""

    what: str  # is drawn: BY_PRIORITY, TRANSFORMED or anything else
    work_ms: int  # between two samples
    prefetch: int

    def __str__(self) -> str:
        return f"{self.what} / {self.work_ms} / {self.prefetch}"

    @classmethod
    def parse(cls, form: str) -> Loop:
        """From the form of an `Operation`."""
        what, work_ms, prefetch = form.split(" / ")
        return cls(what, int(work_ms), int(prefetch))


@dataclass(frozen=True)
class Operation:
    """One call of the API.

    Attributes:
        call: ``"add"``, ``"extend"``, ``"sample"``, ``"update"``, ``"cycle"``, ``"attach"``,
            ``"save"``, ``"hindsight"``, ``"mixed"``, ``"windows"``,
            ``"frames"``, ``"slices"``, ``"passes"``, ``"labelled"``, ``"beside"``,
            ``"reserve"``, ``"loop"`` (a sample in a learner's loop, which works in between) or
            ``"step"`` (a sample and the work).
        count: items of a call.
        form: how the data come or go.
    """

    call: str
    count: int = 1
    form: str = TENSORDICT


class Library(Protocol):
    """A library with one open buffer at a time, here or in another interpreter."""

    name: str

    def versions(self) -> dict[str, str]:
        """Its own, and of what it stands on."""

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Make a buffer in a new directory, and fill it; False if it has no such buffers."""

    def share(self, writers: int, count: int) -> int:
        """Start processes that wait to write batches of ``count``; how many it can have."""

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Make inputs and warm up; False if there is no such operation."""

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Seconds a call, of each block."""

    def calls(self, operation: Operation, count: int) -> list[float]:
        """Seconds of each of so many calls, one by one."""

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Sample and update while ``writers`` write; see `Local.contend`."""

    def shrinks(self) -> float:
        """How many times less the items take in the storage than their tensors."""

    def close(self) -> None:
        """Let go of the buffer and end its processes; its files stay."""
