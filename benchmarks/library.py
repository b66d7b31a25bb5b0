"""Interface of a compared library: create a buffer, prepare an operation, and time it.

    benchmark ── Library ─┬─ ours.py                    in this process
                          └─ peer.py ══ pipes ══ served.py ── peers/torchrl.py, peers/cpprb.py, ...
                                                     each in its own interpreter

`local.py` has the common code of all libraries in their own process. `torchlike.py` has the calls
of TorchRL's API, which shmbuffer shares.

The peers import this module, so it must not import shmbuffer. Some of them do not have torch.
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
        """Parses the form of an `Operation`."""
        what, work_ms, prefetch = form.split(" / ")
        return cls(what, int(work_ms), int(prefetch))


@dataclass(frozen=True)
class Operation:
    """A call of the API.

    Attributes:
        call: name of the call; see `TorchLike.call`. ``"loop"`` is a sample in a learner's loop,
            and ``"step"`` a sample and the work of the learner.
        count: number of items per call.
        form: form of the data.
    """

    call: str
    count: int = 1
    form: str = TENSORDICT


class Library(Protocol):
    """A library with one open buffer at a time, in this process or in another interpreter."""

    name: str

    def versions(self) -> dict[str, str]:
        """Returns the versions of the library and of its dependencies."""

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Creates and fills a buffer in a new directory; False if the library has none."""

    def share(self, writers: int, count: int) -> int:
        """Starts processes that will write batches of ``count``; returns their number."""

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Creates inputs and warms up; False if the library does not have the operation."""

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Returns the time per call in seconds, for each block."""

    def calls(self, operation: Operation, count: int) -> list[float]:
        """Returns the times of ``count`` single calls in seconds."""

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Samples and updates while ``writers`` write; see `Local.contend`."""

    def shrinks(self) -> float:
        """Returns the size of the items as tensors, divided by their size in the storage."""

    def close(self) -> None:
        """Closes the buffer and ends its processes, but keeps its files."""
