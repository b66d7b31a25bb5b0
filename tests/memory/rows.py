"""Rows that repeat one number in all their bytes, and calls that copy them by address.

Leaf ``number`` holds the number itself, and the other leaves repeat its low byte. A row that mixes
two writes, or was never written, is therefore detected.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from shmbuffer.memory import engine as engine_module
from tests.kit.rings import ring_of

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("next", "obs"), "uint8", (37,)),
    Leaf(("done",), "bool", ()),
    Leaf(("nothing",), "float32", (0,)),
)
CAPACITY = 8
ENTRIES = 256


def schema(capacity: int = CAPACITY, lanes: tuple[int, ...] = ()) -> Schema:
    return Schema(LEAVES, capacity, lanes)


class Rows:
    """Memory for rows of a schema, with one array for each leaf."""

    def __init__(self, leaves: tuple[Leaf, ...], count: int) -> None:
        self.leaves = leaves
        self.bytes = [np.zeros((count, leaf.nbytes), np.uint8) for leaf in leaves]

    @classmethod
    def of(cls, leaves: tuple[Leaf, ...], numbers: Numbers) -> Rows:
        rows = cls(leaves, len(numbers))
        for leaf, data in zip(leaves, rows.bytes, strict=True):
            if leaf.path == ("number",):
                data[:] = numbers.astype(np.int64)[:, None].view(np.uint8)
            else:
                data[:] = (numbers & 0xFF).astype(np.uint8)[:, None]
        return rows

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(data.ctypes.data for data in self.bytes)

    def numbers(self) -> Numbers:
        """Returns the number of each row; fails on a torn row."""
        names = [leaf.path for leaf in self.leaves]
        at = names.index(("number",))
        numbers: Numbers = self.bytes[at].reshape(-1, 8).copy().view(np.int64).ravel()
        whole = Rows.of(self.leaves, numbers)
        for leaf, found, expected in zip(self.leaves, self.bytes, whole.bytes, strict=True):
            torn = np.flatnonzero((found != expected).any(axis=1))
            assert not len(torn), f"rows {torn} are torn in leaf {leaf.name}"
        return numbers


@dataclass
class Drawn:
    """The result of a sample."""

    numbers: Numbers
    index: Numbers
    tickets: Numbers
    weights: NDArray[np.float32]
    redrawn: int


def write(
    ring: Ring,
    numbers: Iterable[int],
    priorities: Floats | None = None,
    *,
    timeout: float | None = 5.0,
) -> int:
    """Writes one element for each number."""
    given = np.array(list(numbers), np.int64)
    rows = Rows.of(ring.schema.leaves, given)
    return ring.write(rows.addresses, len(given) // ring.width, priorities, timeout=timeout)


def place(
    ring: Ring,
    where: Iterable[int],
    numbers: Iterable[int],
    priorities: Floats | None = None,
    *,
    in_place: bool = False,
    timeout: float | None = 5.0,
) -> None:
    rows = Rows.of(ring.schema.leaves, np.array(list(numbers), np.int64))
    slots = np.array(list(where), np.int64)
    ring.place(slots, rows.addresses, priorities, in_place=in_place, timeout=timeout)


def fill(ring: Ring, slots: Iterable[int], numbers: Iterable[int]) -> None:
    """Copies the payload of a split write into the ring's own memory, slot by slot."""
    where = np.array(list(slots), np.int64)
    rows = Rows.of(ring.schema.leaves, np.array(list(numbers), np.int64))
    for i, data in enumerate(rows.bytes):
        if data.size:
            target = np.frombuffer(ring.leaf(i), np.uint8)
            target.reshape(ring.capacity, -1)[where] = data.reshape(len(where), -1)


def sample(
    ring: Ring, count: int, *, key: int = 1, beta: float = 0.0, prioritized: bool = False
) -> Drawn:
    rows = Rows(ring.schema.leaves, count)
    index, tickets = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    weights = np.full(count, np.nan, np.float32)
    redrawn = ring.sample(
        count,
        key,
        rows.addresses,
        index.ctypes.data,
        tickets.ctypes.data,
        weights.ctypes.data,
        beta=beta,
        prioritized=prioritized,
    )
    return Drawn(rows.numbers(), index, tickets, weights, redrawn)


def draw(
    ring: Ring, count: int, *, key: int = 1, beta: float = 0.0, prioritized: bool = False
) -> tuple[Numbers, Numbers, NDArray[np.float32]]:
    """Draws a batch; returns index, tickets and weights."""
    index, tickets = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    weights = np.full(count, np.nan, np.float32)
    ring.sample(
        count,
        key,
        None,
        index.ctypes.data,
        tickets.ctypes.data,
        weights.ctypes.data,
        beta=beta,
        prioritized=prioritized,
    )
    return index, tickets, weights


def read(ring: Ring, index: Iterable[int]) -> tuple[Numbers, Numbers]:
    """Reads numbers and tickets; the ticket is -1 if there is no item."""
    where = np.array(list(index), np.int64)
    rows, tickets = Rows(ring.schema.leaves, len(where)), np.full(len(where), -2, np.int64)
    missing = ring.read(where.ctypes.data, len(where), rows.addresses, tickets.ctypes.data)
    assert missing == np.count_nonzero(tickets == -1)
    for data in rows.bytes:
        data[tickets == -1] = 0  # such rows are not returned
    return rows.numbers(), tickets


def contents(ring: Ring) -> dict[int, int]:
    """Returns the number of every item by element, after comparing a read, the views and a draw."""
    numbers, tickets = read(ring, range(ring.elements))
    found = {int(at): int(numbers[at]) for at in (tickets >= 0).nonzero()[0]}
    assert list(found) == ring.live.committed().tolist()
    assert ring.length == len(found)
    return found


def require_sound(engine: Engine) -> None:
    """Checks that words, length, tree and checksums are consistent."""
    report = engine.check()
    assert report.ok, str(report)


def lock_timeout(patch: pytest.MonkeyPatch, nanoseconds: int) -> None:
    """Limits how long calls of this process wait for the mutex."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shmbuffer.memory.") and hasattr(module, "LOCK_TIMEOUT_NS"):
            patch.setattr(module, "LOCK_TIMEOUT_NS", nanoseconds)


@dataclass
class Maker:
    """Makes buffers with a schema, and closes them when the test ends."""

    kind: str
    folder: Path
    made: list[Engine]

    def __call__(
        self,
        capacity: int = CAPACITY,
        lanes: tuple[int, ...] = (),
        leaves: tuple[Leaf, ...] = LEAVES,
        **settings: Any,
    ) -> Engine:
        engine = self.undefined(capacity, **settings)
        engine.define(Schema(leaves, capacity, lanes))
        return engine

    def undefined(self, capacity: int = CAPACITY, **settings: Any) -> Engine:
        recorded = Settings(capacity=capacity, **settings)
        if self.kind == "anonymous":
            engine = Engine.anonymous(recorded)
        else:
            engine = Engine.open(self.folder / str(len(self.made)), recorded)
        self.made.append(engine)
        return engine

    def second(self, engine: Engine, *, role: str = "client") -> Engine:
        """Opens another handle on the same buffer in the same process."""
        if engine.path is not None:
            again = Engine.open(engine.path, None, role=role)
        else:
            fd = os.dup(engine.seat.backing.file.fd)  # type: ignore[union-attr]
            passed = SimpleNamespace(detach=lambda: fd)  # as multiprocessing passes it to a child
            again = engine_module._adopt_memory(passed, role)
        self.made.append(again)
        return again


class Child:
    """A forked child with a pipe each way; `reached` and `go` are the two ends of a pause."""

    def __init__(self, pid: int, told: int, say: int) -> None:
        self.pid = pid
        self._told = told
        self._say = say
        self._ended: int | None = None

    def reached(self) -> None:
        """Waits until the child is at its sync point or has reported so."""
        assert os.read(self._told, 1), f"the child ended with {self.end()} before it got there"

    def go(self) -> None:
        """Lets the child continue."""
        os.write(self._say, b"\n")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def end(self) -> int:
        """Waits for the child's end; returns its status, negative for a signal."""
        if self._ended is None:
            self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._ended

    def close(self) -> None:
        if self._ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.end()
        os.close(self._told)
        os.close(self._say)


class Parent:
    """The child's side of `Child`."""

    def __init__(self, tell: int, hear: int) -> None:
        self.tell = tell
        self.hear = hear

    def pause(self) -> None:
        """Reports to the test and waits until it may continue."""
        os.write(self.tell, b"\1")
        assert os.read(self.hear, 1)

    def tell_him(self) -> None:
        """Reports to the test and continues."""
        os.write(self.tell, b"\1")

    def pause_at(self, point: str, after: int = 0) -> None:
        """Pauses when a sync point is passed."""
        _core.arm(point, "pause", after=after, notify_fd=self.tell, wait_fd=self.hear)


@contextmanager
def child(work: Callable[[Parent], object]) -> Iterator[Child]:
    """Runs ``work`` in a fork, which exits with 0 if ``work`` returns; the block's end kills it."""
    told, tell = os.pipe()
    hear, say = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(told)
            os.close(say)
            work(Parent(tell, hear))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(tell)
    os.close(hear)
    forked = Child(pid, told, say)
    try:
        yield forked
    finally:
        forked.close()


@contextmanager
def mutex_held(engine: Engine) -> Iterator[Child]:
    """Runs a process that holds the mutex until it may continue; needs a committed item."""

    def work(parent: Parent) -> None:
        ring = ring_of(engine)
        index = ring.live.committed()[:1]
        engine.seat.rejoin()
        parent.pause_at("update.locked")
        ring.update(index, np.ones(1))

    with child(work) as holder:
        holder.reached()
        yield holder


@contextmanager
def slot_held(engine: Engine, point: str = "write.claimed") -> Iterator[Child]:
    """Runs a process that claims the next slot and does not fill it until it may continue."""

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at(point)
        write(ring_of(engine), [99])

    with child(work) as holder:
        holder.reached()
        yield holder


def until_it_sleeps(process: Child) -> None:
    """Waits until a process that can only wait for the mutex does so."""
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(") ")[2][0] != "S":
        pass


def succeeds(work: Callable[[], object]) -> None:
    """Runs ``work`` in a fork that must succeed."""
    with child(lambda parent: work()) as forked:
        assert forked.end() == 0


def files_of(path: Path) -> dict[str, bytes | str]:
    """Returns everything below a directory: contents of files, targets of links, other entries."""
    found: dict[str, bytes | str] = {}
    for one in sorted(path.rglob("*")):
        name = str(one.relative_to(path))
        if one.is_symlink():
            found[name] = f"link to {os.readlink(one)}"
        elif one.is_file():
            found[name] = one.read_bytes()
        else:
            found[name] = f"mode {one.lstat().st_mode:o}"
    return found
