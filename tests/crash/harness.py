"""Kills processes at named points and checks what they leave behind.

A victim is forked from a process that has loaded only the C core and numpy. It attaches by path,
arms a crash point and works until it dies there. The remains are then checked without the engine's
own bookkeeping: every leaf of an item encodes the item's number in a different way. A mixture of
two items, an item that no process wrote and a missing item therefore all show in the bytes.

Items are rows of leaves, or records of different sizes in a byte ring. The byte ring has space for
all records or only for some of them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import shmbuffer.memory
from shmbuffer import RateLimitTimeout
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from shmbuffer.memory.system import deadline
from tests.memory.numbered import number_of, records

T = TypeVar("T")
CAPACITY = 8
LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("next", "square"), "float64", (3,)),
    Leaf(("bytes",), "uint8", (5,)),
)
SETTINGS = Settings(capacity=CAPACITY, alpha=0.5, eps=0.0)
#: Size of the byte ring for each kind of item, or 0 if an item is a row of leaves.
KINDS = {"rows": 0, "records": 16384, "short records": 4096}
#: Steps of a write that exist only for records.
RECORD_POINTS = (
    *("write.evict_leaf", "write.evict", "write.evicted", "write.tail", "write.byte_first"),
    *("write.header", "write.extent", "write.bytes"),
)
EVICTIONS = ("write.evict_leaf", "write.evict", "write.evicted")


def settings(kind: str) -> Settings:
    return replace(SETTINGS, record_bytes=KINDS[kind])


def schema(kind: str = "rows") -> Schema:
    if KINDS[kind]:
        return Schema((), CAPACITY, (), {"kind": "records"}, KINDS[kind])
    return Schema(LEAVES, CAPACITY)


def native_points(prefix: str) -> list[str]:
    """Returns the points of the C core whose names have this prefix."""
    return [name for name in _core.crash_points() if name.startswith(prefix + ".")]


def python_points(prefix: str) -> list[str]:
    """Returns the points of the memory floor's Python code with this prefix, in source order."""
    folder = Path(shmbuffer.memory.__file__).parent
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    return list(dict.fromkeys(re.findall(rf'reached\("({prefix}\.\w+)"\)', text)))


class Batch:
    """The leaves of items, computed from the numbers of the items."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = np.array(list(numbers), np.int64)
        self.square = np.repeat(self.numbers[:, None].astype(float) ** 2, 3, axis=1).copy()
        self.bytes = np.repeat(
            (self.numbers[:, None] * 37 % 251).astype(np.uint8), 5, axis=1
        ).copy()

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.numbers.ctypes.data, self.square.ctypes.data, self.bytes.ctypes.data

    def __len__(self) -> int:
        return len(self.numbers)


def write(ring: Ring, numbers: Iterable[int], **options: object) -> int:
    batch = Batch(numbers)
    priorities = (batch.numbers + 1).astype(np.float64)
    if ring.records is not None:
        return ring.records.write(records(batch.numbers.tolist()), priorities, **options)  # type: ignore[arg-type]
    return ring.write(batch.addresses, len(batch), priorities, **options)  # type: ignore[arg-type]


def place(ring: Ring, where: list[int], numbers: Iterable[int], *, in_place: bool) -> None:
    batch = Batch(numbers)
    if ring.records is not None:
        rows = records(batch.numbers.tolist())
        ring.records.place(np.array(where, np.int64), rows, in_place=in_place)
        return
    ring.place(np.array(where, np.int64), batch.addresses, in_place=in_place)


def read_all(ring: Ring) -> dict[int, int]:
    """Returns the number of the item in each slot by validated reads; fails on a torn item."""
    index = np.arange(ring.elements, dtype=np.int64)
    if ring.records is not None:
        drawn = ring.records.read(index)
        there = (drawn.tickets >= 0).nonzero()[0].tolist()
        return {slot: number_of(drawn.batch.body(slot)) for slot in there}
    batch, tickets = Batch(range(ring.elements)), np.empty(ring.elements, np.int64)
    ring.read(index.ctypes.data, len(index), batch.addresses, tickets.ctypes.data)
    for slot in (tickets >= 0).nonzero()[0]:
        require_whole(batch, int(slot))
    return {int(slot): int(batch.numbers[slot]) for slot in (tickets >= 0).nonzero()[0]}


def sample(ring: Ring, count: int = 64, *, key: int = 7, prioritized: bool = True) -> Batch:
    if ring.records is not None:
        drawn = ring.records.sample(count, key, beta=0.4 if prioritized else None)
        return Batch(number_of(drawn.batch.body(row)) for row in range(count))
    batch, index = Batch(range(count)), np.empty(count, np.int64)
    tickets = np.empty(count, np.int64)
    ring.sample(
        count,
        key,
        batch.addresses,
        index.ctypes.data,
        tickets.ctypes.data,
        prioritized=prioritized,
    )
    for row in range(count):
        require_whole(batch, row)
    return batch


def require_whole(batch: Batch, row: int) -> None:
    expected = Batch([int(batch.numbers[row])])
    assert (batch.square[row] == expected.square[0]).all(), f"row {row} is torn"
    assert (batch.bytes[row] == expected.bytes[0]).all(), f"row {row} is torn"


def fork(body: Callable[[], None]) -> int:
    """Runs ``body`` in a child, whose exit status is 0, or 70 with a traceback if it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> int:
    """Waits for a child; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def each_point(body: Callable[[int, int], None]) -> Generator[str]:
    """Runs ``body`` in a child that stops at each crash point until the next one is requested.

    Args:
        body: gets two descriptors, and arms every point with them:
            ``_core.arm("*", "pause", notify_fd=first, wait_fd=second)``.

    Yields:
        The names of the points. Closing the generator kills the child at its current point.
    """
    told, tell = os.pipe()
    hear, go = os.pipe()

    def child() -> None:
        os.close(told)
        os.close(go)
        body(tell, hear)

    pid = fork(child)
    os.close(tell)
    os.close(hear)
    try:
        with os.fdopen(told, "rb") as lines:
            for line in lines:
                yield line.decode().rstrip("\n")
                os.write(go, b"\n")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        status = ended(pid)
        os.close(go)
    assert status == 0, f"the child ended with {status}; its traceback is above"


def succeeds(body: Callable[[], None]) -> None:
    """Runs ``body`` in a new process, which has to succeed."""
    assert ended(fork(body)) == 0, "the fresh process failed; its traceback is above"


def called(body: Callable[[], None]) -> None:
    """Runs ``body`` in this process with its own handle, where a new process would be too slow."""
    body()


def is_killed_at(point: str, passing: int, work: Callable[[], object]) -> bool:
    """True if a process is killed at a point after it has passed the point ``passing`` times."""

    def body() -> None:
        _core.arm(point, after=passing)
        work()

    return ended(fork(body)) == -signal.SIGKILL


def dies(path: Path, point: str, work: Callable[[Engine], None], after: int = 0) -> bool:
    """Starts a victim that attaches, arms ``point`` and works.

    Returns False if the victim finished, because it did not pass the point often enough.
    """

    def body() -> None:
        engine = Engine.open(path, None)
        _core.arm(point, after=after)
        work(engine)
        _core.disarm()
        engine.close()

    status = ended(fork(body))
    assert status in (0, -signal.SIGKILL), f"the victim ended with {status}"
    return status == -signal.SIGKILL


@contextmanager
def stopped_at(path: Path, point: str, work: Callable[[Engine], None]) -> Iterator[int]:
    """Runs a victim that stops at ``point`` until the block ends, and is then killed."""
    told, tell = os.pipe()
    hear, say = os.pipe()

    def body() -> None:
        engine = Engine.open(path, None)
        _core.arm(point, "pause", notify_fd=tell, wait_fd=hear)
        work(engine)

    pid = fork(body)
    os.close(tell)
    try:
        assert os.read(told, 1), f"the victim never came to {point}"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        for fd in (told, hear, say):
            os.close(fd)


def require_sound(engine: Engine) -> None:
    """Checks G5: nodes, leaves, lengths and words are exact, and no slot is lost."""
    ring = engine.ring()
    assert ring is not None
    report = engine.check()
    assert report.ok, report.problems
    assert ring.length == len(read_all(ring))


def require_usable(ring: Ring, number: int) -> None:
    """Checks G4: a survivor can write, sample and update."""
    before = ring.write_count
    ticket = write(ring, [number])
    assert read_all(ring)[ticket % ring.capacity] == number
    assert ring.write_count == before + 1
    assert number in sample(ring, 512).numbers
    index = np.array([ticket % ring.capacity])
    assert ring.update(index, np.array([2.0]), np.array([ticket])) == (1, 0)
    assert ring.update(index, np.array([9.0]), np.array([ticket + 8])) == (0, 1)
    assert ring.tree.priorities()[index[0]] == 2.0


def victim(path: Path, point: str, after: int = 0) -> None:
    """Kills a process at a point of a write of four items around the end of the ring."""
    assert dies(
        path, point, lambda engine: write(engine.ring(), range(100, 104)) and None, after=after
    )  # type: ignore[arg-type, func-returns-value]


def arm_and_open(path: Path, point: str, after: int) -> None:
    _core.arm(point, after=after)
    Engine.open(path, None)
    _core.disarm()


def mends(path: Path, point: str, after: int = 0) -> bool:
    """Starts a second victim, which repairs; returns True if it was killed at the point."""

    def body() -> None:
        _core.arm(point, after=after)
        with Engine.open(path, None) as engine:
            engine.seat.reap_dead()
            _core.disarm()

    status = ended(fork(body))
    assert status in (0, -signal.SIGKILL), f"the second victim ended with {status}"
    return status == -signal.SIGKILL


def dies_after(path: Path, work: Callable[[Engine], None]) -> None:
    """Kills a process after it has done the work. Its entry in the registry stays."""

    def body() -> None:
        engine = Engine.open(path, None)
        work(engine)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(body)) == -signal.SIGKILL


def each_death(
    folder: Path,
    begin: Callable[[Path], AbstractContextManager[T]],
    kill: Callable[[Path, int], bool],
    passings: Iterable[int],
) -> Iterator[T]:
    """Yields the buffer of each of several victims, with a survivor that is attached to it.

    A victim is killed when it passes its point for the first time, the next one when it passes the
    point again. The first victim that is not killed ends the loop.

    Args:
        folder: folder in which each victim gets its own buffer.
        begin: creates a buffer and keeps a client attached.
        kill: runs a victim, as `dies` does; returns True if it was killed.
        passings: how often the victims have passed the point before they are killed.
    """
    for passing in passings:
        path = folder / str(passing)
        with begin(path) as survivor:
            if not kill(path, passing):
                assert passing, "the point was never reached"
                return
            yield survivor


def each_recovery(
    folder: Path,
    begin: Callable[[Path], AbstractContextManager[object]],
    kill: Callable[[Path, int], bool],
    passings: Iterable[int],
) -> Iterator[Engine]:
    """Yields each buffer after a victim was killed and another process has opened the buffer.

    Args:
        folder, begin, kill, passings: as for `each_death`. Only the victim uses the buffer.
    """
    for passing in passings:
        path = folder / str(passing)
        with begin(path):
            pass
        if not kill(path, passing):
            assert passing, "the point was never reached"
            return
        with Engine.open(path, None) as found:
            assert found.report is not None
            yield found


def waits_for_the_mutex_of(
    path: Path, point: str, victim: Callable[[Engine], None], act: Callable[[Engine], None]
) -> None:
    """Starts a process that acts while a victim stands still at the point, then kills the victim.

    The victim may hold the mutex there. The process has to succeed.
    """
    started, start = os.pipe()

    def waits() -> None:
        with Engine.open(path, None) as waiter:
            os.write(start, b"x")
            act(waiter)

    with stopped_at(path, point, victim):
        waiter = fork(waits)
        assert os.read(started, 1) == b"x"
    assert ended(waiter) == 0
    os.close(started)
    os.close(start)


def goes(call: Callable[[], object]) -> bool:
    """True if a call succeeds without waiting."""
    try:
        with deadline.limit_waits(0):
            call()
    except RateLimitTimeout:
        return False
    return True


def take(ring: Ring, count: int, *, release: bool = True) -> list[int]:
    """Takes the next items of a queue, which must be present, and returns their numbers."""
    index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
    with deadline.limit_waits(0):
        assert ring.admission.take(index, tickets)
    try:
        if ring.records is not None:
            drawn = ring.records.read(index)
            return [number_of(drawn.batch.body(row)) for row in range(count)]
        there = read_all(ring)
        return [there[int(slot)] for slot in index]
    finally:
        if release:
            ring.admission.release()


def take_all(ring: Ring) -> list[int]:
    """Takes all remaining items of a queue and returns their numbers."""
    found: list[int] = []
    while goes(lambda: found.extend(take(ring, 1))):
        pass
    return found


def everything(path: Path) -> list[str]:
    """Returns the names of all files below a directory."""
    return sorted(
        str(Path(folder, name).relative_to(path))
        for folder, _, names in os.walk(path)
        for name in names
    )
