"""Append-only logs in which processes note what they do. A write(2) to a log is never torn.

    <chair>.calls     EVENT: start and return of each write and update, and states of the ring
    <chair>.samples   SAMPLE: each row that a learner was given
    <chair>.updates   UPDATE: each priority that a learner gave back, noted before the call

A process writes one entry before a call and another one after the call has returned. A kill between
the two leaves a call without an outcome: the call may have happened or not, but never in part. The
sizes of entries divide a page, so an entry lies within one page and a kill cannot cut it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.torture.items import Keys

EVENT = np.dtype(
    [("kind", "<i8"), ("who", "<i8"), ("began", "<i8"), ("ended", "<i8")]
    + [(name, "<i8") for name in ("first", "count", "a", "b")]
)
SAMPLE = np.dtype([("key", "<u8"), ("ticket", "<i8"), ("began", "<i8"), ("ended", "<i8")])
UPDATE = np.dtype([("key", "<u8"), ("ticket", "<i8"), ("began", "<i8"), ("raw", "<f8")])
_CARRIED = "carried.npz"
#: End of a call without an outcome, ticket of a batch without an outcome, and ticket of a batch
#: that was refused.
NEVER, NO_OUTCOME, WAS_REFUSED = 2**63 - 1, -1, -2
assert all(4096 % kind.itemsize == 0 for kind in (EVENT, SAMPLE, UPDATE))


class Kind(IntEnum):
    """The kind of an event. The docstring of each member describes the fields of the event."""

    INVOKED = 1
    """A write begins: ``first`` is the first sequence number, ``count`` the number of items."""
    WRITTEN = 2
    """The write has returned: ``a`` is the first ticket."""
    REFUSED = 3
    """The write has raised an error which says that nothing was written."""
    UPDATED = 4
    """An update of ``count`` rows, beginning with row ``first`` of the chair, has applied ``a``."""
    SEEN = 5
    """The ring was read between ``began`` and ``ended``: ``a`` is the head, ``b`` the write count.

    ``count`` is the incarnation of the handle, and ``first`` the epoch, or -1 if it was not read.
    """
    DIED = 6
    """Written by the process that kills: ``who`` did nothing after ``ended``."""
    INTERRUPTED = 7
    """A call raised KeyboardInterrupt and left ``a`` locks that belong to no handle."""
    FORKED = 8
    """A forked child begins to use the handle that it has inherited."""
    COPIED = 9
    """The directory was copied: ``first`` is the number of the copy.

    No acknowledged item with ticket ``a`` or later had been overwritten when the copy ended.
    """
    RESTORED = 10
    """A copy was put back, starting at ``began``: ``first`` is its number.

    After the recovery, ``a`` is the head and ``b`` the write count.
    """


MARKS = (Kind.INTERRUPTED, Kind.FORKED, Kind.COPIED, Kind.RESTORED)


class Log:
    """The account of one process. A ``with`` block, or the end of the process, closes it."""

    def __init__(self, folder: Path, chair: int | str, who: int) -> None:
        self.folder, self.who = folder, who
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._updates, self._samples, self._calls = (
            os.open(folder / f"{chair}.{name}", flags, 0o600)
            # Readers open the last of these files first.
            for name in ("updates", "samples", "calls")
        )
        self._event = np.zeros(1, EVENT)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in (self._calls, self._samples, self._updates):
            os.close(descriptor)

    def _write(self, kind: Kind, began: int, *numbers: int) -> None:
        entry = (int(kind), self.who, began, time.monotonic_ns(), *numbers)
        self._event[0] = entry
        append(self._calls, self._event)

    def invoked(self, first: int, count: int) -> None:
        self._write(Kind.INVOKED, time.monotonic_ns(), first, count, 0, 0)

    def written(self, first: int, count: int, ticket: int) -> None:
        self._write(Kind.WRITTEN, time.monotonic_ns(), first, count, ticket, 0)

    def refused(self, first: int, count: int) -> None:
        self._write(Kind.REFUSED, time.monotonic_ns(), first, count, 0, 0)

    def died(self, who: int) -> None:
        self._event[0] = (Kind.DIED, who, 0, time.monotonic_ns(), 0, 0, 0, 0)
        append(self._calls, self._event)

    def seen(
        self, began: int, head: int, write_count: int, epoch: int = -1, incarnation: int = 0
    ) -> None:
        self._write(Kind.SEEN, began, epoch, incarnation, head, write_count)

    def interrupted(self, locks: int) -> None:
        self._write(Kind.INTERRUPTED, time.monotonic_ns(), 0, 0, locks, 0)

    def forked(self) -> None:
        self._write(Kind.FORKED, time.monotonic_ns(), 0, 0, 0, 0)

    def copied(self, number: int, began: int, ended: int, oldest: int) -> None:
        self._event[0] = (Kind.COPIED, self.who, began, ended, number, 0, oldest, 0)
        append(self._calls, self._event)

    def restored(self, number: int, began: int, head: int, write_count: int) -> None:
        self._write(Kind.RESTORED, began, number, 0, head, write_count)

    def sampled(self, began: int, keys: Keys, tickets: NDArray[np.int64]) -> None:
        rows = np.zeros(len(keys), SAMPLE)
        rows["key"], rows["ticket"], rows["began"] = keys, tickets, began
        rows["ended"] = time.monotonic_ns()
        append(self._samples, rows)

    def updating(
        self, keys: Keys, tickets: NDArray[np.int64], priorities: NDArray[np.float64]
    ) -> int:
        """Notes an update before it is called; returns the value that `updated` has to be given."""
        rows = np.zeros(len(keys), UPDATE)
        rows["key"], rows["ticket"], rows["raw"] = keys, tickets, priorities
        rows["began"] = time.monotonic_ns()
        first = os.fstat(self._updates).st_size // UPDATE.itemsize
        append(self._updates, rows)
        return first

    def updated(self, first: int, count: int, applied: int) -> None:
        self._write(Kind.UPDATED, time.monotonic_ns(), first, count, applied, 0)


def append(descriptor: int, entries: NDArray[Any]) -> None:
    """Appends entries with one write per page, because a kill may cut a larger write."""
    step = 4096 // entries.itemsize
    at = os.lseek(descriptor, 0, os.SEEK_END) // entries.itemsize % step
    data = entries
    while len(data):
        piece = data[: step - at]
        assert os.write(descriptor, piece.tobytes()) == piece.nbytes
        data, at = data[len(piece) :], 0


class History:
    """The calls of all processes in a round.

    Attributes:
        batches: one row per write, sorted by key: the key of its first item, the count, when it was
            invoked, when it returned or its writer died, and the ticket. A ticket of -1 means no
            outcome, and -2 means that the write was refused.
        samples: SAMPLE rows.
        updates: UPDATE rows with their outcome: ``ended`` (NEVER if there is none), the number of
            rows in the ``call``, and how many of them were ``applied``.
        seen: EVENT rows of that kind.
        marks: EVENT rows of the kinds in `MARKS`.
        forgotten_written, forgotten_open: items in batches that `forget` has dropped.
    """

    BATCH = np.dtype(
        [("key", "<u8"), ("count", "<i8"), ("began", "<i8"), ("ended", "<i8"), ("ticket", "<i8")]
    )
    OUTCOME = np.dtype([*UPDATE.descr, ("ended", "<i8"), ("call", "<i8"), ("applied", "<i8")])

    def __init__(
        self,
        batches: Any,
        samples: Any,
        updates: Any,
        seen: Any,
        marks: Any,
        forgotten: tuple[int, int] = (0, 0),
    ) -> None:
        self.forgotten_written, self.forgotten_open = forgotten
        self.batches = batches[np.argsort(batches["key"], kind="stable")]
        self.samples = samples
        self.updates = updates
        self.seen = seen
        self.marks = marks

    @classmethod
    def read(cls, folder: Path) -> History:
        """Reads all logs in a folder."""
        batches, samples, updates, seen, died, marks = [], [], [], [], [], []
        for path in sorted(folder.glob("*.calls")):
            calls = _load(path, EVENT)
            batches.append(_batches(calls))
            samples.append(_load(path.with_suffix(".samples"), SAMPLE))
            updates.append(_outcomes(_load(path.with_suffix(".updates"), UPDATE), calls))
            seen.append(calls[calls["kind"] == Kind.SEEN])
            died.append(calls[calls["kind"] == Kind.DIED])
            marks.append(calls[np.isin(calls["kind"], MARKS)])
        deaths = {int(one["who"]): int(one["ended"]) for one in _joined(died, EVENT)}
        known = _joined(batches, cls.BATCH)
        for open_one in (known["ended"] == NEVER).nonzero()[0]:
            known["ended"][open_one] = deaths.get(int(known["key"][open_one]) >> 32, NEVER)
        samples_and_more = (
            _joined(samples, SAMPLE),
            _joined(updates, cls.OUTCOME),
            _joined(seen, EVENT),
            _joined(marks, EVENT),
        )
        carried = folder / _CARRIED
        if not carried.exists():
            return cls(known, *samples_and_more)
        with np.load(carried) as before:
            return cls(
                np.concatenate([before["batches"], known]),
                samples_and_more[0],
                np.concatenate([before["updates"], samples_and_more[1]]),
                np.concatenate([before["seen"], samples_and_more[2]]),
                samples_and_more[3],
                (int(before["forgotten"][0]), int(before["forgotten"][1])),
            )

    def forget(self, folder: Path, oldest: int) -> None:
        """Removes from the logs everything that does not concern ``oldest`` or a later ticket.

        All processes stand still between two calls, and the writes of dead processes are finished.
        A batch of which no item is present will therefore never be present.
        """
        written = self.batches["ticket"] >= 0
        kept = written & (self.batches["ticket"] + self.batches["count"] > oldest)
        left, others = self.batches[written & ~kept], self.batches[~written]
        forgotten = (
            self.forgotten_written + int(left["count"].sum()),
            self.forgotten_open + int(others["count"].sum()),
        )
        last = self.seen[np.argsort(self.seen["ended"], kind="stable")][-1:]
        for name in ("a", "b"):
            last[name] = self.seen[name].max(initial=0)
        np.savez(
            folder / _CARRIED,
            batches=self.batches[kept],
            updates=self.updates[self.updates["ticket"] >= oldest],
            seen=last,
            forgotten=np.array(forgotten),
        )
        for name in ("calls", "samples", "updates"):
            for path in folder.glob(f"*.{name}"):
                os.truncate(path, 0)


def _load(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    data = path.read_bytes()
    assert len(data) % kind.itemsize == 0, f"{path}: the log itself is torn"
    return np.frombuffer(data, kind)


def _joined(parts: Sequence[Any], kind: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([*parts, np.empty(0, kind)]).astype(kind)


def _batches(calls: Any) -> NDArray[Any]:
    """Joins each start of a write with the outcome that follows it, if there is one."""
    writes = calls[np.isin(calls["kind"], (Kind.INVOKED, Kind.WRITTEN, Kind.REFUSED))]
    begun = (writes["kind"] == Kind.INVOKED).nonzero()[0]
    found = np.zeros(len(begun), History.BATCH)
    invoked = writes[begun]
    found["key"] = invoked["who"].astype(np.uint64) << np.uint64(32) | invoked["first"].astype("u8")
    found["count"], found["began"] = invoked["count"], invoked["began"]
    found["ticket"], found["ended"] = NO_OUTCOME, NEVER
    following = np.minimum(begun + 1, len(writes) - 1)
    after = writes[following]
    same = (after["who"] == invoked["who"]) & (after["first"] == invoked["first"])
    written, refused = (same & (after["kind"] == kind) for kind in (Kind.WRITTEN, Kind.REFUSED))
    found["ticket"][written] = after["a"][written]
    found["ticket"][refused] = WAS_REFUSED
    # An interrupted call of a process that went on has an end, too.
    over = written | refused | ((after["who"] == invoked["who"]) & (following > begun))
    found["ended"][over] = after["began"][over]
    return found


def _outcomes(updates: Any, calls: Any) -> NDArray[Any]:
    found = np.zeros(len(updates), History.OUTCOME)
    for name in UPDATE.names or ():
        found[name] = updates[name]
    found["ended"] = NEVER
    returned = calls[calls["kind"] == Kind.UPDATED]
    counts = returned["count"]
    before = np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(returned["first"] - before, counts)
    for name, outcome in (("ended", "began"), ("call", "count"), ("applied", "a")):
        found[name][rows] = np.repeat(returned[outcome], counts)
    return found
