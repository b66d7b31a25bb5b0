"""Handles on a buffer: creating, joining and leaving it, and the errors on the way."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmbuffer import (
    AttachTimeout,
    BufferClosedError,
    BufferExistsError,
    BufferInUseError,
    BufferNotFoundError,
    BufferUnlinkedError,
    CorruptBufferError,
    DurabilityError,
    ForkedHandleError,
    FormatError,
    IncompatibleVersionError,
    SchemaMismatchError,
    ShmBufferError,
    SpaceError,
    UnsafeFilesystemError,
    UnsafePathError,
    UnsupportedPlatformError,
    recover,
)
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Schema, Settings
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.directory import removal
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState
from shmbuffer.memory.opening import require_platform
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.region import Directory
from tests import holdings
from tests.kit.programs import Program, needs_root
from tests.kit.rings import ring_of
from tests.memory.rows import (
    LEAVES,
    Maker,
    Parent,
    child,
    contents,
    files_of,
    place,
    require_sound,
    sample,
    schema,
    succeeds,
    write,
)

SETTINGS = Settings(capacity=8, alpha=1.0)


def left_behind(path: Path, numbers: int = 5) -> Path:
    """Makes a buffer that its process has closed."""
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(numbers))
    return path


# Creating and reopening.


def test_the_first_to_open_a_directory_creates_it(path: Path) -> None:
    with Engine.open(path / "deep" / "down", SETTINGS) as engine:
        assert (engine.shared, engine.path) == (True, path / "deep" / "down")
        assert engine.where == str(engine.path)
        assert (engine.ring(), engine.report) == (None, None)
        assert engine.settings == SETTINGS
        assert (engine.superblock.epoch, engine.superblock.state) == (0, BufferState.NO_SCHEMA)
        assert engine.superblock.owner_pid == os.getpid()
        ring = engine.define(schema())
        assert engine.ring() is ring
        assert engine.ring().schema == schema()
        assert engine.superblock.state == BufferState.READY
        assert ring.tree.alpha == 1.0


def test_anonymous_memory_has_no_path() -> None:
    with Engine.anonymous(SETTINGS) as engine:
        assert (engine.shared, engine.path, engine.where) == (False, None, "anonymous memory")
        assert engine.cleanup() is False
        engine.flush()
        write(engine.define(schema()), [1])
        assert contents(ring_of(engine)) == {0: 1}


def test_a_second_handle_sees_the_items_of_the_first(make: Maker) -> None:
    engine = make(alpha=1.0)
    write(ring_of(engine), range(5), np.arange(1.0, 6.0))
    second = make.second(engine)
    assert contents(ring_of(second)) == {n: n for n in range(5)}
    assert second.ring().schema == engine.ring().schema
    assert second.settings == engine.settings
    write(ring_of(second), [5])
    place(ring_of(second), [0], [100])
    assert contents(ring_of(engine)) == {0: 100, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert ring_of(engine).tree.p_sum == ring_of(second).tree.p_sum
    require_sound(second)


@pytest.mark.full
def test_an_unrelated_process_finds_it_by_its_path(make_files: Maker) -> None:
    engine = make_files(alpha=1.0)
    write(ring_of(engine), range(5))
    source = """
import sys
from shmbuffer.memory import Engine
from tests.memory.rows import contents, write
from tests.kit.rings import ring_of

with Engine.open(sys.argv[1], None, role="collector") as engine:
    print(contents(ring_of(engine)), flush=True)
    input()
    print(write(ring_of(engine), [5, 6]), flush=True)
"""
    with Program.python(source, engine.path) as process:
        assert process.line() == str({n: n for n in range(5)})
        assert [client.role for client in engine.clients()] == ["client", "collector"]
        process.tell()
        assert process.line() == "5"
        assert process.end() == (0, "", "")
    assert contents(ring_of(engine)) == {n: n for n in range(7)}
    assert len(engine.clients()) == 1


def test_its_settings_are_those_of_the_one_who_made_it(path: Path) -> None:
    left_behind(path)
    with Engine.open(path, Settings(capacity=99, checksum=False)) as engine:
        assert engine.settings == SETTINGS
        assert ring_of(engine).capacity == 8


def test_items_stay_when_everybody_leaves(path: Path) -> None:
    left_behind(path)
    for epoch in range(1, 4):
        with Engine.open(path, None) as engine:
            assert set(contents(ring_of(engine))) == set(range(4 + epoch))
            assert engine.superblock.epoch == epoch
            assert engine.report is not None
            assert engine.report.reason == "no client alive"
            write(ring_of(engine), [9])


def test_buffers_that_were_made_and_removed_leave_no_map(path: Path) -> None:
    """The page with the mutex is unmapped, too, so a process can make any number of buffers."""
    before = holdings.mapped()
    for _ in range(3):
        for engine in (Engine.open(path, Settings(8)), Engine.anonymous(Settings(8))):
            with engine:
                write(engine.define(schema(8)), range(12))
                if engine.path is not None:
                    assert len(holdings.gained(before, holdings.mapped)) >= 3
                    assert engine.cleanup()
    del engine
    assert not holdings.gained(before, holdings.mapped)


def test_there_has_to_be_a_buffer_to_attach_to(path: Path) -> None:
    with pytest.raises(BufferNotFoundError, match="does not exist; check the path"):
        Engine.open(path, None)
    assert not path.exists()
    path.mkdir(0o700)
    (path / "other").write_text("x")
    with pytest.raises(
        BufferNotFoundError, match=r"there is no buffer here; check the path, or create one with"
    ):
        Engine.open(path, None)
    assert files_of(path) == {"other": b"x"}


def test_a_buffer_that_is_there_may_be_an_error(path: Path) -> None:
    left_behind(path)
    before = files_of(path)
    with pytest.raises(
        BufferExistsError,
        match=rf"^{path}: this directory already contains a buffer; use attach\(\), .*'overwrite'",
    ):
        Engine.open(path, SETTINGS, existing="error")
    assert files_of(path) == before


def test_a_buffer_that_nobody_uses_may_be_overwritten(path: Path) -> None:
    left_behind(path)
    (path / "notes.txt").write_text("mine")
    with Engine.open(path, None) as engine:
        uuid = engine.superblock.uuid
    with Engine.open(path, Settings(capacity=3), existing="overwrite") as engine:
        assert engine.superblock.uuid != uuid
        assert engine.ring() is None
        assert engine.settings.capacity == 3
        write(engine.define(schema(3)), range(3))
        assert contents(ring_of(engine)) == {0: 0, 1: 1, 2: 2}
    assert (path / "notes.txt").read_text() == "mine"


def test_a_buffer_that_somebody_uses_is_not_overwritten(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(5))
        with pytest.raises(
            BufferInUseError,
            match=rf"use this buffer \(pids {os.getpid()}\); end these processes first",
        ) as caught:
            Engine.open(path, SETTINGS, existing="overwrite")
        assert caught.value.pids == [os.getpid()]  # type: ignore[attr-defined]
        assert contents(ring_of(engine)) == {n: n for n in range(5)}


@pytest.mark.parametrize("point", ["remove.control", "create.formatted", "create.renamed"])
def test_no_process_can_join_between_the_removal_and_the_creation(path: Path, point: str) -> None:
    left_behind(path)

    def work(parent: Parent) -> None:
        parent.pause_at(point)
        with Engine.open(path, SETTINGS, existing="overwrite") as engine:
            parent.pause()
            write(engine.define(schema()), [7])

    with child(work) as other, Directory.open(path) as directory:
        other.reached()
        with pytest.raises(AttachTimeout), InitLock(directory, 0.0):
            pass
        other.go()
        other.reached()
        with Engine.open(path, SETTINGS) as engine:
            other.go()
            assert other.end() == 0
            assert contents(ring_of(engine)) == {0: 7}, "both have the same buffer"


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    "point", ["remove.file", "remove.leaves", "remove.control", "create.formatted"]
)
def test_a_process_that_dies_while_overwriting_leaves_no_half_buffer(
    path: Path, point: str
) -> None:
    left_behind(path)

    def work(parent: Parent) -> None:
        _core.arm(point)
        Engine.open(path, SETTINGS, existing="overwrite")

    with child(work) as victim:
        assert victim.end() == -signal.SIGKILL
    with Engine.open(path, SETTINGS) as engine:
        assert engine.ring() is None
        write(engine.define(schema()), [1])
        assert contents(ring_of(engine)) == {0: 1}


def test_a_directory_that_we_made_stays_ours_when_its_buffer_is_overwritten(path: Path) -> None:
    left_behind(path)
    with Engine.open(path, SETTINGS, existing="overwrite") as engine:
        assert engine.cleanup()
    assert not path.exists()


def test_init_lock_is_waited_for_with_a_deadline(path: Path) -> None:
    left_behind(path)
    with (
        Directory.open(path) as directory,
        InitLock(directory, 0),
        pytest.raises(AttachTimeout, match=rf"waited 0\.05 s for pid {os.getpid()} \(running\)"),
    ):
        Engine.open(path, None, timeout=0.05)


# The first write.


def test_another_schema_is_refused_and_the_leaf_is_named(make: Maker) -> None:
    engine = make()
    write(ring_of(engine), range(3))
    other = (*LEAVES[:1], Leaf(("next", "obs"), "float32", (37,)), *LEAVES[2:])
    second = make.second(engine)
    for handle in (engine, second):
        with pytest.raises(
            SchemaMismatchError,
            match=r": leaf 'next\.obs' is uint8\[37\], but this write has float32\[37\]; convert it"
            r", or create a new buffer, in its directory with .*on_existing=\"overwrite\"\)$",
        ) as caught:
            handle.define(Schema(other, 8))
        assert isinstance(caught.value, RuntimeError)
        assert str(engine.where) in str(caught.value)
        assert handle.define(schema()) is handle.ring()
    assert contents(ring_of(engine)) == {0: 0, 1: 1, 2: 2}


def test_the_second_process_loads_the_core_that_the_first_built(make: Maker) -> None:
    engine = make.undefined()
    second = make.second(engine)

    def work(parent: Parent) -> None:
        parent.pause_at("define.locked")
        write(engine.define(schema()), [1])

    with child(work) as other:
        other.reached()
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(write(second.define(schema()), [2])))
        thread.start()
        other.go()
        thread.join()
        assert other.end() == 0
    assert sorted(contents(ring_of(second)).values()) == [1, 2]
    require_sound(second)


def test_a_process_that_waits_too_long_for_the_first_gives_up(make: Maker) -> None:
    engine = make.undefined()
    second = make.second(engine)

    def work(parent: Parent) -> None:
        parent.pause_at("define.locked")
        engine.define(schema())

    with child(work) as other:
        other.reached()
        with pytest.raises(AttachTimeout, match=r"0\.05 s"):
            second.define(schema(), timeout=0.05)
        assert second.ring() is None
        other.go()
        assert other.end() == 0
    assert second.define(schema()).length == 0


def test_threads_that_meet_at_the_first_write_share_one_ring(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry has one claim, so two rings on it would take each other's slots."""
    engine = make.undefined(alpha=1.0)
    meeting = threading.Barrier(2)
    connect = Seat.connect

    def connect_late(self: Seat) -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        connect(self)

    monkeypatch.setattr(Seat, "connect", connect_late)
    rings: list[Any] = []

    def first_write(number: int) -> None:
        ring = engine.define(schema())
        rings.append(ring)
        write(ring, [number])

    threads = [threading.Thread(target=first_write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rings[0] is rings[1] is engine.ring()
    assert engine.seat.native is ring_of(engine).seat.native
    assert sorted(contents(ring_of(engine)).values()) == [0, 1]
    require_sound(engine)


class Watched:
    """A lock that reports when a thread has to wait for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waited_for.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_reaper_that_meets_the_first_definition_shares_its_ring_with_other_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper makes the core's ring of the entry while another thread requests the ring."""
    with Engine.open(path, SETTINGS) as early, Engine.open(path, None) as other:

        def come(parent: Parent) -> None:
            client = Engine.open(path, None)
            parent.pause()
            client.close()

        with child(come) as client:
            client.reached()
            client.kill()
        other.define(schema())
        connecting = early.seat.connecting = Watched()  # type: ignore[assignment]

        def ask() -> None:
            early.ring()
            connecting.waited_for.set()

        asking = threading.Thread(target=ask)
        made: list[Seat] = []
        connect = Seat.connect

        def connect_beside(self: Seat) -> None:
            made.append(self)
            if len(made) == 1:
                asking.start()
                assert connecting.waited_for.wait(30)
            connect(self)

        monkeypatch.setattr(Seat, "connect", connect_beside)
        assert early.seat.reap_dead() == 1
        asking.join()
        assert made == [early.seat]
        assert early.seat.membership.native is early.seat.native is ring_of(early).seat.native


def test_a_file_that_is_in_the_way_is_an_error_and_stays(path: Path) -> None:
    path.mkdir(0o700)
    (path / "done.memmap").write_bytes(b"x" * 8)
    with Engine.open(path, SETTINGS) as engine:
        before = files_of(path)
        with pytest.raises(
            BufferExistsError,
            match=r"done\.memmap: already exists, but this buffer did not create it; pass existsok",
        ):
            engine.define(schema())
        del before[".shmbuffer/control"]
        after = files_of(path)
        del after[".shmbuffer/control"]
        assert after == before
        (path / "done.memmap").unlink()
        write(engine.define(schema()), [1])


def bare(path: Path) -> None:
    """Makes the files that tensordict's own memmap leaves in a directory, without a buffer."""
    path.mkdir(0o700)
    for leaf, nbytes in zip(schema().leaves, schema().leaf_bytes, strict=True):
        if nbytes:
            (path / leaf.file).parent.mkdir(exist_ok=True, mode=0o700)
            (path / leaf.file).write_bytes(bytes(range(256))[:1] * nbytes)
    for name, data in schema().meta_files().items():
        (path / name).write_bytes(data)


def test_the_files_of_a_bare_directory_are_taken_over_without_items(path: Path) -> None:
    bare(path)
    before = files_of(path)
    with Engine.open(path, SETTINGS, existing="adopt") as engine:
        ring = engine.define(schema())
        assert ring.length == 0
        assert {name: files_of(path)[name] for name in before} == before
        assert json.loads((path / ".shmbuffer" / "made.json").read_text()) == []
        write(ring, range(3))
        assert contents(ring) == {0: 0, 1: 1, 2: 2}
        assert engine.cleanup()
    assert set(files_of(path)) == set(before), "they were not ours to remove"


def test_files_of_another_size_are_not_taken_over(path: Path) -> None:
    bare(path)
    (path / "next" / "obs.memmap").write_bytes(b"x" * 100)
    before = files_of(path)
    with Engine.open(path, SETTINGS, existing="adopt") as engine:
        with pytest.raises(
            SchemaMismatchError, match=r"next/obs\.memmap: has 100 bytes, but this write needs 296"
        ):
            engine.define(schema())
        assert {name for name in files_of(path) if not name.startswith(".shmbuffer")} == set(before)
        assert {name: files_of(path)[name] for name in before} == before
        assert engine.ring() is None
        assert not (path / ".shmbuffer" / "slots").exists()


# Not enough space.


def test_too_little_space_is_an_error_with_both_numbers_and_nothing_is_left(path: Path) -> None:
    huge = 2**36
    with Engine.open(path, Settings(capacity=huge)) as engine:
        before = set(files_of(path))
        with pytest.raises(
            SpaceError,
            match=rf"^{re.escape(str(path))}: 68719476736 slots of 4 leaves: .* are needed, "
            r"and .* are free; free some space, make the buffer smaller, or choose another "
            r"directory; reserve=False would create sparse files",
        ) as caught:
            engine.define(schema(huge))
        error: Any = caught.value
        assert error.needed_bytes > 46 * huge
        assert 0 < error.free_bytes < error.needed_bytes
        assert isinstance(error, OSError)
        assert set(files_of(path)) == before
        assert engine.ring() is None
        with pytest.raises(SpaceError):
            engine.define(schema(huge))


def test_anonymous_memory_has_its_limits_too() -> None:
    huge = 2**40
    with Engine.anonymous(Settings(capacity=huge)) as engine:
        with pytest.raises(SpaceError, match=r"anonymous memory: \d+ bytes are needed") as caught:
            engine.define(Schema((Leaf(("x",), "float64", (2**16,)),), huge))
        error: Any = caught.value
        assert error.needed_bytes > 2**59
        assert error.free_bytes >= 0
        assert engine.ring() is None
        write(engine.define(schema()), [1])


def test_a_limit_on_the_size_of_a_file_is_an_error_in_the_middle(path: Path) -> None:
    """Files that exist by then are removed again."""
    import resource

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with Engine.open(path, Settings(capacity=10_000)) as engine:
            before = set(files_of(path))
            with pytest.raises(SpaceError, match=r"files of at most .*: raise `ulimit -f`"):
                engine.define(schema(10_000))
            assert set(files_of(path)) == before
            write(engine.define(schema(100)), range(7))

    succeeds(work)
    with Engine.open(path, None) as engine:
        assert len(contents(ring_of(engine))) == 7


FULL_DISK = """
import os, subprocess, sys
import numpy as np
from pathlib import Path
from shmbuffer.errors import SpaceError
from shmbuffer.memory import Engine, Settings
from tests.memory.rows import contents, files_of, schema, write
from tests.kit.rings import ring_of

mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", mount], check=True)
path = mount / "buffer"
with Engine.open(path, Settings(capacity=100_000)) as engine:
    before = set(files_of(path))
    try:
        engine.define(schema(100_000))
    except SpaceError as error:
        assert error.needed_bytes > error.free_bytes > 0, error.parts
    else:
        sys.exit("it fitted")
    assert set(files_of(path)) == before
    write(engine.define(schema(100)), range(7))
    assert len(contents(ring_of(engine))) == 7
room = os.statvfs(mount)
(mount / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - 40_000))
for where in (mount / "other", mount / "existing"):
    existed = where.name == "existing"
    if existed:
        where.mkdir(0o700)
    try:
        Engine.open(where, Settings(capacity=8))
    except SpaceError as error:
        assert error.needed_bytes == 143360 > error.free_bytes, error.parts
    else:
        sys.exit("it fitted")
    assert where.exists() == existed, "what was made is removed again"
    assert not existed or not os.listdir(where), os.listdir(where)
print("nothing is left")
"""


@pytest.mark.full
@needs_root
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with Program.python(FULL_DISK, tmp_path, before=("unshare", "--mount")) as process:
        assert process.end() == (0, "nothing is left\n", "")


# Errors that change nothing.


def patched(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def forge(path: Path, field: str, value: int) -> None:
    """Writes a field of both superblocks with the matching checksum."""
    for copy in (0, 4096):
        data = bytearray(path.read_bytes()[copy : copy + 4096])
        page = np.frombuffer(data, layout.SUPERBLOCK)
        page[field] = value
        patched(path, copy, bytes(data[:-4]) + _core.crc32c(bytes(data[:-4])).to_bytes(4, "little"))


def linked(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.moved"))
    path.symlink_to(f"{path.name}.moved")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def hard_linked(path: Path) -> None:
    os.link(path, path.with_name("second name"))


CONTROL, SLOTS, SCHEMA = layout.CONTROL, layout.SLOTS, layout.SCHEMA
OBS = "next/obs.memmap"
Spoil = Callable[[Path], object]

REFUSED: list[tuple[str, str, Spoil, type[ShmBufferError], str]] = [
    ("a truncated leaf", OBS, lambda p: os.truncate(p, 100), CorruptBufferError, "instead of 296"),
    ("a leaf that grew", OBS, lambda p: os.truncate(p, 500), CorruptBufferError, "has 500 bytes"),
    ("a missing leaf", OBS, Path.unlink, CorruptBufferError, "missing; restore it from a copy"),
    ("a symlinked leaf", OBS, linked, UnsafePathError, "this is a symbolic link"),
    ("a FIFO for a leaf", OBS, piped, UnsafePathError, "this is a FIFO"),
    ("a folder for a leaf", OBS, folder, UnsafePathError, "this is a directory"),
    ("a leaf with two names", OBS, hard_linked, UnsafePathError, r"has 2 names \(hard links\)"),
    ("a symlinked folder", "next", linked, UnsafePathError, "this is a symbolic link"),
    ("truncated slots", SLOTS, lambda p: os.truncate(p, 64), CorruptBufferError, "has 64 bytes"),
    ("missing slots", SLOTS, Path.unlink, CorruptBufferError, "slots: is missing; restore"),
    ("symlinked slots", SLOTS, linked, UnsafePathError, "this is a symbolic link"),
    (
        "a missing schema",
        SCHEMA,
        Path.unlink,
        CorruptBufferError,
        "schema.json: is missing; restore",
    ),
    (
        "a schema that is no JSON",
        SCHEMA,
        lambda p: p.write_bytes(b"{"),
        CorruptBufferError,
        "schema.json: the schema cannot be read",
    ),
    (
        "another schema",
        SCHEMA,
        lambda p: p.write_bytes(schema(9).to_json()),
        CorruptBufferError,
        "schema.json: the schema does not match the superblock",
    ),
    ("truncated control", CONTROL, lambda p: os.truncate(p, 1), CorruptBufferError, "has 1 bytes"),
    ("symlinked control", CONTROL, linked, UnsafePathError, "this is a symbolic link"),
    ("a FIFO for control", CONTROL, piped, UnsafePathError, "this is a FIFO"),
    (
        "both superblocks damaged",
        CONTROL,
        lambda p: [patched(p, at, b"x") for at in (300, 4396)],  # type: ignore[func-returns-value]
        CorruptBufferError,
        "both copies of the superblock are damaged",
    ),
    (
        "something else",
        CONTROL,
        lambda p: patched(p, 0, bytes(8192)),
        FormatError,
        "not a control file of shmbuffer",
    ),
    (
        "another version",
        CONTROL,
        lambda p: forge(p, "format_major", 2),
        IncompatibleVersionError,
        "the format version is 0x2",
    ),
    (
        "another architecture",
        CONTROL,
        lambda p: forge(p, "architecture", 0x99),
        IncompatibleVersionError,
        "the processor architecture is 0x99",
    ),
]


@pytest.mark.parametrize(
    ("name", "spoil", "kind", "message"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_damaged_and_foreign_files_are_refused_and_kept(
    path: Path, name: str, spoil: Spoil, kind: type[ShmBufferError], message: str
) -> None:
    left_behind(path)
    spoil(path / name)
    before = files_of(path)
    opened = len(os.listdir("/proc/self/fd"))
    for attempt in (
        lambda: Engine.open(path, None),
        lambda: Engine.open(path, SETTINGS),
        lambda: Engine.open(path, SETTINGS, existing="recover"),
        lambda: recover(path),
    ):
        with pytest.raises(kind, match=message) as caught:
            attempt()
        assert type(caught.value) is kind
        assert files_of(path) == before
    assert len(os.listdir("/proc/self/fd")) == opened


@needs_root
@pytest.mark.parametrize("name", ["", ".shmbuffer", CONTROL, OBS])
def test_files_of_another_user_are_refused(path: Path, name: str) -> None:
    left_behind(path)
    os.chown(path / name, 65534, 65534)
    before = files_of(path)
    with pytest.raises(UnsafePathError, match=r"belongs to uid 65534, but this process runs as"):
        Engine.open(path, None)
    assert files_of(path) == before


def test_a_directory_that_everybody_can_write_to_is_refused(path: Path) -> None:
    left_behind(path)
    path.chmod(0o777)
    with pytest.raises(
        UnsafePathError, match=r"all users can write to this directory \(mode 0o777\)"
    ):
        Engine.open(path, None)


def test_a_symlink_to_a_buffer_is_refused(path: Path) -> None:
    left_behind(path)
    link = path.with_name("link")
    link.symlink_to(path)
    for settings in (None, SETTINGS):
        with pytest.raises(UnsafePathError, match=r"this is a symbolic link, .* it was not opened"):
            Engine.open(link, settings)


def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda fd: 0x6969)
    with pytest.raises(UnsafeFilesystemError, match="is on NFS, where shared maps, file locks"):
        Engine.open(path, SETTINGS)
    assert not path.exists()
    path.mkdir(0o700)
    with pytest.raises(UnsafeFilesystemError):
        Engine.open(path, SETTINGS)
    assert files_of(path) == {}


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from shmbuffer.errors import ReadOnlyError
from shmbuffer.memory import Engine, Settings
from tests.memory.rows import files_of

path = Path(sys.argv[1])
before = files_of(path)
subprocess.run(["mount", "--bind", path, path], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
for where in (path / "buffer", path / "empty"):
    try:
        Engine.open(where, Settings(capacity=8))
    except ReadOnlyError as error:
        print(error)
    assert files_of(path) == before
"""


@pytest.mark.full
@needs_root
def test_a_read_only_directory_is_refused(fast_path: Path) -> None:
    left_behind(fast_path / "buffer")
    (fast_path / "empty").mkdir(0o700)
    with Program.python(READ_ONLY, fast_path, before=("unshare", "--mount")) as process:
        status, output, errors = process.end()
    assert (status, errors) == (0, "")
    assert len(output.splitlines()) == 2
    for line in output.splitlines():
        assert "read-only file system; choose a directory where you can write" in line


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedPlatformError,
        match=r"shmbuffer needs Linux with glibc on x86-64 or aarch64; on this machine, its locks",
    ):
        require_platform(lambda: 0)
    monkeypatch.setattr(layout, "ARCHITECTURE", 0)
    with pytest.raises(UnsupportedPlatformError):
        Engine.anonymous(SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "the capacity must be at least 1, but is 0"),
        ({"capacity": 8, "ndim": 0}, "ndim must be at least 1, but is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)  # type: ignore[arg-type]


# Forks and spawned processes.


def test_a_forked_child_joins_on_first_use(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, [0])

    def work(parent: Parent) -> None:
        assert contents(ring) == {0: 0}
        write(ring, [1])
        assert ring.seat.incarnation == 2
        assert [client.pid for client in engine.clients()] == [os.getppid(), os.getpid()]
        sample(ring, 4, prioritized=True)
        parent.pause()

    with child(work) as other:
        other.reached()
        assert [client.alive for client in engine.clients()] == [True, True]
        write(ring, [2])
        other.go()
        assert other.end() == 0
    assert contents(ring) == {0: 0, 1: 1, 2: 2}
    assert ring.live.sources[:3].tolist() == [1, 2, 1]
    assert not engine.clients()[1].alive, "it ended without closing"


@pytest.mark.product(few=6)
@pytest.mark.parametrize(
    "use",
    [
        lambda engine: write(ring_of(engine), [1]),
        lambda engine: place(ring_of(engine), [1], [1]),
        lambda engine: sample(ring_of(engine), 2),
        lambda engine: ring_of(engine).update(np.zeros(1, np.int64), np.ones(1)),
        lambda engine: ring_of(engine).claims.claim(1),
        lambda engine: ring_of(engine).empty(),
        lambda engine: ring_of(engine).tree.set_alpha(0.5),
        lambda engine: engine.stats(),
        lambda engine: engine.flush(),
        lambda engine: require_sound(engine),
        lambda engine: engine.define(schema()).tree.set_alpha(0.3),
    ],
)
def test_every_first_use_in_a_child_is_good_enough(
    make: Maker, use: Callable[[Engine], object]
) -> None:
    engine = make(alpha=1.0)
    write(ring_of(engine), range(3))

    def work() -> None:
        use(engine)
        write(ring_of(engine), [5])
        assert ring_of(engine).seat.incarnation == 2
        engine.close()

    succeeds(work)
    assert [client.incarnation for client in engine.clients()] == [1]
    require_sound(engine)


def test_a_child_may_make_the_first_write(make: Maker) -> None:
    engine = make.undefined()
    succeeds(lambda: write(engine.define(schema()), [1, 2]))
    assert contents(ring_of(engine)) == {0: 1, 1: 2}
    assert ring_of(engine).live.sources[:2].tolist() == [2, 2]


@pytest.mark.product(few=1)
def test_threads_of_a_child_that_use_it_at_once_join_once(make: Maker) -> None:
    engine = make(alpha=1.0)

    def work() -> None:
        start = threading.Barrier(4)

        def use(number: int) -> None:
            start.wait()
            write(ring_of(engine), [number])

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engine.seat.registry.live()) == 2
        assert sorted(contents(ring_of(engine)).values()) == [0, 1, 2, 3]

    for _ in range(5):
        succeeds(work)
        ring_of(engine).empty()
        engine.seat.reap_dead()


def test_a_child_whose_directory_is_gone_says_so(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), [1])

        def work() -> None:
            shutil.rmtree(path)
            with pytest.raises(
                ForkedHandleError,
                match="inherited through fork, but its directory no longer exists; close",
            ):
                write(ring_of(engine), [2])

        succeeds(work)


def test_a_handle_pickles_to_its_path(make_files: Maker) -> None:
    engine = make_files(alpha=1.0)
    write(ring_of(engine), range(3))
    data = pickle.dumps(engine)
    assert len(data) < 500
    with pickle.loads(data) as again:
        assert again.path == engine.path
        assert contents(ring_of(again)) == {0: 0, 1: 1, 2: 2}
        assert len(engine.clients()) == 2


def in_spawned(engine: Engine, connection: Connection) -> None:
    connection.send(contents(ring_of(engine)))
    write(ring_of(engine), [7, 8])
    connection.send(sorted(client.incarnation for client in engine.clients()))
    connection.recv()
    engine.close()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_handle_may_be_passed_to_a_spawned_process(make: Maker, method: str) -> None:
    """Anonymous memory is passed by its descriptor."""
    engine = make(alpha=1.0)
    write(ring_of(engine), range(3))
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=in_spawned, args=(engine, there))
    process.start()
    there.close()
    assert here.recv() == {0: 0, 1: 1, 2: 2}
    assert here.recv() == [1, 2]
    assert contents(ring_of(engine)) == {0: 0, 1: 1, 2: 2, 3: 7, 4: 8}
    here.send(None)
    process.join()
    assert process.exitcode == 0
    process.close()
    assert [client.incarnation for client in engine.clients()] == [1]


def test_anonymous_memory_is_passed_only_while_a_process_is_spawned() -> None:
    with (
        Engine.anonymous(SETTINGS) as engine,
        pytest.raises(RuntimeError, match="only for a process that is being spawned"),
    ):
        pickle.dumps(engine)


# Closing and removing.


def test_a_closed_handle_refuses_everything(make: Maker) -> None:
    engine = make()
    engine.close()
    engine.close()
    assert engine.closed
    for use in (
        lambda: engine.define(schema()),
        engine.stats,
        engine.clients,
        engine.check,
        engine.flush,
        lambda: engine.update_settings(extra={}),
        engine.take_ownership,
        lambda: pickle.dumps(engine),
        lambda: write(ring_of(engine), [1]),
    ):
        with pytest.raises(
            BufferClosedError, match=r": this handle was closed; attach again$"
        ) as caught:
            use()
        assert str(engine.where) in str(caught.value)


def test_a_handle_without_a_schema_can_be_closed(make: Maker) -> None:
    engine = make.undefined()
    second = make.second(engine)
    second.close()
    assert second.ring() is None
    assert len(engine.clients()) == 1


def test_a_process_that_exits_leaves(path: Path) -> None:
    source = """
import sys
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of

engine = Engine.open(sys.argv[1], None)
ring_of(engine).claims.claim(2)
"""
    with Engine.open(path, SETTINGS) as engine:
        engine.define(schema())
        with Program.python(source, path) as process:
            assert process.end() == (0, "", "")
        assert len(engine.seat.registry.live()) == 1
        assert engine.stats()["reaped"] == 0, "nobody had to do it"
        write(ring_of(engine), range(8))


def test_a_directory_that_was_removed_under_a_handle_is_missed(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine, Engine.open(path, None) as early:
        write(engine.define(schema()), [1])
        shutil.rmtree(path)
        for use in (engine.flush, lambda: engine.update_settings(extra={}), lambda: early.ring()):
            with pytest.raises(BufferUnlinkedError, match="removed"):
                use()
        assert contents(ring_of(engine)) == {0: 1}, "what is mapped stays"


def test_a_directory_that_was_replaced_is_not_taken_for_the_old_one(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), [1])
        path.rename(path.with_name("aside"))
        with Engine.open(path, SETTINGS) as other:
            write(other.define(schema()), [2])
            with pytest.raises(BufferUnlinkedError, match=r"was moved .* attach to .*/aside"):
                engine.flush()
            assert not engine.cleanup()
            assert contents(ring_of(other)) == {0: 2}


def test_a_cleanup_removes_what_we_made_and_nothing_else(path: Path) -> None:
    path.mkdir(0o700)
    (path / "notes.txt").write_text("mine")
    (path / "next").mkdir()
    (path / "next" / "more.txt").write_text("mine too")
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), [1])
        assert engine.cleanup()
        assert not engine.cleanup()
    assert files_of(path) == {
        "notes.txt": b"mine",
        "next": "mode 40755",
        "next/more.txt": b"mine too",
    }


def test_a_directory_that_we_made_goes_when_it_is_empty(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        engine.define(schema())
        assert engine.cleanup()
    assert not path.exists()


def test_a_small_file_left_half_written_by_a_kill_is_removed_too(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), [1])
        for name in (
            *("meta.json", "next/meta.json", ".shmbuffer/made.json"),
            *(layout.SCHEMA, layout.DICTIONARY),
        ):
            (path / f"{name}.0123456789abcdef.tmp").write_text("half")
        assert engine.cleanup()
    assert not path.exists()


def test_a_definition_that_cannot_be_synced_leaves_no_schema(path: Path) -> None:
    def sync() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Engine.open(path, SETTINGS) as engine:
        mapping, engine.seat.control.map = engine.seat.control.map, SimpleNamespace(sync=sync)
        with pytest.raises(
            DurabilityError, match=r"output error.*; the buffer still has no schema"
        ):
            engine.define(schema())
        engine.seat.control.map = mapping
        assert engine.ring() is None
        assert engine.superblock.schema_sha256 == bytes(32)
        assert [name for name in files_of(path) if not name.startswith(".shmbuffer")] == []
    with Engine.open(path, None) as engine:  # no client notices that the files are missing
        assert engine.ring() is None
        write(engine.define(schema()), [1])


def test_an_empty_directory_of_the_user_stays(path: Path) -> None:
    path.mkdir(0o700)
    with Engine.open(path, SETTINGS) as engine:
        engine.define(schema())
        assert engine.cleanup()
    assert files_of(path) == {}
    assert path.exists()


def test_a_handle_on_a_removed_buffer_can_read_and_not_write(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine, Engine.open(path, None) as other:
        write(engine.define(schema()), range(5))
        ring = ring_of(other)
        assert engine.cleanup()
        assert contents(ring) == {n: n for n in range(5)}
        sample(ring, 3, prioritized=True)
        for use in (
            lambda: write(ring, [1]),
            lambda: place(ring, [1], [1]),
            lambda: ring.claims.claim(1),
            ring.empty,
        ):
            with pytest.raises(
                BufferClosedError, match="the buffer is being removed, so nothing was"
            ):
                use()


def test_a_buffer_that_was_removed_can_be_made_again(path: Path) -> None:
    for round_ in range(3):
        with Engine.open(path, SETTINGS) as engine:
            assert engine.superblock.epoch == 0
            write(engine.define(schema()), [round_])
            assert engine.cleanup()


# Temporary directories.

TEMPORARY = """
import os, sys
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory import cleanup
from tests.memory.rows import schema, write

path = cleanup.temporary_directory()
engine = Engine.open(path, Settings(capacity=8), temporary=True)
write(engine.define(schema()), [1])
print(path, flush=True)
pid = os.fork()
if pid == 0:
    engine.close()
    sys.exit()
os.waitpid(pid, 0)
print(path.exists(), flush=True)
input()
"""


@pytest.mark.product(few=1)
@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGINT", "SIGKILL"])
def test_a_temporary_directory_ends_with_its_owner(tmp_path: Path, end: str) -> None:
    with Program.python(TEMPORARY, TMPDIR=str(tmp_path)) as process:
        path = Path(process.line())
        assert process.line() == "True", "a child that ends removes nothing"
        if end == "exit":
            process.tell()
        else:
            os.kill(process.pid, getattr(signal, end))
        status, _, _ = process.end()
    assert status == (0 if end == "exit" else -getattr(signal, end))
    assert path.exists() == (end == "SIGKILL")
    with Program.python(TEMPORARY, TMPDIR=str(tmp_path)) as process:
        process.line()
        assert not path.exists(), "the next start removes what a killed owner left"
        process.line()
        process.tell()
        process.end()
    assert os.listdir(tmp_path) == []


def test_a_client_that_opens_an_abandoned_buffer_during_its_removal_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client joins between the check whether the directory is needed and its removal."""
    with Program.python(TEMPORARY, TMPDIR=str(tmp_path)) as process:
        abandoned = Path(process.line())
        assert process.line() == "True"
        process.kill()
    came: list[Engine] = []

    def asked(path: Path) -> bool:
        assert path == abandoned
        came.append(Engine.open(path, None))
        return True

    monkeypatch.setattr(removal, "_is_abandoned", asked)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert removal.sweep(excluding=tmp_path / "another") == []
    (engine,) = came
    with engine:
        assert contents(ring_of(engine)) == {0: 1}
        write(ring_of(engine), [2])
        assert engine.cleanup()
    assert os.listdir(tmp_path) == []


@pytest.mark.full
def test_a_directory_of_the_user_is_removed_at_the_end_only_if_he_said_so(path: Path) -> None:
    source = """
import sys
from shmbuffer.memory import Engine, Settings
from tests.memory.rows import schema, write

engine = Engine.open(sys.argv[1], Settings(capacity=8), auto_cleanup=sys.argv[2] == "yes")
write(engine.define(schema()), [1])
"""
    for said in ("no", "yes"):
        with Program.python(source, path, said) as process:
            assert process.end() == (0, "", "")
        assert path.exists() == (said == "no")


@pytest.mark.full
def test_a_temporary_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with Program.python(TEMPORARY, TMPDIR=str(tmp_path)) as process:
        path = Path(process.line())
        process.line()
        with Engine.open(path, None) as engine:
            assert not engine.take_ownership(), "its owner lives"
            process.kill()
            assert engine.take_ownership()
            assert engine.superblock.owner_pid == os.getpid()
            assert engine.cleanup()
    assert not path.exists()


def test_only_a_temporary_directory_is_taken_over(make: Maker) -> None:
    engine = make()
    with suppress(ShmBufferError):
        assert not engine.take_ownership()


# The repr.


def test_settings_may_be_changed(make: Maker) -> None:
    engine = make(extra={"class": "A", "batch": 4})
    second = make.second(engine)
    changed = engine.update_settings(extra={"batch": 8, "name": "x"})
    assert changed.extra == {"class": "A", "batch": 8, "name": "x"}
    assert second.settings == changed
    assert second.settings.capacity == 8
    with pytest.raises(ValueError, match="the settings of the buffer take"):
        engine.update_settings(extra={"name": "x" * 5000})
    assert second.settings == changed
    with pytest.raises(TypeError, match="colour"):
        engine.update_settings(colour="green")
    with pytest.raises(ValueError, match="the capacity must be at least 1"):
        engine.update_settings(capacity=0)
    assert second.settings == changed


def test_stats_are_one_flat_snapshot(make: Maker) -> None:
    engine = make.undefined(alpha=1.0)
    empty = engine.stats()
    assert (empty["length"], empty["elements"], empty["clients_alive"]) == (0, 8, 1)
    ring = engine.define(schema())
    write(ring, range(10), np.full(10, 2.0))
    sample(ring, 5)
    sample(ring, 6, prioritized=True)
    found = engine.stats()
    assert set(found) == set(empty)
    assert all(isinstance(value, int | float) for value in found.values())
    assert {
        name: found[name]
        for name in (
            "length",
            "write_count",
            "head",
            "inserts",
            "batches_sampled",
            "items_sampled",
            "p_sum",
        )
    } == {
        "length": 8,
        "write_count": 10,
        "head": 10,
        "inserts": 8,
        "batches_sampled": 2,
        "items_sampled": 11,
        "p_sum": ring.tree.p_sum,
    }
    assert (found["clients_alive"], found["clients_dead"], found["epoch"]) == (1, 0, 0)
    assert found["max_priority"] == 2.0
    assert found["bytes"] > 143360 + 46 * 8


def test_the_age_of_what_is_sampled_is_counted_in_writes(make: Maker) -> None:
    engine = make(capacity=4, lanes=(2,))
    ring = ring_of(engine)
    write(ring, range(2))
    sample(ring, 3)
    assert engine.stats()["age_sum"] == 0
    write(ring, range(6))
    ring.claims.claim_slots(np.array([1, 2, 3]), in_place=True)
    sample(ring, 1)  # slot 0: 3 slots of 2 and a lap of 4 slots later
    ring.claims.abort()
    assert engine.stats()["age_sum"] == (3 + 4) * 2


def test_every_error_pickles_with_its_parts(path: Path) -> None:
    left_behind(path)
    os.truncate(path / OBS, 3)
    with pytest.raises(CorruptBufferError) as caught:
        Engine.open(path, None)
    again: Any = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.__class__) == (str(caught.value), CorruptBufferError)
    assert (again.expected, again.found) == (296, 3)


def test_the_files_of_a_buffer_are_ours_alone(make_files: Maker) -> None:
    engine = make_files()
    assert engine.path is not None
    for one in engine.path.rglob("*"):
        assert stat.S_IMODE(one.lstat().st_mode) & 0o077 == 0
    assert re.fullmatch(r"0o40700", oct(engine.path.stat().st_mode))


def test_a_superblock_that_says_closing_is_finished_by_the_next_to_open(path: Path) -> None:
    left_behind(path)
    with Engine.open(path, None) as engine:
        closing = replace(engine.superblock, state=BufferState.CLOSING)
        engine.seat.control.write(closing)
    with pytest.raises(BufferNotFoundError):
        Engine.open(path, None)
    assert not path.exists()


def test_handles_say_what_they_are_handles_of(path: Path) -> None:
    item = schema(50)
    with Engine.open(path, Settings(50)) as engine:
        where = repr(str(path))
        assert repr(engine) == f"Engine({where}, NO_SCHEMA)"
        ring = engine.define(item)
        assert repr(engine) == f"Engine({where}, READY, capacity=50)"
        assert repr(ring) == f"Ring({where}, capacity=50, number, next.obs, done, nothing)"
        assert repr(engine.seat.registry) == f"Registry({where}, entries=[0])"
        directory = engine.seat.backing.directory
        assert repr(directory) == f"Directory({where})"
    assert repr(engine) == f"Engine({where}, closed)"
    assert repr(directory) == f"Directory({where}, closed)"
    assert repr(engine.seat.registry).startswith("Registry(")
