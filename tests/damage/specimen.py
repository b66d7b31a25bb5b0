"""Specimens: dead buffers with known bytes, which are damaged and restored.

The buffer was written around the end of the ring. It contains slots of a dead writer that was
rolled back, placed and updated items, and slots of a writer that died between claim and commit.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Schema
from shmbuffer.memory.directory import restored
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.format.slots import committed, states, tickets
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system.region import Directory
from tests.crash import harness

EARLIER_BOOT = b"an earlier boot."
_TOUCHED = layout.RUNTIME_OFFSET + layout.RUNTIME.fields["touched_ns"][1]  # type: ignore[index]

#: Maps each slot to the ticket and the bytes of its item.
Contents = dict[int, tuple[int, bytes]]


@dataclass(frozen=True)
class Change:
    """New bytes at a position in a file."""

    file: str
    offset: int
    data: bytes


class Specimen:
    """A directory and its known content.

    Attributes:
        path: the directory.
        kind: the kind of items, a key of `harness.KINDS`.
        rebooted: whether the machine was restarted since.
        files: the content of each file, by its name below the path.
        truth: the items as they were written.
        begun: the slots that a writer was filling when it died.
    """

    def __init__(self, path: Path, kind: str, *, rebooted: bool = False) -> None:
        self.path = path
        self.kind = kind
        self.rebooted = rebooted
        self.files: dict[str, bytes] = {}
        self.truth: Contents = {}
        self._live()
        if rebooted:
            reboot(path)
        self.files = {
            str(file.relative_to(path)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        stored = np.frombuffer(self.files[layout.SLOTS], np.uint64, self.schema.capacity)
        self.begun = set((states(stored) == SlotState.WRITING).nonzero()[0].tolist())
        harness.succeeds(self._find_truth)
        self.truth = _unpacked((path / "truth").read_bytes())
        (path / "truth").unlink()
        self.restore()
        assert len(self.truth) >= 4

    def _live(self) -> None:
        _live(self.path, self.kind)

    @property
    def schema(self) -> Schema:
        return harness.schema(self.kind)

    def bytes_of(self, change: Change) -> bytes:
        """Returns the original bytes at the place of a change."""
        return self.files[change.file][change.offset : change.offset + len(change.data)]

    def restore(self) -> None:
        """Restores every byte in the same files, because the inode identifies a control file."""
        for name, content in self.files.items():
            _write(self.path / name, content)
        if layout.SLOTS in self.files:
            self._left_by_processes()

    def _left_by_processes(self) -> None:
        """Sets file times as processes leave them, because changes after that are not trusted."""
        with Directory.open(self.path) as directory:
            restored.vouch(directory, [layout.CONTROL, *self.schema.mapped_files])
        with edited_control(self.path) as control:
            control.touch()  # the first store through a map changes the file's times
            control.touch()
            data = control.runtime["touched_ns"].tobytes()
        content = self.files[layout.CONTROL]
        self.files[layout.CONTROL] = content[:_TOUCHED] + data + content[_TOUCHED + 8 :]

    def renew(self) -> None:
        """Restores the buffer in new files, after another object took the place of a file."""
        clear(self.path)
        self.restore()
        with edited_control(self.path) as control:
            found = (self.path / layout.CONTROL).stat()
            for _ in (0, 1):
                here = {"device": found.st_dev, "inode": found.st_ino}
                control.write(replace(control.superblock(), **here))
        self.files[layout.CONTROL] = (self.path / layout.CONTROL).read_bytes()

    def damage(self, *changes: Change) -> None:
        """Restores the buffer and applies these changes."""
        self.restore()
        for change in changes:
            with (self.path / change.file).open("r+b") as file:
                file.seek(change.offset)
                file.write(change.data)
        if not any(
            change.file == layout.CONTROL and change.offset == _TOUCHED for change in changes
        ):
            self._left_by_processes()

    def _find_truth(self) -> None:
        with Engine.open(self.path, None) as engine:
            assert engine.ring() is not None
            found = contents(engine.ring())
            harness.read_all(engine.ring())
        (self.path / "truth").write_bytes(_packed(found))


def clear(path: Path) -> None:
    """Removes the object at a path if there is one. If it is a link, its target stays."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def contents(ring: Ring) -> Contents:
    """Returns the bytes of every item that a validated read returns."""
    index = np.arange(ring.elements, dtype=np.int64)
    if ring.records is not None:
        drawn = ring.records.read(index)
        return {
            slot: (int(drawn.tickets[slot]), bytes(drawn.batch.body(slot)))
            for slot in (drawn.tickets >= 0).nonzero()[0].tolist()
        }
    batch, found = harness.Batch(range(ring.elements)), np.empty(ring.elements, np.int64)
    ring.read(index.ctypes.data, len(index), batch.addresses, found.ctypes.data)
    return {
        slot: (int(found[slot]), row_bytes(batch, slot))
        for slot in (found >= 0).nonzero()[0].tolist()
    }


def row_bytes(batch: harness.Batch, row: int) -> bytes:
    """Returns the bytes of all leaves in one row."""
    leaves = (batch.numbers, batch.square, batch.bytes)
    return b"".join(leaf[row].tobytes() for leaf in leaves)


def reboot(path: Path) -> None:
    """Simulates a restart, after which the kernel has lost its state and the files are intact."""
    with edited_control(path) as control:
        for _ in (0, 1):
            control.write(replace(control.superblock(), boot_id=EARLIER_BOOT))
        control.entries["boot_id"] = np.void(EARLIER_BOOT)


@contextmanager
def edited_control(path: Path) -> Iterator[Control]:
    """Yields the control file of a directory for changes; its checksums are valid afterwards."""
    with (path / layout.CONTROL).open("r+b") as file:
        yield Control(_core.Map(file.fileno(), layout.CONTROL_BYTES), str(path))


def words(content: bytes, capacity: int = harness.CAPACITY) -> tuple[list[int], list[int]]:
    """Returns slots with an item, and their tickets, from the bytes of a slots file."""
    found = np.frombuffer(content, np.uint64, capacity)
    return committed(found).nonzero()[0].tolist(), tickets(found)[committed(found)].tolist()


def _live(path: Path, kind: str) -> None:
    def first() -> None:
        with Engine.open(path, harness.settings(kind)) as engine:
            ring = engine.define(harness.schema(kind))
            for number in range(5):
                harness.write(ring, [number])
            harness.write(ring, range(5, 8))
            if kind == "records":
                engine.seat.publish_dictionary(b"words that occur in every item" * 8)

    def second() -> None:
        with Engine.open(path, None) as engine:
            assert engine.ring() is not None
            harness.write(engine.ring(), range(20, 22))
            harness.place(engine.ring(), [7], [30], in_place=True)
            engine.ring().update(np.array([6]), np.array([3.0]))

    harness.succeeds(first)
    assert harness.dies(path, "write.checksum", lambda engine: _write_two(engine, 10))
    harness.succeeds(second)
    assert harness.dies(path, "write.checksum", lambda engine: _write_two(engine, 40))


def _write_two(engine: Engine, number: int) -> None:
    assert engine.ring() is not None
    harness.write(engine.ring(), [number, number + 1])


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(fd).st_size != len(content):
            os.ftruncate(fd, len(content))
        os.pwrite(fd, content, 0)
    finally:
        os.close(fd)


def _packed(found: Contents) -> bytes:
    return repr(found).encode()


def _unpacked(data: bytes) -> Contents:
    found: Contents = ast.literal_eval(data.decode())
    return found
