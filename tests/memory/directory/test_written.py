"""Costs depend on the written slots rather than on the capacity: other pages are not read.

Reading a page of a file in memory allocates it, and the file system reports the allocated pages.
The tests therefore count the pages and measure no time.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import recover
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.written import Written
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.upkeep import inspect
from shmbuffer.memory.upkeep.check import check
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, contents, sample, schema, write

LARGE, FEW = 2**19, 1000  # slots: an 18 MB slots file, of which about a dozen pages are written
MOST = 64 * layout.PAGE


@pytest.fixture
def path(fast_path: Path) -> Path:
    """Makes a large prioritized ring with a few items, which all clients have left."""
    where = fast_path / "buffer"
    with Engine.open(where, Settings(capacity=LARGE, alpha=0.6, reserve=False)) as engine:
        ring = engine.define(schema(LARGE))
        write(ring, range(FEW), np.arange(1.0, FEW + 1))
    return where


def data_bytes(path: Path) -> int:
    """Returns the allocated bytes of the slots file."""
    found, at = 0, 0
    with open(path / layout.SLOTS, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            try:
                first = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), first, os.SEEK_HOLE)
            found += at - first
    return found


def mapped_bytes(path: Path) -> int:
    """Returns the bytes of the slots file that this process has read since it mapped the file."""
    _, *maps = Path("/proc/self/smaps").read_text().split(str(path / layout.SLOTS))
    return sum(int(part.split("Rss:")[1].split()[0]) * 1024 for part in maps)


def killed(path: Path, count: int = 5) -> None:
    """Runs a client that writes and is killed without leaving."""

    def victim() -> None:
        engine = Engine.open(path, None)
        write(ring_of(engine), range(count))
        os.kill(os.getpid(), signal.SIGKILL)

    with child(lambda parent: victim()) as process:
        assert process.end() == -signal.SIGKILL


def attach(path: Path) -> None:
    with Engine.open(path, None) as engine:
        assert len(sample(ring_of(engine), 64).index) == 64


def attach_after_a_kill(path: Path) -> None:
    killed(path)
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.items == FEW + 5


def verify(path: Path) -> None:
    killed(path)
    assert recover(path, verify=True).items == FEW + 5


def look_after_damage(path: Path) -> None:
    assert check(path).ok


def check_it_living(path: Path) -> None:
    with Engine.open(path, None) as engine:
        assert engine.check().verified == FEW


def change_alpha(path: Path) -> None:
    with Engine.open(path, None) as engine:
        ring_of(engine).tree.set_alpha(0.5, 0.1)
        assert engine.check().ok


def empty(path: Path) -> None:
    with Engine.open(path, None) as engine:
        ring_of(engine).empty()
        assert ring_of(engine).length == 0


def show(path: Path) -> None:
    assert inspect.inspect(path, priorities=True)["counters"]["length"] == FEW


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "work",
    [
        attach,
        attach_after_a_kill,
        verify,
        look_after_damage,
        check_it_living,
        change_alpha,
        empty,
        show,
    ],
)
def test_what_nobody_has_written_is_not_made(path: Path, work: Callable[[Path], None]) -> None:
    before = data_bytes(path)
    assert 0 < before < MOST
    work(path)
    assert data_bytes(path) < before + MOST


def test_a_full_ring_that_everybody_left_is_attached_without_a_look_at_its_slots(
    fast_path: Path,
) -> None:
    path, capacity = fast_path / "buffer", 2**17

    def fill(parent: Parent) -> None:
        with Engine.open(path, Settings(capacity=capacity, alpha=0.6)) as engine:
            ring = engine.define(schema(capacity))
            for first in range(0, capacity, 2**14):
                write(ring, range(first, first + 2**14))

    with child(fill) as process:
        assert process.end() == 0
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.items == capacity
        assert mapped_bytes(path) < 2**20
    killed(path)
    with Engine.open(path, None) as engine:
        # all words and more, because a client may have died in the mutex
        assert mapped_bytes(path) > 8 * capacity
        assert engine.check().ok


def spoil(path: Path, section: str, at: int) -> None:
    """Writes a number far beyond the written slots."""
    where = _core.sections(LARGE, 1)[section] + 8 * at
    with open(path / layout.SLOTS, "r+b") as file:
        file.seek(where)
        file.write(b"\1\2\3\4\5\6\7\x08")


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("section", "at", "problem"),
    [
        ("words", LARGE - 7, "1 slot words have an impossible ticket"),
        ("words", LARGE // 2, "1 slot words have an impossible ticket"),
        ("mass", LARGE - 1, "priority tree: 1 leaves are not the mass of their priority"),
        ("sum1", LARGE // 32, "priority tree: 1 leaves are not the mass of their priority"),
        ("min2", LARGE // 16**2 - 1, "priority tree: 1 leaves are not the mass of their priority"),
    ],
)
def test_what_was_damaged_where_nothing_was_written_is_found_and_mended(
    path: Path, section: str, at: int, problem: str
) -> None:
    spoil(path, section, at)
    assert problem in check(path).problems
    recover(path)
    assert check(path).ok
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {n: n for n in range(FEW)}
        assert engine.check().ok


def test_slots_are_looked_at_up_to_the_last_one_that_was_used(path: Path) -> None:
    with Engine.open(path, None) as engine:
        assert engine.seat.mapped is not None
        live = SlotsFile(engine.seat.mapped.slots, engine.seat.mapped.schema)
        backing = engine.seat.backing
        assert Written(backing, live).slots() == FEW  # type: ignore[arg-type]
        ring_of(engine).empty()
        assert Written(backing, live).slots() == 0  # type: ignore[arg-type]
        write(ring_of(engine), range(3))
        assert Written(backing, live).slots() == 3  # type: ignore[arg-type]


def test_slots_may_change_while_they_are_looked_at(path: Path) -> None:
    with Engine.open(path, None) as engine:
        ring = ring_of(engine)
        assert engine.seat.mapped is not None
        live = SlotsFile(engine.seat.mapped.slots, engine.seat.mapped.schema)
        others = np.zeros(2**15, np.uint64)
        shared = np.frombuffer(mmap.mmap(-1, others.nbytes), np.uint64)
        shared[-1] = 1
        changing = os.fork()
        if not changing:
            while True:
                shared[:-1] ^= np.uint64(1)
        try:
            live.words, found = shared, Written(engine.seat.backing, live)  # type: ignore[arg-type]
            found._data = [(0, 2**40)]
            assert {found.slots() for _ in range(500)} == {len(shared)}
        finally:
            os.kill(changing, signal.SIGKILL)
            os.waitpid(changing, 0)
        assert ring.length == FEW


def test_where_a_file_system_knows_no_holes_all_of_it_is_data(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, at: int, how: int) -> int:
        raise OSError(errno.EINVAL, "no such thing")

    monkeypatch.setattr(os, "lseek", refuse)
    assert recover(path).items == FEW
    spoil(path, "words", LARGE - 7)
    assert recover(path).words_refused == 1
