"""A history is bounded, has one recorder, and survives deaths; damage affects only itself."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import (
    AttachTimeout,
    BufferNotFoundError,
    CorruptBufferError,
    FormatError,
    IncompatibleVersionError,
    ShmBufferError,
    SpaceError,
    recover,
)
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.history import Event, EventKind, History
from shmbuffer.memory.upkeep.history_writer import HistoryWriter
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import dies, python_points, succeeds
from tests.kit.rings import path_of
from tests.memory.format.test_layout import fields, table
from tests.memory.rows import schema, write

RECORDER = 7


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    with Engine.open(fast_path / "buffer", Settings(capacity=8, alpha=0.5)) as engine:
        write(engine.define(schema()), range(5))
        yield engine


def file_of(engine: Engine) -> Path:
    return path_of(engine) / layout.HISTORY


def recorder_of(engine: Engine) -> HistoryWriter:
    with Directory.open(path_of(engine)) as directory:
        files = Files(directory)
        with files.lock(5.0):
            return HistoryWriter.open(files, engine.superblock.uuid)


def read(engine: Engine) -> History:
    with Directory.open(path_of(engine)) as directory:
        return history.read(directory)


def filled(engine: Engine, records: int, events: int = 0) -> None:
    """Writes records whose length is their number, and events whose pid is their number."""
    recorder = recorder_of(engine)
    for number in range(1, records + 1):
        recorder.record({**engine.glance(), "length": number}, RECORDER)
    for number in range(1, events + 1):
        recorder.note(Event(EventKind.JOINED, "learner", pid=number), RECORDER)
    recorder.close()


def test_a_record_holds_the_counters_as_they_stand(engine: Engine) -> None:
    recorder = recorder_of(engine)
    recorder.record({**engine.glance(), "living_collector": 3}, RECORDER)
    recorder.close()
    found = read(engine)
    assert found.fields == history.recorded_fields()
    assert set(layout.COUNTERS) < set(found.fields)
    (record,) = found.fine
    now = engine.stats()
    for name in ("head", "write_count", "length", "inserts", "epoch", "reaped", "p_sum"):
        assert record[name] == now[name], name
    assert (record["number"], record["recorder"], record["living_collector"]) == (1, RECORDER, 3)
    assert abs(int(record["time_ns"]) - time.time_ns()) < 60e9
    assert len(found.coarse) == 1
    assert found.left_out == 0


def test_an_event_holds_who_and_what(engine: Engine) -> None:
    recorder = recorder_of(engine)
    recorder.note(Event(EventKind.DIED, "collector", 42, 3, 1, "ä" * 30, -9, True), RECORDER)
    recorder.note(Event(EventKind.RECOVERED, epoch=2), RECORDER)
    recorder.close()
    died, recovered = read(engine).events
    assert (died.kind, died.role, died.pid, died.incarnation) == (
        EventKind.DIED,
        "collector",
        42,
        3,
    )
    assert (died.epoch, died.exitcode, died.restarted) == (1, -9, True)
    assert (died.recorder, died.name) == (RECORDER, "ä" * 24)
    assert abs(died.time_ns - time.time_ns()) < 60e9
    assert (recovered.kind, recovered.epoch) == (EventKind.RECOVERED, 2)
    assert recovered.exitcode is None


def test_a_name_that_is_no_text_does_not_stop_the_recorder(engine: Engine) -> None:
    recorder = recorder_of(engine)
    recorder.note(Event(EventKind.JOINED, name=os.fsdecode(b"run-\xff")), RECORDER)
    recorder.close()
    assert [event.name for event in read(engine).events] == ["run-?"]


def test_an_event_of_another_version_is_read_as_far_as_it_is_known() -> None:
    rows = np.zeros(3, history.EVENT)
    rows["kind"] = (EventKind.LEFT, 77, EventKind.JOINED)
    rows["role"] = (99, 1, 1)
    rows["name"] = (b"c\xff", b"", b"")
    left, _joined = history.parse_events(rows)
    assert (left.role, left.name) == ("unknown 99", "c\N{REPLACEMENT CHARACTER}")


def test_its_size_never_changes_and_the_oldest_goes_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, room in (("FINE", 10), ("COARSE", 5), ("EVENTS", 4)):
        monkeypatch.setattr(history, name, room)
    filled(engine, 3, 1)
    size = file_of(engine).stat().st_size
    assert size == history.file_bytes(history.recorded_fields())
    clock = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: clock[0])
    recorder = recorder_of(engine)
    for number in range(4, 48):
        clock[0] += 10**10
        recorder.record({"length": number}, RECORDER)
        recorder.note(Event(EventKind.LEFT, pid=number), RECORDER)
        assert file_of(engine).stat().st_size == size
    recorder.close()
    found = read(engine)
    assert found.fine["length"].tolist() == list(range(38, 48))
    assert found.coarse["length"].tolist() == [21, 27, 33, 39, 45]
    assert [event.pid for event in found.events] == [44, 45, 46, 47]
    assert found.left_out == 0


def test_a_clock_that_is_set_back_stops_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_of(engine)
    now = time.time_ns()
    for offset_s in (0, 30, -86400, -86390, -86400 + 70):
        monkeypatch.setattr("time.time_ns", lambda offset_s=offset_s: now + offset_s * 10**9)
        recorder.record({"length": offset_s & 0xFFFF}, RECORDER)
    recorder.close()
    found = read(engine)
    assert len(found.fine) == 5
    assert len(found.coarse) == 3  # the first, the one after the jump, and the one a minute later
    assert (np.diff(found.fine["boottime_ns"].astype(np.int64)) >= 0).all()


def test_recorders_that_live_shortly_do_not_fill_the_coarse_ring(engine: Engine) -> None:
    for _ in range(5):
        filled(engine, 1)
    assert (len(read(engine).fine), len(read(engine).coarse)) == (5, 1)


def test_the_next_recorder_goes_on_behind_the_last(engine: Engine) -> None:
    filled(engine, 3, 2)
    recorder = recorder_of(engine)
    assert recorder.history is not None
    assert recorder.history.fine["length"].tolist() == [1, 2, 3]
    recorder.record({"length": 4}, RECORDER + 1)
    recorder.close()
    found = read(engine)
    assert found.fine["number"].tolist() == [1, 2, 3, 4]
    assert found.fine["recorder"].tolist() == [RECORDER] * 3 + [RECORDER + 1]
    with pytest.raises(ValueError, match="this recorder was closed"):
        recorder.record({}, RECORDER)


def test_one_process_records_at_a_time(engine: Engine) -> None:
    recorder = recorder_of(engine)

    def other() -> None:
        with pytest.raises(AttachTimeout, match="records the history") as caught:
            recorder_of(engine)
        assert os.getppid() in caught.value.pids

    succeeds(other)
    recorder.close()
    succeeds(lambda: recorder_of(engine).close())


@pytest.mark.full
def test_a_record_torn_at_any_byte_is_left_out(engine: Engine) -> None:
    filled(engine, 5)
    whole = file_of(engine).read_bytes()
    size = read(engine).fine.dtype.itemsize
    at = history.HEADER_BYTES + 4 * size
    for cut in range(size - 8):  # only zeros follow
        torn = bytearray(whole)
        torn[at + cut : at + size] = bytes(size - cut)
        if torn == whole:
            continue
        found = history.parse(bytes(torn), file_of(engine))
        assert found.fine["length"].tolist() == [1, 2, 3, 4], cut
        assert found.left_out == (1 if cut else 0)
    file_of(engine).write_bytes(torn)
    filled(engine, 1)  # it is overwritten
    assert read(engine).fine["number"].tolist() == [1, 2, 3, 4, 5]


def test_any_damaged_byte_of_a_record_takes_that_record_alone(engine: Engine) -> None:
    filled(engine, 4, 3)
    whole = file_of(engine).read_bytes()
    size = read(engine).fine.dtype.itemsize
    for offset in range(size - 4):
        data = bytearray(whole)
        data[history.HEADER_BYTES + size + offset] ^= 0x41
        found = history.parse(bytes(data), file_of(engine))
        assert found.fine["length"].tolist() == [1, 3, 4], offset
        assert (found.left_out, len(found.events)) == (1, 3)


def test_a_record_in_the_wrong_place_is_ignored(engine: Engine) -> None:
    filled(engine, 2)
    size = read(engine).fine.dtype.itemsize
    data = bytearray(file_of(engine).read_bytes())
    first = data[history.HEADER_BYTES :][:size]
    data[history.HEADER_BYTES + 5 * size : history.HEADER_BYTES + 6 * size] = first
    found = history.parse(bytes(data), file_of(engine))
    assert (found.fine["length"].tolist(), found.left_out) == ([1, 2], 1)


def shorten(path: Path) -> None:
    os.truncate(path, 1000)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def blow_up(path: Path) -> None:
    os.truncate(path, history.LIMIT + 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace_by_something_foreign(path: Path) -> None:
    path.write_bytes(b"PNG" * 5000)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def write_from_the_future(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)


def change_header(path: Path, change: Callable[[np.ndarray], None]) -> None:  # type: ignore[type-arg]
    """Writes a wrong header with a matching checksum."""
    data = bytearray(path.read_bytes())
    page = np.frombuffer(data, history.HEADER, 1)
    change(page)
    page["crc32c"] = _core.crc32c(bytes(data[: history.HEADER_BYTES - 4]))
    path.write_bytes(data)


def set_field(name: str, value: object) -> Callable[[Path], None]:
    def change(page: np.ndarray) -> None:  # type: ignore[type-arg]
        page[name] = value

    return lambda path: change_header(path, change)


def set_names(text: bytes) -> Callable[[Path], None]:
    def change(page: np.ndarray) -> None:  # type: ignore[type-arg]
        page["fields"] = np.void(text.ljust(history.HEADER["fields"].itemsize, b"\0"))
        page["fields_bytes"] = len(text)

    return lambda path: change_header(path, change)


DAMAGE: dict[str, tuple[Callable[[Path], None], type[ShmBufferError], str]] = {
    "short": (shorten, CorruptBufferError, "has 1000 bytes, which is too few for a header"),
    "long": (lengthen, CorruptBufferError, "but its header requires"),
    "huge": (blow_up, CorruptBufferError, "more than any valid history has"),
    "empty": (empty, FormatError, "not a history of shmbuffer"),
    "foreign": (replace_by_something_foreign, FormatError, "not a history of shmbuffer"),
    "zeros": (zero, FormatError, "not a history of shmbuffer"),
    "later": (write_from_the_future, IncompatibleVersionError, "the history has format version 9"),
    "bit": (flip, CorruptBufferError, "does not match its checksum"),
    "no room": (set_field("fine", 0), CorruptBufferError, "its header requires"),
    "too much room": (set_field("events", 2**31), CorruptBufferError, "its header requires"),
    "records of nothing": (set_field("record_bytes", 0), CorruptBufferError, "header requires"),
    "no JSON": (set_names(b"{"), CorruptBufferError, "its header requires"),
    "not a dict": (set_names(b"[1]"), CorruptBufferError, "its header requires"),
    "no type": (set_names(b'{"a": "O"}'), CorruptBufferError, "its header requires"),
    "no name": (set_names(b'{"": "u8"}'), CorruptBufferError, "its header requires"),
    "taken": (set_names(b'{"number": "u8"}'), CorruptBufferError, "its header requires"),
}


@pytest.mark.product(few=5)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_history_is_reported_and_replaced(engine: Engine, name: str) -> None:
    damage, kind, says = DAMAGE[name]
    filled(engine, 3)
    damage(file_of(engine))
    with pytest.raises(kind, match=says):
        read(engine)
    report = check(path_of(engine))
    assert report.ok, report.problems
    assert any(says in note for note in report.notes)
    with Engine.open(path_of(engine), None) as other:
        assert other.ring() is not None
        assert other.ring().length == 5
    recorder = recorder_of(engine)
    assert recorder.history is None
    assert recorder.reason is not None
    assert says in recorder.reason
    recorder.record({"length": 9}, RECORDER)
    recorder.close()
    assert read(engine).fine["length"].tolist() == [9]
    assert check(path_of(engine)).notes == []


def test_a_history_that_was_cut_short_does_not_keep_a_recovery_from_its_end(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    filled(engine, 1)
    path, history_file = path_of(engine), file_of(engine)
    engine.close()
    assert dies(path, "history.fine", lambda victim: filled(victim, 1), 0)
    size = history_file.stat().st_size - 100
    os.truncate(history_file, size)
    assert recover(path).clients_retired == 1
    assert f"{history_file}: has {size:,} bytes, but its header requires" in caplog.text
    assert history_file.stat().st_size == size, "nothing is written behind the cut"


def put_a_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def put_another_name(place: Path, victim: Path) -> None:
    os.link(victim, place)


def put_a_pipe(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def put_a_directory(place: Path, victim: Path) -> None:
    place.mkdir()


@pytest.mark.parametrize(
    "trap",
    [put_a_link, put_another_name, put_a_pipe, put_a_directory],
    ids=lambda trap: trap.__name__,
)
def test_a_trap_in_its_place_catches_nobody(
    engine: Engine, fast_path: Path, trap: Callable[[Path, Path], None]
) -> None:
    victim = fast_path / "victim"
    victim.write_bytes(b"precious")
    trap(file_of(engine), victim)
    with pytest.raises(ShmBufferError, match=r"was not opened|hard links"):
        read(engine)
    with pytest.raises(ShmBufferError, match=r"was not opened|hard links"):
        recorder_of(engine)
    assert victim.read_bytes() == b"precious"
    report = check(path_of(engine))
    assert report.ok
    assert any("the history cannot be read" in note for note in report.notes)


def test_of_a_later_version_the_fields_are_read_by_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = history.recorded_fields()
    later = {"epoch": "u8", "held_back": "u8", "length": "u8", "warmth": "f8"}
    with monkeypatch.context() as patch:
        patch.setattr(history, "recorded_fields", lambda: later)
        recorder = recorder_of(engine)
        recorder.record({"length": 3, "held_back": 2**64 - 1, "warmth": 0.5}, RECORDER)
        recorder.close()
    found = read(engine)
    (record,) = found.fine
    assert found.fields == later
    assert record["held_back"] == 2**64 - 1
    assert (record["epoch"], record["length"], record["warmth"]) == (0, 3, 0.5)
    recorder = recorder_of(engine)
    assert recorder.reason == "its fields are not those that this version records"
    recorder.close()
    assert read(engine).fields == now


def test_a_copied_directory_has_the_old_history_until_it_has_one_of_its_own(
    engine: Engine, fast_path: Path
) -> None:
    filled(engine, 3)
    copy = fast_path / "copy"
    shutil.copytree(path_of(engine), copy)
    with Engine.open(copy, None) as copied:
        assert copied.report is not None
        assert copied.report.reason == "copy"
        assert read(copied).uuid == engine.superblock.uuid
        recorder = recorder_of(copied)
        assert recorder.reason is not None
        assert "this buffer was copied" in recorder.reason
        recorder.close()
        assert read(copied).uuid == copied.superblock.uuid
    assert read(engine).fine["length"].tolist() == [1, 2, 3]


def test_without_room_nothing_is_left_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "free_bytes", lambda _: 1000)
        with pytest.raises(SpaceError, match=r"history\.new: 4\.\d MiB"):
            recorder_of(engine)
    assert sorted(os.listdir(path_of(engine) / layout.PRIVATE)) == [
        *("control", "init.lock", "ledger", "made.json", "procs", "schema.json", "slots"),
    ]
    recorder_of(engine).close()


def test_a_record_that_cannot_be_written_is_an_error_and_no_hole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_of(engine)
    recorder.record({"length": 1}, RECORDER)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(fd: int, data: bytes, at: int) -> int:
        return real(fd, data[:100], at)

    real = os.pwrite
    for broken, says in ((full, "are needed"), (half, "only a part could be written")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", broken)
            with pytest.raises(OSError, match=says):
                recorder.record({"length": 2}, RECORDER)
    recorder.record({"length": 3}, RECORDER)
    recorder.close()
    found = read(engine)
    assert found.fine[["number", "length"]].tolist() == [(1, 1), (2, 3)]


def test_the_history_counts_among_the_bytes_of_the_buffer(engine: Engine) -> None:
    before = engine.stats()["bytes"]
    filled(engine, 1)
    size = history.file_bytes(history.recorded_fields())
    assert engine.stats()["bytes"] == before + size


def test_it_goes_with_the_buffer(engine: Engine) -> None:
    filled(engine, 1)
    (path_of(engine) / f"{layout.HISTORY}.new").write_bytes(b"left by one that was killed")
    assert inspect(path_of(engine))["bytes"] > history.file_bytes(history.recorded_fields())
    assert inspect(path_of(engine))["disk_bytes"] >= file_of(engine).stat().st_size
    assert engine.cleanup()
    assert not path_of(engine).exists()
    with pytest.raises(BufferNotFoundError):
        read(engine)


def test_a_buffer_that_is_made_in_its_place_has_none(engine: Engine) -> None:
    filled(engine, 1)
    path = path_of(engine)
    engine.close()
    made = Engine.open(path, Settings(capacity=8), existing="overwrite")
    with made, pytest.raises(BufferNotFoundError):
        read(made)


CRASH_POINTS = [
    *(python_points("history")),
    *("file.made", "file.mode", "file.sized", "file.renamed"),
]


@pytest.mark.product(few=6)
@pytest.mark.crash
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_recorder_may_be_killed_anywhere(engine: Engine, point: str, after: int) -> None:
    def work(victim: Engine) -> None:
        recorder = recorder_of(victim)
        for number in range(1, 4):
            recorder.record({"length": number}, RECORDER)
            recorder.note(Event(EventKind.JOINED, pid=number), RECORDER)

    killed = dies(path_of(engine), point, work, after)
    assert killed or after
    before: list[int] = []
    with suppress(BufferNotFoundError):
        found = read(engine)
        assert found.left_out == 0
        before = found.fine["length"].tolist()
    assert before in ([], [1], [1, 2], [1, 2, 3])
    engine.seat.reap_dead()
    filled(engine, 1, 1)
    assert read(engine).fine["number"].tolist() == list(range(1, len(before) + 2))
    assert check(path_of(engine)).ok
    assert not (path_of(engine) / f"{layout.HISTORY}.new").exists()


def test_the_document_has_every_byte_of_the_file() -> None:
    assert table("History") == fields(history.HEADER)
    assert table("An event") == fields(history.EVENT)
