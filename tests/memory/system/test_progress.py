"""Progress of long operations: a caller can follow and end them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmbuffer import AttachTimeout, ProgressReport, recover
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState
from shmbuffer.memory.ring import records as records_module
from shmbuffer.memory.system import progress
from shmbuffer.memory.system.progress import Progress, report_to
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.check import check
from tests.memory.ring import test_records
from tests.memory.rows import files_of, schema, succeeds, write

Heard = list[ProgressReport]

SETTINGS = Settings(capacity=64, alpha=1.0, eps=0.0)


class StoppedError(Exception):
    """The error that a callback raises."""


def stop(_report: ProgressReport) -> None:
    raise StoppedError


def stop_halfway(report: ProgressReport) -> None:
    if report.done < report.total:
        raise StoppedError


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every operation report each slot."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(progress, "PIECE_BYTES", 1)


@pytest.fixture
def path(fast_path: Path) -> Path:
    """Makes a buffer with sixty items that all clients have left."""
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema(64)), range(60), np.arange(60.0))
    return path


@pytest.fixture
def copy(path: Path, fast_path: Path) -> Path:
    """Makes a copy of the buffer, in which recovery verifies every item."""
    shutil.copytree(path, fast_path / "copy")
    return fast_path / "copy"


# -- -- reports ------------------------------------------------------------------------------------


def test_a_report_says_what_how_much_of_how_much_and_of_what_unit(every_step: None) -> None:
    heard: Heard = []
    with report_to(heard.append), Progress("load", 10, "items") as work:
        work.advance(4)
        work.advance(4)
    assert heard == [
        ProgressReport("load", 4, 10, "items"),
        ProgressReport("load", 8, 10, "items"),
        ProgressReport("load", 10, 10, "items"),
    ]
    assert heard[0].fraction == 0.4


def test_progress_is_reported_at_the_agreed_rate_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(progress, "EVERY_S", 0.125)
    heard: Heard = []
    with report_to(heard.append), Progress("load", 100) as work:
        for _ in range(100):
            now_s += 1 / 64
            work.advance(1)
    assert [one.done for one in heard] == [*range(8, 100, 8), 100]


def test_the_end_is_told_once_and_nothing_is_said_to_be_done_that_is_not(every_step: None) -> None:
    heard: Heard = []
    with report_to(heard.append), Progress("copy", 10) as work:
        work.advance(7)
        work.advance(7)  # as if others had written meanwhile
        assert [one.done for one in heard] == [7]
    assert [one.done for one in heard] == [7, 10]


def test_work_that_fails_has_no_end(every_step: None) -> None:
    heard: Heard = []

    def fail() -> None:
        with report_to(heard.append), Progress("copy", 10) as work:
            work.advance(7)
            raise StoppedError

    with pytest.raises(StoppedError):
        fail()
    assert [one.done for one in heard] == [7]


def test_empty_work_is_not_reported(every_step: None) -> None:
    heard: Heard = []
    with report_to(heard.append), Progress("copy", 0) as work:
        work.advance(0)
    assert heard == []


def test_where_nobody_asks_work_is_not_cut_smaller(every_step: None) -> None:
    work = Progress("copy", 10)
    assert not work.has_listener
    assert list(work.cut(10, 8)) == [(0, 10)]
    assert list(work.cut(10, 8, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(work.cut(0, 8)) == []


def test_where_somebody_asks_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PIECE_BYTES", 24)
    with report_to(lambda _: None):
        work = Progress("copy", 80)
        assert list(work.cut(10, 8)) == [(0, 3), (3, 3), (6, 3), (9, 1)]
        assert list(work.cut(3, 100)) == [(0, 1), (1, 1), (2, 1)]
        assert list(work.cut(3, 0, 2)) == [(0, 2), (2, 1)]


def test_the_innermost_hears_and_none_leaves_the_one_before(every_step: None) -> None:
    first: Heard = []
    second: Heard = []
    with report_to(first.append):
        with report_to(second.append):
            Progress("copy", 1).finish()
        with report_to(None):
            Progress("sync", 1).finish()
    Progress("load", 1).finish()
    assert ([one.what for one in first], [one.what for one in second]) == (["sync"], ["copy"])


def test_a_report_may_go_to_an_empty_container(every_step: None) -> None:
    class Kept(list[ProgressReport]):
        def __call__(self, report: ProgressReport) -> None:
            self.append(report)

    kept = Kept()
    Progress("copy", 1, on_progress=kept).finish()
    with report_to(kept):
        Progress("sync", 1).finish()
    assert [one.what for one in kept] == ["copy", "sync"]


def test_work_inside_a_callback_is_not_reported_to_it(every_step: None) -> None:
    heard: Heard = []

    def work_too(report: ProgressReport) -> None:
        heard.append(report)
        Progress("sync", 1).finish()

    with report_to(work_too):
        Progress("copy", 1).finish()
        Progress("load", 1).finish()
    assert [one.what for one in heard] == ["copy", "load"]


def test_the_work_of_another_thread_is_not_heard_of(every_step: None) -> None:
    heard: Heard = []
    with report_to(heard.append):
        thread = threading.Thread(target=Progress("copy", 1, on_progress=lambda _: None).finish)
        other = threading.Thread(target=lambda: Progress("copy", 1).finish())
        for one in (thread, other):
            one.start()
            one.join()
    assert heard == []


@pytest.mark.parametrize("call", [check, recover])
def test_what_cannot_be_called_is_refused(path: Path, call: Callable[..., object]) -> None:
    with pytest.raises(
        TypeError,
        match="on_progress must be a function or None, but is 'bar'",
    ):
        call(path, on_progress="bar")


# -- check -----------------------------------------------------------------------------------------


def test_a_check_tells_of_the_items_that_it_verified(path: Path, every_step: None) -> None:
    heard: Heard = []
    report = check(path, on_progress=heard.append)
    assert report.verified == 60
    assert {(one.what, one.total, one.unit) for one in heard} == {("check", 60, "items")}
    assert [one.done for one in heard] == list(range(1, 61))


def test_a_check_that_is_cut_finds_the_same(path: Path, every_step: None) -> None:
    leaf = path / "number.memmap"
    data = bytearray(leaf.read_bytes())
    for slot in (0, 7, 59):
        data[8 * slot] ^= 1
    leaf.write_bytes(data)
    found = check(path, on_progress=lambda _: None).problems
    assert [one.split(":")[0] for one in found] == ["slot 0", "slot 7", "slot 59"]
    assert check(path).problems == found


def test_a_check_that_is_ended_leaves_everything_as_it_was(path: Path, every_step: None) -> None:
    before = files_of(path)
    with pytest.raises(StoppedError):
        check(path, on_progress=stop_halfway)
    assert files_of(path) == before
    assert check(path).ok


def test_while_a_check_tells_others_may_write(path: Path, every_step: None) -> None:
    with Engine.open(path, None) as engine:
        ring = engine.ring()
        assert ring is not None

        def write_one(_report: ProgressReport) -> None:
            write(ring, range(1), np.ones(1))
            with Engine.open(path, None):  # it does not hold init.lock either
                pass

        assert check(path, on_progress=write_one).ok
        assert ring.write_count > 60


# -- recover ---------------------------------------------------------------------------------------


def test_a_recovery_tells_of_the_items_that_it_looked_at(path: Path, every_step: None) -> None:
    heard: Heard = []
    assert recover(path, on_progress=heard.append).items == 60
    assert {(one.what, one.total, one.unit) for one in heard} == {("recover", 60, "items")}
    done = [one.done for one in heard]
    assert done == sorted(set(done))
    assert done[-1] == 60


def test_a_recovery_that_verifies_tells_of_each_piece(copy: Path, every_step: None) -> None:
    heard: Heard = []
    report = recover(copy, on_progress=heard.append)
    assert (report.reason, report.items) == ("copy", 60)
    assert [one.done for one in heard] == list(range(1, 61))


@pytest.mark.parametrize("length", [0, 3, 2**63])
def test_a_damaged_count_of_items_does_not_keep_a_recovery_from_telling(
    path: Path, length: int, every_step: None
) -> None:
    control = np.memmap(path / layout.CONTROL, np.uint8, "r+")
    runtime = control[layout.RUNTIME_OFFSET :][: layout.PAGE].view(layout.RUNTIME)
    runtime["length"] = length
    del runtime, control
    heard: Heard = []
    assert recover(path, on_progress=heard.append).items == 60
    assert [one.done == one.total for one in heard][-1:] == [True] * bool(length)
    assert all(0 <= one.done <= one.total <= 64 for one in heard)


@pytest.mark.parametrize("ending", [stop, stop_halfway])
@pytest.mark.parametrize("which", ["path", "copy"])
def test_a_recovery_that_is_ended_is_done_by_the_next(
    which: str,
    ending: Callable[[ProgressReport], None],
    request: pytest.FixtureRequest,
    every_step: None,
) -> None:
    where: Path = request.getfixturevalue(which)
    with pytest.raises(StoppedError):
        recover(where, on_progress=ending)
    with Directory.open(where) as directory:
        state = Files(directory).open_control().superblock().state
    assert state == BufferState.RECOVERING
    report = recover(where)
    assert (report.items, report.checksum_failed) == (60, 0)
    assert check(where).ok


def test_a_recovery_holds_its_lock_while_it_tells(copy: Path, every_step: None) -> None:
    looked: list[int] = []

    def refused() -> None:
        with pytest.raises(AttachTimeout):
            Engine.open(copy, None, timeout=0.01)

    def look(report: ProgressReport) -> None:
        if report.done == 1:
            succeeds(refused)
            looked.append(report.done)

    assert recover(copy, on_progress=look).items == 60
    assert looked == [1]


def test_where_somebody_uses_it_there_is_nothing_to_recover_or_to_tell(path: Path) -> None:
    heard: Heard = []
    with Engine.open(path, None):
        assert recover(path, on_progress=heard.append).reason == "in use"
    assert heard == []


# -- copies ----------------------------------------------------------------------------------------


def copied(engine: Engine) -> list[Any]:
    ring = engine.ring()
    assert ring is not None
    out = [np.zeros(size, np.uint8) for size in ring.schema.leaf_bytes]
    moment = ring.copy_out([one.ctypes.data for one in out])
    return [moment.tickets, *out]


def test_a_copy_tells_of_the_bytes_of_the_items(path: Path, every_step: None) -> None:
    heard: Heard = []
    with Engine.open(path, None) as engine, report_to(heard.append):
        assert engine.ring() is not None
        item = sum(engine.ring().schema.leaf_bytes) // 64
        copied(engine)
    copies = [one for one in heard if one.what == "copy"]
    assert [one.done for one in copies] == [item * n for n in range(1, 61)]
    assert {one.total for one in copies} == {60 * item}


def test_a_copy_while_others_write_is_still_of_one_moment(path: Path, every_step: None) -> None:
    with Engine.open(path, None) as engine:
        ring = engine.ring()
        assert ring is not None

        def write_more(_report: ProgressReport) -> None:
            write(ring, range(2), np.ones(2))

        with report_to(write_more):
            copied(engine)
        assert engine.check().ok
        plain = copied(engine)
        with report_to(lambda _: None):
            for one, other in zip(plain, copied(engine), strict=True):
                assert np.array_equal(one, other)


def test_records_tell_of_their_bytes(
    fast_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "_COPY_PIECE_BYTES", 100)
    heard: Heard = []
    path = fast_path / "records"
    with test_records.opened(path) as engine:
        _, held = test_records.parts(engine)
        held.write(test_records.records(range(10)))
        with report_to(heard.append):
            found = test_records.copied(held, 16)
        assert sorted(found.values()) == list(range(10))
    total = heard[0].total
    assert [one.done for one in heard] == [*range(100, total, 100), total]
    heard.clear()
    assert check(path, on_progress=heard.append).verified == 10
    assert [one.done for one in heard] == list(range(1, 11))
