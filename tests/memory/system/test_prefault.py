"""Prefaulting: which pages, when, which callers wait, and the outcome."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import pickle
import signal
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer import ProgressReport, SpaceError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Schema, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.system import prefault, progress
from shmbuffer.memory.system.prefault import OFF, PIECE, Prefault
from tests.crash.harness import ended, fork
from tests.kit.programs import in_a_tmpfs, needs_root

#: Slightly more than two pieces, with one page for each item.
CAPACITY = 2 * PIECE // layout.PAGE + 5
SCHEMA = Schema((Leaf(("page",), "uint8", (layout.PAGE,)),), CAPACITY)
SETTINGS = Settings(capacity=CAPACITY, checksum=False)
RING = replace(SETTINGS, record_bytes=2 * PIECE + layout.PAGE)
RECORDS = Schema((), CAPACITY, (), {"kind": "records"}, RING.record_bytes)

HUGE = 2**21

_PRESENT = 1 << 63  # a bit in an entry of /proc/self/pagemap


def mapped(one: Any) -> int:
    """Returns the number of pages of a map in the page table of this process."""
    first, pages = one.address // layout.PAGE, -(-one.nbytes // layout.PAGE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, 8 * first), np.uint64)
    return int(((entries & np.uint64(_PRESENT)) != 0).sum())


def pages(one: Any) -> int:
    return -(-one.nbytes // layout.PAGE)


def maps(engine: Engine) -> list[Any]:
    assert engine.seat.mapped is not None
    return engine.seat.mapped.maps


def all_there(engine: Engine) -> bool:
    return all(mapped(one) == pages(one) for one in maps(engine))


def finish(engine: Engine) -> None:
    """Waits until the thread of a handle has ended."""
    assert engine.pages._populating is not None
    engine.pages._populating._thread.join()


@pytest.fixture(params=["anonymous", "memory", "disk"])
def opened(request: pytest.FixtureRequest, fast_path: Path, on_disk: Path) -> Any:
    """Opens a new buffer on each kind of backing file."""

    def make(wished: Prefault, settings: Settings = SETTINGS) -> Engine:
        if request.param == "anonymous":
            return Engine.anonymous(settings, prefault=wished)
        path = fast_path if request.param == "memory" else on_disk
        return Engine.open(path / "buffer", settings, prefault=wished)

    return make


@pytest.mark.parametrize(("settings", "schema"), [(SETTINGS, SCHEMA), (RING, RECORDS)])
def test_full_makes_every_page_before_the_first_write_goes_on(
    opened: Any, settings: Settings, schema: Schema
) -> None:
    with opened(Prefault("full"), settings) as engine:
        engine.define(schema)
        assert all_there(engine)


@pytest.fixture(autouse=True)
def _every_piece_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)


def test_prefault_off_makes_no_pages(opened: Any) -> None:
    with opened(OFF) as engine:
        engine.define(SCHEMA)
        assert mapped(maps(engine)[1]) == 0
        assert engine.pages._populating is None


def test_in_the_background_it_is_done_while_the_caller_goes_on(opened: Any) -> None:
    begin = threading.Event()
    with opened(Prefault("background", lambda *_: begin.wait())) as engine:
        ring = engine.define(SCHEMA)
        rows = np.full((3, layout.PAGE), 7, np.uint8)
        ring.write([rows.ctypes.data], 3, None)
        assert not all_there(engine)
        begin.set()
        finish(engine)
        assert all_there(engine)
        assert (np.frombuffer(ring.leaf(0), np.uint8)[: rows.size] == 7).all()


def test_progress_is_reported_for_every_piece_and_the_end(fast_path: Path) -> None:
    heard: list[ProgressReport] = []
    wished = Prefault("full", heard.append)
    with Engine.open(fast_path / "buffer", SETTINGS, prefault=wished) as engine:
        engine.define(SCHEMA)
        total = sum(one.nbytes for one in maps(engine))
        assert {(now.what, now.total, now.unit) for now in heard} == {("prefault", total, "bytes")}
        done = [now.done for now in heard]
        assert done == sorted(set(done))
        assert done[-1] == total
        assert max(np.diff([0, *done])) == PIECE


@pytest.mark.product(few=1)
def test_no_byte_changes(opened: Any) -> None:
    with opened(OFF) as engine:
        ring = engine.define(SCHEMA)
        rows = np.random.default_rng(1).integers(0, 256, (CAPACITY, layout.PAGE)).astype(np.uint8)
        ring.write([rows.ctypes.data], CAPACITY, None)
        before = [bytes(memoryview(one)) for one in maps(engine)]
        for one in maps(engine):
            one.populate(0, one.nbytes, engine.seat.backing.in_memory)
        assert [bytes(memoryview(one)) for one in maps(engine)] == before


def test_a_file_on_a_disk_has_nothing_to_be_written_back(on_disk: Path) -> None:
    with Engine.open(on_disk / "buffer", SETTINGS, prefault=Prefault("full")) as engine:
        engine.define(SCHEMA)
        at = f"{maps(engine)[1].address:08x}-"
        of_leaf = Path("/proc/self/smaps").read_text().split(at)[1].split("VmFlags")[0]
        assert "Rss:                8212 kB" in of_leaf
        assert "Shared_Dirty:          0 kB" in of_leaf
        assert "Private_Dirty:         0 kB" in of_leaf


def test_opening_an_existing_buffer_prefaults_the_openers_pages(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        engine.define(SCHEMA)
        with Engine.open(path, None, prefault=Prefault("full")) as other:
            assert all_there(other)
            assert mapped(maps(engine)[1]) == 0  # each map has its own page table entries


def test_a_buffer_that_another_process_defines_is_made_when_it_is_first_seen(
    fast_path: Path,
) -> None:
    path = fast_path / "buffer"
    with (
        Engine.open(path, SETTINGS, prefault=Prefault("full")) as engine,
        Engine.open(path, None) as other,
    ):
        assert engine.ring() is None
        assert engine.pages._populating is None
        other.define(SCHEMA)
        assert engine.ring() is not None
        finish(engine)
        assert all_there(engine)
        engine.define(SCHEMA)  # does not begin again
        assert mapped(maps(other)[1]) == 0


def test_closing_ends_the_thread_between_two_pieces(fast_path: Path) -> None:
    heard: list[int] = []
    first = threading.Event()

    def report(now: ProgressReport) -> None:
        heard.append(now.done)
        first.set()
        closing.wait()

    closing = threading.Event()
    engine = Engine.open(fast_path / "buffer", SETTINGS, prefault=Prefault("background", report))
    engine.define(SCHEMA)
    first.wait()
    thread = engine.pages._populating._thread  # type: ignore[union-attr]
    helper = threading.Timer(0.05, closing.set)
    helper.start()
    engine.close()
    helper.join()
    assert not thread.is_alive()
    assert len(heard) <= 2  # a piece may have been begun


def test_a_handle_that_is_forgotten_ends_its_thread(fast_path: Path) -> None:
    first, go_on = threading.Event(), threading.Event()

    def report(_now: ProgressReport) -> None:
        first.set()
        go_on.wait()

    engine: Any = Engine.anonymous(SETTINGS, prefault=Prefault("background", report))
    engine.define(SCHEMA)
    first.wait()
    thread = engine.pages._populating._thread
    threading.Timer(0.05, go_on.set).start()
    del engine
    gc.collect()
    thread.join()


def test_the_report_may_close_the_handle(fast_path: Path) -> None:
    handles: list[Engine] = []
    wished = Prefault("background", lambda *_: handles[0].close())
    handles.append(Engine.open(fast_path / "buffer", SETTINGS, prefault=wished))
    handles[0].define(SCHEMA)
    finish(handles[0])
    assert handles[0].closed


def test_a_signal_ends_the_wait_and_the_thread(fast_path: Path) -> None:
    heard: list[int] = []
    asked, stopping = threading.Event(), threading.Event()

    def report(now: ProgressReport) -> None:
        heard.append(now.done)
        if len(heard) == 1:
            # The signal is sent to the waiting thread, because another thread might receive it
            # otherwise. It is repeated, because a signal that comes just before the wait does not
            # end it.
            while not asked.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            stopping.wait()

    def stop(_number: int, _frame: Any) -> None:
        if not asked.is_set():
            asked.set()
            threading.Timer(0.05, stopping.set).start()
            raise InterruptedError("asked to stop")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        wished = Prefault("full", report)
        with Engine.open(fast_path / "buffer", SETTINGS, prefault=wished) as engine:
            with pytest.raises(InterruptedError, match="asked to stop"):
                engine.define(SCHEMA)
            finish(engine)
            assert len(heard) == 1
            assert engine.define(SCHEMA).capacity == CAPACITY
            assert engine.check().ok
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_the_report_raises_is_the_first_write_s_error_and_the_buffer_is_whole(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def report(_now: ProgressReport) -> None:
        raise OSError("the terminal is gone")

    with Engine.open(fast_path / "buffer", SETTINGS, prefault=Prefault("full", report)) as engine:
        with pytest.raises(OSError, match="the terminal is gone"):
            engine.define(SCHEMA)
        engine.define(SCHEMA)
        assert engine.check().ok
    assert "prefault has stopped: the terminal is gone" in caplog.text


def test_in_the_background_an_error_is_logged(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def report(_now: ProgressReport) -> None:
        raise OSError("the terminal is gone")

    wished = Prefault("background", report)
    with (
        caplog.at_level(logging.WARNING, "shmbuffer.memory"),
        Engine.open(fast_path / "buffer", SETTINGS, prefault=wished) as engine,
    ):
        engine.define(SCHEMA)
        finish(engine)
    assert "the terminal is gone" in caplog.text
    assert str(fast_path) in caplog.text


def test_a_process_that_dies_in_it_leaves_a_whole_buffer(fast_path: Path) -> None:
    path = fast_path / "buffer"

    def die(_now: ProgressReport) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def create() -> None:
        with Engine.open(path, SETTINGS, prefault=Prefault("full", die)) as engine:
            engine.define(SCHEMA)

    assert ended(fork(create)) == -signal.SIGKILL
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.ring().schema == SCHEMA
        assert engine.check().ok
        assert engine.report.clients_retired == 1


def test_the_child_of_a_fork_does_not_go_on_with_it(fast_path: Path) -> None:
    first, go_on = threading.Event(), threading.Event()

    def report(_now: ProgressReport) -> None:
        first.set()
        go_on.wait()

    wished = Prefault("background", report)
    with Engine.open(fast_path / "buffer", SETTINGS, prefault=wished) as engine:
        engine.define(SCHEMA)
        first.wait()

        def look() -> None:
            assert engine.ring() is not None
            engine.seat.rejoin()
            assert engine.pages.prefault == OFF
            engine.close()

        assert ended(fork(look)) == 0
        go_on.set()
        finish(engine)
        assert all_there(engine)


def test_a_prefault_is_not_pickled_with_the_engine(fast_path: Path) -> None:
    wished = Prefault("full", lambda *_: None)
    assert pickle.loads(pickle.dumps(wished)) == OFF
    with Engine.open(fast_path / "buffer", SETTINGS, prefault=wished) as engine:
        engine.define(SCHEMA)
        with pickle.loads(pickle.dumps(engine)) as other:
            assert other.ring() is not None
            assert other.pages._populating is None


@pytest.mark.parametrize("mode", ["on", "", None, True])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match="prefault must be 'off', 'background' or 'full', but is"):
        Prefault(mode)


def test_a_report_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match="on_progress must be a function or None, but is 'bar'",
    ):
        Prefault("full", "bar")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["background", "full"])
def test_more_than_there_is_memory_is_refused_before_anything_is_made(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(prefault, "free_memory_bytes", lambda: 2**20)
    with (
        Engine.open(on_disk / "buffer", SETTINGS, prefault=Prefault(mode)) as engine,
        pytest.raises(
            SpaceError, match=f"prefault='{mode}' would load the whole buffer into memory"
        ) as how,
    ):
        engine.define(SCHEMA)
    assert how.value.free_bytes == 2**20
    assert how.value.needed_bytes > CAPACITY * layout.PAGE
    with Engine.open(on_disk / "buffer", None) as engine:
        assert engine.ring() is None


def test_opening_more_than_the_memory_is_reported(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = on_disk / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        engine.define(SCHEMA)
        monkeypatch.setattr(prefault, "free_memory_bytes", lambda: 2**20)
        with pytest.raises(SpaceError, match="are free; free some space"):
            Engine.open(path, None, prefault=Prefault("full"))
        with Engine.open(path, None, prefault=Prefault("background")) as other:
            finish(other)
            assert other.ring() is not None
        assert "would load the whole buffer into memory" in caplog.text
        assert not any(isinstance(one, BaseException) for one in caplog.records[-1].args or ())
        assert len(engine.clients()) == 1


def test_reserved_memory_is_not_counted_twice(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "free_memory_bytes", lambda: 0)
    with Engine.open(fast_path / "buffer", SETTINGS, prefault=Prefault("full")) as engine:
        if engine.seat.backing.in_memory:
            engine.define(SCHEMA)
            assert all_there(engine)


@needs_root
def test_memory_that_runs_out_is_an_error_that_says_how_far_it_came(tmp_path: Path) -> None:
    """In a sparse file on a file system that is too small, the first access causes a SIGBUS."""

    def run() -> None:
        sparse = replace(SETTINGS, reserve=False)
        with Engine.open(tmp_path / "buffer", sparse, prefault=Prefault("full")) as engine:
            schema = Schema((Leaf(("page",), "uint8", (4 * layout.PAGE,)),), CAPACITY)
            with pytest.raises(SpaceError, match=r"prefault stopped after \d+ bytes .*Bad address"):
                engine.define(schema)
            assert engine.check().ok

    in_a_tmpfs(tmp_path, b"size=9m", run)


def _refuse(advices: dict[int, int]) -> None:
    """Makes madvise(2) fail for these kinds of advice, as an older kernel does."""
    audit, madvise = {"x86_64": (0xC000003E, 28), "aarch64": (0xC00000B7, 233)}[os.uname().machine]
    load, equal, end = 0x20, 0x15, 0x06  # opcodes of classic BPF
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, audit),
        (end, 0, 0, 0x80000000),
        (load, 0, 0, 0),
        (equal, 1, 0, madvise),
        (end, 0, 0, 0x7FFF0000),
        (load, 0, 0, 32),  # the third argument
    ]
    for advice, number in advices.items():
        steps += [(equal, 0, 1, advice), (end, 0, 0, 0x00050000 | number)]
    steps.append((end, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((38, 1, 0), (22, 2, program)):  # no new privileges; seccomp
        assert libc.prctl(option, *arguments, 0, 0) == 0


_READ, _WRITE, _COLLAPSE = 22, 23, 25


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="numbers of calls")
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_kernel_that_does_not_know_how_has_the_pages_touched(
    fast_path: Path, tmp_path: Path, place: str
) -> None:
    path = (fast_path if place == "memory" else tmp_path) / "buffer"

    def run() -> None:
        _refuse(dict.fromkeys((_READ, _WRITE, _COLLAPSE), errno.EINVAL))
        with Engine.open(path, SETTINGS, prefault=Prefault("full")) as engine:
            engine.define(SCHEMA)
            assert all_there(engine)
            assert engine.check().ok

    assert ended(fork(run)) == 0


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="numbers of calls")
def test_an_error_of_the_kernel_is_a_space_error(fast_path: Path) -> None:
    def run() -> None:
        _refuse({_WRITE: errno.ENOMEM})
        with Engine.anonymous(SETTINGS, prefault=Prefault("full")) as engine:
            with pytest.raises(SpaceError, match="prefault stopped after 0 bytes"):
                engine.define(SCHEMA)
            assert engine.check().ok

    assert ended(fork(run)) == 0


@pytest.mark.parametrize(
    ("start", "nbytes"), [(-4096, 1), (1, 1), (0, -1), (0, 8193), (8192, 1), (12288, 0)]
)
def test_a_piece_that_is_not_of_the_map_is_refused(start: int, nbytes: int) -> None:
    fd = os.memfd_create("map")
    try:
        os.truncate(fd, 8192)
        one = _core.Map(fd, 8192)
        with pytest.raises(ValueError, match=f"populate: {nbytes} bytes at {start} are not within"):
            one.populate(start, nbytes, True)
        one.populate(8192, 0, True)
        assert mapped(one) == 0
    finally:
        os.close(fd)


def test_read_only_maps_get_pages_for_reading(fast_path: Path) -> None:
    path = fast_path / "file"
    path.write_bytes(b"7" * 3 * layout.PAGE)
    fd = os.open(path, os.O_RDONLY)
    try:
        one = _core.Map(fd, 3 * layout.PAGE, False)
        one.populate(0, one.nbytes, True)
        assert mapped(one) == 3
    finally:
        os.close(fd)


has_huge_pages = pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no huge pages"
)


@needs_root
@has_huge_pages
def test_where_a_file_system_in_memory_has_huge_pages_the_buffer_gets_them(tmp_path: Path) -> None:
    def run() -> None:
        with Engine.open(tmp_path / "buffer", SETTINGS, prefault=Prefault("full")) as engine:
            engine.define(SCHEMA)
            assert in_huge_pages() >= 2 * PIECE or _no_free_huge_page()
            assert engine.check().ok

    in_a_tmpfs(tmp_path, b"huge=advise,size=64m", run)


@needs_root
@has_huge_pages
def test_a_huge_page_may_begin_in_one_piece_and_end_in_the_next(tmp_path: Path) -> None:
    """Leaves in anonymous memory follow each other without alignment."""

    def run() -> None:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 3 * PIECE)
        one = _core.Map(fd, 2 * PIECE, offset=2**20)
        for start in range(0, 2 * PIECE, PIECE):
            one.populate(start, PIECE, True)
        assert in_huge_pages() >= 2 * PIECE - 2**21 or _no_free_huge_page()

    in_a_tmpfs(tmp_path, b"huge=advise,size=64m", run)


def test_files_of_small_rows_lie_where_huge_pages_fit(fast_path: Path) -> None:
    small = Leaf(("small",), "uint8", (32,))
    schema = Schema((small, Leaf(("large",), "uint8", (layout.PAGE,))), 2**17)
    settings = Settings(capacity=schema.capacity, checksum=False, reserve=False)
    with Engine.open(fast_path / "buffer", settings) as engine:
        engine.define(schema)
        assert engine.seat.mapped is not None
        slots, (first, _) = engine.seat.mapped.slots, engine.seat.mapped.leaves
        assert [one.address % HUGE for one in (slots, first)] == [0, 0]
        memoryview(first)[-1] = 1  # all of it exists
        assert engine.check().ok


@pytest.mark.parametrize("offset", [0, layout.PAGE, HUGE - layout.PAGE, HUGE])
def test_a_map_may_begin_anywhere_in_its_huge_page(tmp_path: Path, offset: int) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(offset + HUGE + 1)
        os.pwrite(file.fileno(), b"x", offset)
        one = _core.Map(file.fileno(), HUGE + 1, offset=offset, aligned=True)
        assert (one.address - offset) % HUGE == 0
        assert bytes(memoryview(one)[:2]) == b"x\0"
        memoryview(one)[HUGE] = 7
        assert os.pread(file.fileno(), 2, offset + HUGE) == b"\7"
        with pytest.raises(OSError, match="Bad file descriptor"):
            _core.Map(-1, HUGE, aligned=True)


def in_huge_pages() -> int:
    """Returns the bytes of mapped files that are in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:"))


def _no_free_huge_page() -> bool:
    """True if memory is too fragmented or too full for a huge page."""
    lines = Path("/proc/buddyinfo").read_text().splitlines()
    orders = [list(map(int, line.split()[4:])) for line in lines]
    return not any(sum(order[9:]) for order in orders)
