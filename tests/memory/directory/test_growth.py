"""Disk space is allocated in steps ahead of the written slots, and a full disk is an error."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer.errors import (
    AttachTimeout,
    BufferClosedError,
    BufferUnlinkedError,
    CorruptBufferError,
    SpaceError,
)
from shmbuffer.memory import Engine, Leaf, Schema, Settings
from shmbuffer.memory.directory import growth
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format.layout import Flag
from shmbuffer.memory.format.sharing import Sharing
from shmbuffer.memory.system.filesystem import release_part
from shmbuffer.memory.upkeep import inspect
from tests.kit.programs import Program, needs_root
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, contents, place, require_sound, write

PAGE = 4096
CAPACITY = 64
#: A slot takes a page in each of two files, and eight bytes in another one.
LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("more",), "uint8", (PAGE,)),
    Leaf(("next", "obs"), "uint8", (PAGE,)),
    Leaf(("nothing",), "float32", (0,)),
)
SLOT_BYTES = 2 * PAGE + 8
STEP = 4
SETTINGS = Settings(capacity=CAPACITY, alpha=0.5, eps=0.0, reserve="steps")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "STEP_BYTES", STEP * SLOT_BYTES)


def schema(capacity: int = CAPACITY) -> Schema:
    return Schema(LEAVES, capacity)


def opened(path: Path, settings: Settings | None = SETTINGS) -> Engine:
    engine = Engine.open(path, settings)
    if settings is not None:
        engine.define(schema(settings.capacity))
    return engine


def allocated(engine: Engine) -> int:
    return int(engine.seat.control.runtime["allocated"][0])


def taken(path: Path) -> list[int]:
    """Returns the bytes on disk of each file that has a page for each slot."""
    names = ("more.memmap", "next/obs.memmap")
    return [(path / name).stat().st_blocks * 512 for name in names]


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_the_files_have_the_space_of_what_is_written_and_of_a_step(path: Path) -> None:
    with opened(path) as engine:
        assert allocated(engine) == STEP
        for written in range(1, CAPACITY + 1):
            write(ring_of(engine), [written])
            slots = allocated(engine)
            assert written <= slots < written + STEP
            assert taken(path) == [PAGE * slots] * 2
            assert (path / "more.memmap").stat().st_size == PAGE * CAPACITY
        write(ring_of(engine), range(3 * CAPACITY))
        assert allocated(engine) == CAPACITY
        require_sound(engine)


def test_a_batch_that_needs_more_than_a_step_takes_what_it_needs(path: Path) -> None:
    with opened(path) as engine:
        write(ring_of(engine), range(5 * STEP))
        assert allocated(engine) == 5 * STEP
        write(ring_of(engine), range(CAPACITY))  # past the end of the ring
        assert allocated(engine) == CAPACITY


def test_the_watermark_of_other_modes_is_the_capacity(path: Path, tmp_path: Path) -> None:
    for reserve, full in (("all", True), (False, False)):
        where = tmp_path / str(reserve)
        with opened(where, replace(SETTINGS, reserve=reserve)) as engine:  # type: ignore[arg-type]
            assert allocated(engine) == CAPACITY
            write(ring_of(engine), [1])
            assert (min(taken(where)) >= PAGE * CAPACITY) == full
    with Engine.anonymous(SETTINGS) as engine:
        engine.define(schema())
        assert allocated(engine) == CAPACITY
        assert not engine.superblock.flags & (Flag.STEPS | Flag.RESERVE)


def test_the_slots_file_has_all_of_its_space_at_once(path: Path) -> None:
    with opened(path, replace(SETTINGS, capacity=2000)):
        found = (path / ".shmbuffer" / "slots").stat()
        assert found.st_blocks * 512 >= found.st_size > 2000 * 37


def test_a_write_to_named_slots_takes_the_space_of_the_largest_first(path: Path) -> None:
    with opened(path) as engine:
        place(ring_of(engine), [1, 33, 2], [1, 33, 2], in_place=False)
        assert allocated(engine) == 34
        place(ring_of(engine), [50], [50], in_place=True)
        assert allocated(engine) == 51
        assert contents(ring_of(engine)) == {1: 1, 2: 2, 33: 33, 50: 50}
        write(ring_of(engine), [7])
        assert allocated(engine) == 51


def test_a_reservation_takes_the_space_and_other_writers_leave_it(path: Path) -> None:
    with opened(path) as engine, Engine.open(path, None) as other:
        ring = ring_of(engine)
        name = ring.reservations.reserve(10)
        assert allocated(engine) >= 10
        write(ring_of(other), range(3))
        assert allocated(engine) >= 13
        before = allocated(engine)
        with ring.reservations.hold(name):
            write(ring, range(10))
        assert allocated(engine) == before
        name = ring.reservations.reserve(CAPACITY)  # past the end of the ring
        assert allocated(engine) == CAPACITY
        assert ring.reservations.give_back(name)
        require_sound(engine)


def test_an_emptied_ring_goes_on_with_the_space_that_it_has(path: Path) -> None:
    with opened(path) as engine:
        write(ring_of(engine), range(10))
        before = allocated(engine)
        ring_of(engine).empty()
        write(ring_of(engine), range(before))
        assert allocated(engine) == before
        ring_of(engine).empty()
        assert engine.undefine()
        engine.define(schema(CAPACITY))
        assert allocated(engine) == STEP
        assert taken(path) == [PAGE * STEP] * 2
        write(ring_of(engine), range(20))
        require_sound(engine)


def test_readers_in_other_processes_see_each_item_while_a_writer_takes_space(path: Path) -> None:
    def reads(_parent: Parent) -> None:
        with Engine.open(path, None) as engine:
            before = taken(path)
            assert contents(ring_of(engine)) == {k: k for k in range(3)}
            assert taken(path) == before  # no page of an unwritten slot was allocated

    with opened(path) as engine:
        write(ring_of(engine), range(3))
        with child(reads) as reader:
            assert reader.end() == 0
        write(ring_of(engine), range(3, 30))
        assert contents(ring_of(engine)) == {k: k for k in range(30)}


def test_rows_for_whole_next_observations_have_all_of_their_space(path: Path) -> None:
    leaves = (Leaf(("obs",), "uint8", (PAGE,)), Leaf(("next", "obs"), "uint8", (PAGE,)))
    shared = Schema(leaves, CAPACITY, sharing=Sharing((("next", "obs"),), 16))
    assert shared.bytes_of_slots(0) == (0, 0)
    assert shared.bytes_of_slots(3) == (3 * PAGE, 16 * PAGE)
    assert shared.bytes_of_slots(CAPACITY) == shared.map_bytes == (CAPACITY * PAGE, 16 * PAGE)
    assert growth.slots_per_step(shared) == STEP * 2


# Not enough space.


def full_disk(patch: pytest.MonkeyPatch, path: Path, after: int) -> list[int]:
    """Lets a quota, which the free space does not show, run out after ``after`` calls."""
    calls: list[int] = []
    allocate = os.posix_fallocate

    def fallocate(fd: int, start: int, nbytes: int) -> None:
        if len(calls) >= after:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        calls.append(nbytes)
        allocate(fd, start, nbytes)

    patch.setattr(os, "posix_fallocate", fallocate)
    return calls


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("how", ["write", "place", "reserve"])
def test_too_little_space_is_that_call_s_error_and_nothing_is_changed(
    path: Path, how: str, after: int
) -> None:
    calls: dict[str, Callable[[Engine], object]] = {
        "write": lambda engine: write(ring_of(engine), range(100, 110)),
        "place": lambda engine: place(ring_of(engine), [40], [40], in_place=False),
        "reserve": lambda engine: ring_of(engine).reservations.reserve(20),
    }
    with opened(path) as engine:
        ring = ring_of(engine)
        write(ring, range(3))
        before = allocated(engine), taken(path), ring.head, ring.write_count, contents(ring)
        with pytest.MonkeyPatch.context() as patch:
            if how == "reserve":  # the table of reservations takes its own space once
                ring.reservations.give_back(ring.reservations.reserve(1))
            full_disk(patch, path, after)
            with pytest.raises(
                SpaceError,
                match=rf"^{re.escape(str(path))}: .* are needed, .*; but your quota is used up",
            ):
                calls[how](engine)
        now = allocated(engine), taken(path), ring.head, ring.write_count, contents(ring)
        assert now == before
        write(ring, [3])  # items that fit are written
        calls[how](engine)
        require_sound(engine)


def test_where_a_step_does_not_fit_a_write_takes_what_it_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as engine:
        write(ring_of(engine), range(STEP))
        room = 2 * SLOT_BYTES
        monkeypatch.setattr(type(engine.seat.backing.directory), "free_bytes", lambda _: room)
        write(ring_of(engine), [4, 5])
        assert allocated(engine) == STEP + 2
        with pytest.raises(SpaceError, match=r"are needed, and .* free; free some space") as caught:
            write(ring_of(engine), [6, 7, 8])
        assert caught.value.parts["needed_bytes"] == 6 * PAGE
        assert caught.value.parts["free_bytes"] == room
        assert allocated(engine) == STEP + 2


def test_the_first_write_that_does_not_fit_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(path, SETTINGS) as engine:
        full_disk(monkeypatch, path, 0)
        with pytest.raises(SpaceError):
            engine.define(schema())
        monkeypatch.undo()
        assert not (path / "more.memmap").exists()
        assert engine.ring() is None
        engine.define(schema())
        write(ring_of(engine), range(9))


def test_the_first_write_warns_once_if_all_of_it_would_not_fit(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = 20 * SLOT_BYTES
    monkeypatch.setattr("shmbuffer.memory.directory.files.Directory.free_bytes", lambda _: room)
    with caplog.at_level(logging.WARNING, "shmbuffer.memory"), opened(path) as engine:
        write(ring_of(engine), range(8))
        write(ring_of(engine), range(8))
    (record,) = caplog.records
    assert re.match(
        rf"{re.escape(str(path))}: all 64 slots need .*bytes, but only {room} bytes are free; "
        "writes raise SpaceError once the disk is full. Free some space, ",
        record.getMessage(),
    )
    caplog.clear()
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "shmbuffer.memory"), opened(tmp_path / "fits"):
        pass
    assert caplog.records == []


FULL_TMPFS = """
import os, subprocess, sys
from pathlib import Path
from shmbuffer.errors import SpaceError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory import growth
from tests.kit.rings import ring_of
from tests.memory.directory.test_growth import schema, write, contents, place, require_sound

place_ = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", place_], check=True)
settings = Settings(capacity=1000, alpha=0.5, reserve="steps")
growth.STEP_BYTES = 2**18
pid = os.fork()
path = place_ / "buffer"
with Engine.open(path, settings) as engine:
    ring = engine.define(schema(1000))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    number = 0
    try:
        while True:
            write(ring, [number])
            number += 1
    except SpaceError as error:
        print(error.parts["needed_bytes"] > error.parts["free_bytes"], flush=True)
    print(100 < number < 256 and contents(ring) == {k: k for k in range(number)}, flush=True)
    for call in (lambda: write(ring, range(3)), lambda: place(ring, [900], [1], in_place=False)):
        try:
            call()
        except SpaceError:
            print("refused", flush=True)
    require_sound(engine)
    ring.empty()
    write(ring, range(number))
    print(contents(ring) == {k: k for k in range(number)}, flush=True)
    subprocess.run(["mount", "-o", "remount,size=16m", place_], check=True)
    write(ring, range(number, 1000))
    require_sound(engine)
    print(len(contents(ring)), flush=True)
"""


@needs_root
def test_a_full_memory_file_system_is_an_error_of_each_write_and_kills_nobody(
    fast_path: Path,
) -> None:
    with Program.python(FULL_TMPFS, fast_path, before=("unshare", "--mount")) as process:
        lines = [process.line() for _ in range(6)]
        assert lines == ["True", "True", "refused", "refused", "True", "1000"]
        status, _, logged = process.end()
        assert status == 0
        assert logged.count("all 1000 slots need") <= 2


# Concurrent changes by other processes.


def test_a_writer_waits_while_another_takes_space_and_names_it_if_it_stands_still(
    path: Path,
) -> None:
    with opened(path) as engine:
        files = engine.seat.backing
        assert isinstance(files, Files)

        def holds(parent: Parent) -> None:
            with Engine.open(path, None) as other:
                assert isinstance(other.seat.backing, Files)
                with other.seat.backing.lock_growth(5.0):
                    parent.pause()

        with child(holds) as holder:
            holder.reached()
            write(ring_of(engine), range(STEP))  # its space is allocated
            with Engine.open(path, None) as joining:  # a joining process does not wait either
                assert len(contents(ring_of(joining))) == STEP
            with pytest.raises(AttachTimeout, match=rf"pid {holder.pid} .*allocates") as caught:
                growth.grow(engine.seat, STEP + 1, timeout=0.05)
            assert caught.value.parts["pids"] == [holder.pid]
            assert allocated(engine) == STEP
            holder.kill()
        write(ring_of(engine), range(STEP))
        require_sound(engine)


def test_a_flush_holds_no_writer_back_that_needs_space(path: Path) -> None:
    with opened(path) as engine, Engine.open(path, None) as other:
        with other.seat.backing.lock(5.0):  # as a flush holds it until all data are on the disk
            write(ring_of(engine), range(4 * STEP))
        assert allocated(engine) == 4 * STEP


def test_a_child_that_is_forked_while_space_is_taken_takes_its_own(path: Path) -> None:
    def writes(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        write(ring_of(engine), range(2 * STEP, 4 * STEP))

    with opened(path) as engine:
        files = engine.seat.backing
        assert isinstance(files, Files)
        lock = files.lock_growth(5.0)
        with lock:
            forked = ExitStack()
            writer = forked.enter_context(child(writes))
            writer.reached()
            # The child does not own our lock: it gets the lock when we release it.
            assert allocated(engine) == STEP
        with forked:
            assert writer.end() == 0
        write(ring_of(engine), range(2 * STEP))
        assert sorted(contents(ring_of(engine)).values()) == [*range(4 * STEP)]
        require_sound(engine)


def test_files_that_were_replaced_are_not_taken_for_the_mapped_ones(path: Path) -> None:
    with opened(path) as engine:
        write(ring_of(engine), range(2))
        leaf = path / "more.memmap"
        shutil.copy2(leaf, path / "other")
        os.replace(path / "other", leaf)
        with pytest.raises(BufferUnlinkedError, match=r"more\.memmap: the file was replaced while"):
            write(ring_of(engine), range(STEP))
        assert allocated(engine) == STEP


def test_a_buffer_that_is_removed_meanwhile_says_so(path: Path) -> None:
    with opened(path) as engine:
        with Engine.open(path, None) as other:
            other.cleanup()
        with pytest.raises(BufferClosedError, match="being removed"):
            write(ring_of(engine), range(STEP + 1))
        growth.grow(engine.seat, STEP + 1)
        assert allocated(engine) == STEP


def test_a_schema_is_not_withdrawn_while_space_is_taken_for_it(path: Path) -> None:
    with opened(path) as engine:
        files = engine.seat.backing
        assert isinstance(files, Files)
        with files.lock_growth(5.0), pytest.raises(AttachTimeout, match="allocates space"):
            engine.undefine(timeout=0.05)
        assert engine.ring() is not None
        write(ring_of(engine), range(9))
        require_sound(engine)


# After a restart, and in copies.


def punched(path: Path) -> None:
    """Frees all blocks that contain only zeros, as `cp --sparse=always` does."""
    for file in (*path.rglob("*.memmap"), path / ".shmbuffer" / "slots"):
        with file.open("r+b") as opened_file:
            size = file.stat().st_size
            for start in range(0, size, PAGE):
                if not any(os.pread(opened_file.fileno(), PAGE, start)):
                    release_part(opened_file.fileno(), start, min(PAGE, size - start))


def earlier_boot(path: Path) -> None:
    with Engine.open(path, None) as engine:
        control = engine.seat.control
        control.write(replace(control.superblock(), boot_id=b"an earlier boot."))
        control.entries["boot_id"] = np.void(b"an earlier boot.")


def left(path: Path, settings: Settings = SETTINGS) -> None:
    """Leaves a buffer with ten items and space for twelve that no process uses."""
    with opened(path, settings) as engine:
        write(ring_of(engine), range(STEP))
        write(ring_of(engine), range(STEP, 10))
        assert allocated(engine) in (10, 12, CAPACITY)


@pytest.mark.parametrize("checksum", [True, False])
def test_after_a_restart_the_space_is_taken_again(path: Path, checksum: bool) -> None:
    left(path, replace(SETTINGS, checksum=checksum))
    with Engine.open(path, None) as engine:
        engine.flush()
        before = allocated(engine)
    earlier_boot(path)
    punched(path)
    assert max(taken(path)) < before * PAGE
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.reason == "reboot"
        assert allocated(engine) == before
        assert taken(path) == [PAGE * before] * 2
        slots = (path / ".shmbuffer" / "slots").stat()
        assert slots.st_blocks * 512 >= slots.st_size
        assert contents(ring_of(engine)) == {k: k for k in range(10)}
        write(ring_of(engine), range(10, 60))
        require_sound(engine)


def test_a_watermark_that_is_older_than_the_items_is_raised_after_a_restart(path: Path) -> None:
    """The page with the watermark did not reach the disk, but the pages of the items did."""
    left(path)
    with Engine.open(path, None) as engine:
        engine.seat.control.runtime["allocated"] = STEP
    earlier_boot(path)
    with Engine.open(path, None) as engine:
        assert allocated(engine) == 10
        assert len(contents(ring_of(engine))) == 10
    assert min(taken(path)) >= 10 * PAGE


@pytest.mark.parametrize("mode", ["steps", "all", False])
def test_a_sparse_copy_has_its_space_once_it_is_opened(
    path: Path, tmp_path: Path, mode: Any
) -> None:
    left(path, replace(SETTINGS, reserve=mode))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", "--sparse=always", path, copy], check=True)
    with Engine.open(copy, None) as engine:
        assert engine.report is not None
        assert engine.report.reason == "copy"
        slots = (copy / ".shmbuffer" / "slots").stat()
        assert slots.st_blocks * 512 >= slots.st_size
        if mode == "all":
            assert min(taken(copy)) >= CAPACITY * PAGE
        elif mode == "steps":
            assert min(taken(copy)) >= allocated(engine) * PAGE
            assert allocated(engine) in (10, 12)
        else:
            assert max(taken(copy)) <= 10 * PAGE
        write(ring_of(engine), range(10, 60))
        require_sound(engine)


def test_a_restart_on_a_disk_without_the_space_is_an_error_and_can_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(path)
    earlier_boot(path)
    punched(path)
    full_disk(monkeypatch, path, 1)
    with pytest.raises(SpaceError, match="quota is used up"):
        Engine.open(path, None)
    monkeypatch.undo()
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {k: k for k in range(10)}
        require_sound(engine)


def test_an_impossible_watermark_is_no_reason_to_write_without_space(path: Path) -> None:
    left(path)
    with Engine.open(path, None) as engine:
        engine.seat.control.runtime["allocated"] = 2**63
    with Engine.open(path, None) as engine:
        assert allocated(engine) == CAPACITY
        write(ring_of(engine), range(CAPACITY))


def test_a_failed_growth_gives_no_space_of_items_back_whatever_the_watermark_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have overwritten the shared memory."""
    left(path)
    with Engine.open(path, None) as engine:
        engine.seat.control.runtime["allocated"] = 1
        full_disk(monkeypatch, path, 1)
        with pytest.raises(SpaceError):
            write(ring_of(engine), range(20))
        monkeypatch.undo()
        assert contents(ring_of(engine)) == {k: k for k in range(10)}
        require_sound(engine)


# Recorded sizes.


@pytest.mark.parametrize("value", [True, 1, 0, None, "step", "", [], 2.0])
def test_another_value_of_reserve_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"reserve must be 'all', 'steps' or False, but is "):
        Settings(capacity=8, reserve=value)


def test_a_byte_ring_takes_its_space_at_once_or_page_by_page() -> None:
    Settings(capacity=8, record_bytes=PAGE, reserve="all")
    with pytest.raises(
        ValueError, match=r"reserve='steps' is not supported for .* byte ring; pass reserve="
    ):
        Settings(capacity=8, record_bytes=PAGE, reserve="steps")


def test_settings_with_another_value_are_damage(path: Path) -> None:
    left(path)
    with Engine.open(path, None) as engine:
        control = engine.seat.control
        superblock = control.superblock()
        control.write(replace(superblock, settings={**superblock.settings, "reserve": True}))
    with pytest.raises(CorruptBufferError, match="the settings in the superblock are not valid"):
        Engine.open(path, None)


def test_inspect_shows_what_the_files_take(path: Path) -> None:
    left(path)
    found = inspect.inspect(path)
    assert "STEPS" in found["flags"]
    assert "RESERVE" not in found["flags"]
    assert found["settings"]["reserve"] == "steps"
    assert found["disk_bytes"] < found["bytes"]
