"""Killing processes at named points, and looking at what is left.

A victim is forked from a process that has loaded the C core and numpy only, attaches by path, arms
a crash point and works until it dies there. What is left is then audited from outside the engine's
own
bookkeeping: every leaf of an item carries the item's number in its own way, so that a mixture of
two items, an item that nobody wrote and a missing item all show in the bytes.

Items are rows of leaves, or records of different sizes, in a byte ring with room for all of them or
with room for some.
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
#: Bytes of the byte ring, by what an item is; 0: a row of leaves.
KINDS = {"rows": 0, "records": 16384, "short records": 4096}
#: Steps of a write that only records have.
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
    """Points compiled into the C core whose names start so."""
    return [name for name in _core.crash_points() if name.startswith(prefix + ".")]


def python_points(prefix: str) -> list[str]:
    """Points in the Python code of the memory floor whose names start so, in source order."""
    folder = Path(shmbuffer.memory.__file__).parent
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    return list(dict.fromkeys(re.findall(rf'reached\("({prefix}\.\w+)"\)', text)))


class Batch:
    """Items by number: what each leaf of item k has to be."""

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
    """slot -> number of every item that a validated read returns; fails on a torn one."""
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
    """Runs ``body`` in a child; exit status 0 if it returns, 70 with a traceback if it raises."""
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
    """Waits for a child: its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def each_point(body: Callable[[int, int], None]) -> Generator[str]:
    """Runs ``body`` in a child that stands still at each crash point until the next one is wanted.

    Args:
        body: gets two descriptors, and arms every point with them:
            ``_core.arm("*", "pause", notify_fd=first, wait_fd=second)``.

    Yields:
        The names of the points. Closing the generator kills the child where it stands.
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
    """Runs ``body`` in a fresh process, which has to come to its end."""
    assert ended(fork(body)) == 0, "the fresh process failed; its traceback is above"


def called(body: Callable[[], None]) -> None:
    """Runs ``body`` here: a handle of its own in this process, where a process would be dear."""
    body()


def is_killed_at(point: str, passing: int, work: Callable[[], object]) -> bool:
    """Whether a process that works is killed when it passes a point again after so many times."""

    def body() -> None:
        _core.arm(point, after=passing)
        work()

    return ended(fork(body)) == -signal.SIGKILL


def dies(path: Path, point: str, work: Callable[[Engine], None], after: int = 0) -> bool:
    """A victim attaches, arms ``point`` and works.

    Whether it was killed there, or did not pass it so often.
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
    """A victim that stands still at ``point``, until the block ends; then it is killed."""
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
    """G5 and what else must be exact: no wrong node, leaf, length or word; no orphan."""
    ring = engine.ring()
    assert ring is not None
    report = engine.check()
    assert report.ok, report.problems
    assert ring.length == len(read_all(ring))


def require_usable(ring: Ring, number: int) -> None:
    """G4: a survivor writes, samples and updates."""
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
    """Somebody who died at a point of a write of four items around the ring's end."""
    assert dies(
        path, point, lambda engine: write(engine.ring(), range(100, 104)) and None, after=after
    )  # type: ignore[arg-type, func-returns-value]


def arm_and_open(path: Path, point: str, after: int) -> None:
    _core.arm(point, after=after)
    Engine.open(path, None)
    _core.disarm()


def mends(path: Path, point: str, after: int = 0) -> bool:
    """A second victim, which mends what the first one left; whether it was killed at the point."""

    def body() -> None:
        _core.arm(point, after=after)
        with Engine.open(path, None) as engine:
            engine.seat.reap_dead()
            _core.disarm()

    status = ended(fork(body))
    assert status in (0, -signal.SIGKILL), f"the second victim ended with {status}"
    return status == -signal.SIGKILL


def dies_after(path: Path, work: Callable[[Engine], None]) -> None:
    """Kills a process when it has done the work; its entry in the registry stays."""

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
    """Yields what is left beside a survivor by each of several victims.

    A victim is killed when it passes its point for the first time, the next one when it passes the
    point again. The first victim that is not killed ends the loop.

    Args:
        folder: each victim has a buffer of its own here.
        begin: makes a buffer that somebody uses.
        kill: runs a victim, as `dies` does; returns whether it was killed.
        passings: how often the victims have passed the point before.
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
    """Yields each buffer that is opened by its next user after the last one was killed.

    Args:
        folder, begin, kill, passings: as for `each_death`; nobody uses the buffer besides a victim.
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
    """Has a process begin to act while a victim stands still at the point, then kills the victim.

    The victim may hold the mutex there. Fails unless the process comes to its end.
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
    """Whether a limited call goes on at once."""
    try:
        with deadline.limit_waits(0):
            call()
    except RateLimitTimeout:
        return False
    return True


def take(ring: Ring, count: int, *, release: bool = True) -> list[int]:
    """Returns the numbers of the next items of a queue, which has them now."""
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
    """Returns the numbers of all items that a queue has left."""
    found: list[int] = []
    while goes(lambda: found.extend(take(ring, 1))):
        pass
    return found


def everything(path: Path) -> list[str]:
    """The names of all files below a directory."""
    return sorted(
        str(Path(folder, name).relative_to(path))
        for folder, _, names in os.walk(path)
        for name in names
    )
