"""`check` examines the whole buffer and changes nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferNotFoundError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.upkeep.check import CheckReport, check
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, Parent, child, files_of, schema, write
from tests.memory.upkeep.edits import edited

SETTINGS = Settings(capacity=8, alpha=1.0, eps=0.0)


@pytest.fixture
def path(fast_path: Path) -> Path:
    """Makes a buffer with items 4 to 11 that all clients have left."""
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(12), np.arange(12.0))
    time.sleep(0.01)  # longer than a tick of the kernel's clock: later edits have a later ctime
    return path


def spoil(path: Path, name: str, at: int, xor: int = 1) -> None:
    with edited(path, name) as data:
        data[at] ^= xor


def unchanged(path: Path) -> CheckReport:
    """Returns the report, after verifying that the directory is unchanged."""
    before = without_mutex(path)
    report = check(path)
    assert without_mutex(path) == before
    return report


def without_mutex(path: Path) -> dict[str, bytes | str]:
    """Reads the files without the mutex, whose lock in a live buffer is no visible change."""
    found = files_of(path)
    control = found[layout.CONTROL]
    assert isinstance(control, bytes)
    found[layout.CONTROL] = control[: layout.RUNTIME_OFFSET] + control[layout.RUNTIME_OFFSET + 64 :]
    return found


def test_a_whole_buffer_is_whole(path: Path) -> None:
    report = unchanged(path)
    assert report.ok
    assert (report.alive, report.items, report.verified) == (False, 8, 8)
    assert (report.problems, report.notes) == ([], [])
    assert str(report) == f"{path}: intact, 8 items, 8 verified, not in use"
    assert json.loads(json.dumps(report.to_json())) == {
        "ok": True,
        "path": str(path),
        "alive": False,
        "items": 8,
        "verified": 8,
        "problems": [],
        "notes": [],
    }


def test_a_living_buffer_is_looked_at_without_joining_it(path: Path) -> None:
    with Engine.open(path, None) as engine:
        ring_of(engine).claims.claim(2)
        report = unchanged(path)
        assert report.ok, report.problems
        assert (report.alive, report.items, report.verified) == (True, 6, 6)
        assert str(report).endswith("intact, 6 items, 6 verified, in use")
        assert len(engine.clients()) == 1
        ring_of(engine).claims.abort()
        assert engine.check().ok


def test_a_living_buffer_that_is_written_to_is_whole_all_the_time(make_files: Maker) -> None:
    engine = make_files(64, alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(64))

    def tight_loop(parent: Parent) -> None:
        write(ring, [0])
        parent.pause()
        while True:
            write(ring, range(5))
            engine.update_settings(extra={})

    assert engine.path is not None
    with child(tight_loop) as writer:
        writer.reached()
        writer.go()
        for _ in range(30):
            assert engine.check().ok
            report = check(engine.path)
            assert report.ok, report.problems
        writer.kill()


def test_a_buffer_without_a_schema_has_nothing_to_look_at(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        for report in (unchanged(path), engine.check()):
            assert report.ok
            assert report.alive
            assert report.notes == ["nothing has been written yet: there is no schema"]
    assert unchanged(path).notes == ["nothing has been written yet: there is no schema"]


def test_there_has_to_be_a_buffer(fast_path: Path) -> None:
    with pytest.raises(BufferNotFoundError, match="there is no buffer here; check the path"):
        check(fast_path)
    with pytest.raises(BufferNotFoundError):
        check(fast_path / "nowhere")
    assert files_of(fast_path) == {}


def test_without_checksums_the_bytes_are_not_compared(make: Maker) -> None:
    engine = make(checksum=False)
    write(ring_of(engine), range(5))
    report = engine.check()
    assert report.ok
    assert (report.items, report.verified) == (5, 0)
    assert report.notes == [
        "the buffer was created with checksum=False, so the bytes of items cannot be verified"
    ]


MASS, SUM, MIN, RAW, SUMS = (
    _core.sections(8, 1)[name] for name in ("mass", "sum1", "min1", "raw", "checksums")
)
DAMAGE: list[tuple[str, Callable[[Path], object], list[str]]] = [
    (
        "a byte of a leaf",
        lambda path: spoil(path, "next/obs.memmap", 37 * 5),
        ["slot 5: the bytes do not match their checksum"],
    ),
    (
        "a checksum",
        lambda path: spoil(path, layout.SLOTS, SUMS + 4 * 3),
        ["slot 3: the bytes do not match their checksum"],
    ),
    (
        "a sum",
        lambda path: spoil(path, layout.SLOTS, SUM),
        ["priority tree: 1 nodes are not the sum of their children"],
    ),
    (
        "a minimum",
        lambda path: spoil(path, layout.SLOTS, MIN),
        ["priority tree: 1 nodes are not the sum of their children"],
    ),
    (
        "a raw priority",
        lambda path: spoil(path, layout.SLOTS, RAW + 8 * 2 + 6),
        ["priority tree: 1 leaves are not the mass of their priority"],
    ),
    (
        "the number of items",
        lambda path: spoil(path, layout.CONTROL, 8192 + 80, 2),
        ["the number of items is off by 2"],
    ),
    (
        "a ticket of another slot",
        lambda path: spoil(path, layout.SLOTS, 8 * 6, 4),
        [
            "1 slot words have an impossible ticket",
            "slot 6: the bytes do not match their checksum",
        ],
    ),
    (
        "a ticket from the future",
        lambda path: spoil(path, layout.SLOTS, 8 * 6 + 1, 1),
        [
            "1 slot words have an impossible ticket",
            "slot 6: the bytes do not match their checksum",
        ],
    ),
    (
        "one superblock",
        lambda path: spoil(path, layout.CONTROL, 500),
        ["one of the two superblock copies is damaged; the other is used"],
    ),
    (
        "a leaf that is cut",
        lambda path: os.truncate(path / "done.memmap", 3),
        ["done.memmap: the file has 3 bytes instead of 8"],
    ),
    (
        "a leaf that is gone",
        lambda path: (path / "done.memmap").unlink(),
        ["done.memmap: is missing; restore it from a copy of the directory"],
    ),
    (
        "both superblocks",
        lambda path: [spoil(path, layout.CONTROL, at) for at in (500, 4596)],  # type: ignore[func-returns-value]
        ["both copies of the superblock are damaged"],
    ),
]


@pytest.mark.product(few=8)
@pytest.mark.parametrize("alive", [False, True], ids=["dead", "alive"])
@pytest.mark.parametrize(
    ("damage", "problems"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE]
)
def test_damage_is_found_and_left_as_it_is(
    path: Path, damage: Callable[[Path], object], problems: list[str], alive: bool
) -> None:
    if alive:
        with Engine.open(path, None):
            damage(path)
            report = unchanged(path)
    else:
        damage(path)
        report = unchanged(path)
    assert not report.ok
    assert len(report.problems) == len(problems), report.problems
    for found, expected in zip(report.problems, problems, strict=True):
        assert expected in found
    assert "DAMAGED" in str(report)
    assert f"  problem: {report.problems[0]}" in str(report)


def test_an_open_handle_finds_the_same(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    np.frombuffer(ring.leaf(0), np.uint8)[8 * 3] ^= 1
    engine.seat.control.runtime["length"] = 9
    report = engine.check()
    assert report.alive
    assert report.problems == [
        "the number of items is off by 1",
        "slot 3: the bytes do not match their checksum",
    ]


def test_a_slot_that_is_being_written_by_nobody_is_an_orphan(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(3))
    ring.live.words[1] = slots.word(1, SlotState.WRITING)
    assert "1 slots are being written, but no client has claimed them" in engine.check().problems


def test_mass_without_an_item_is_found(path: Path) -> None:
    with edited(path, layout.SLOTS) as data:
        data[:64].view(np.uint64)[2] = slots.word(10, SlotState.ABORTED)
    with edited(path, layout.CONTROL) as data:
        data[8192 + 80] = 7
    for alive in (False, True):
        handle = Engine.open(path, SETTINGS) if alive else None
        if handle is not None:  # which has recovered it
            ring_of(handle).live.words[3] = slots.word(11, SlotState.ABORTED)
            handle.seat.control.runtime["length"] = 6
        report = unchanged(path)
        assert report.problems == ["priority tree: 1 leaves are not the mass of their priority"]
        if handle is not None:
            handle.close()


def test_repairs_left_to_the_next_recovery_are_notes(path: Path) -> None:
    def victim(parent: Parent) -> None:
        engine = Engine.open(path, None)
        _core.arm("write.commit")
        write(ring_of(engine), [12, 13], np.ones(2))

    with child(victim) as process:
        assert process.end() == -signal.SIGKILL
    report = unchanged(path)
    assert report.ok, report.problems
    assert "no client alive: the next process that opens the buffer will recover it" in report.notes
    assert "1 slots were being written; recovery frees them" in report.notes
    assert "  note: 1 slots were being written" in str(report)


def test_a_buffer_that_was_being_written_when_its_writer_died_is_no_damage(path: Path) -> None:
    def victim(parent: Parent) -> None:
        engine = Engine.open(path, None)
        ring_of(engine).claims.claim(3)
        os.kill(os.getpid(), signal.SIGKILL)

    with child(victim) as process:
        assert process.end() == -signal.SIGKILL
    report = unchanged(path)
    assert report.ok, report.problems
    assert report.items == 5
    assert "3 slots were being written; recovery frees them" in report.notes


def test_another_boot_is_a_note(path: Path) -> None:
    def victim(parent: Parent) -> None:
        engine = Engine.open(path, None)
        engine.seat.control.write(replace(engine.superblock, boot_id=b"an earlier boot."))
        os.kill(os.getpid(), signal.SIGKILL)

    with child(victim) as process:
        assert process.end() == -signal.SIGKILL
    report = unchanged(path)
    assert not report.alive
    assert report.notes == ["reboot: the next process that opens the buffer will recover it"]


def test_the_last_check_is_the_first_of_the_command_line(path: Path) -> None:
    """The check neither imports torch nor needs an entry."""
    with Engine.open(path, None) as engine:
        engine.seat.control.entries["state"] = 1  # all 256 are in use
        assert check(path).items == 8
        engine.seat.control.entries["state"][1:] = 0
