"""Records what a process does to files, step by step, so that power cuts can be simulated.

    process ──name of a step──▶ recorder: which pages, sizes and names are others than before
            ◀──── go on ───────

A step is a crash point of the engine, a call that changes names, or a sync. The process stands
still while the recorder reads its files from outside, so the record does not depend on what the
process reports.

A file that is removed is moved to another directory instead, so that an image can contain it again.
This keeps the inode, by which a control file is identified.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from tests.crash.harness import each_point
from tests.power.disk import PAGE, Disk, File, Name, differing

_PR_SET_PDEATHSIG = 1
_NATIVE = frozenset(_core.crash_points())


@dataclass(frozen=True)
class Event:
    """An event on a page, a size, names, or a sync; or a step, or a mark."""

    kind: str
    number: int = 0
    value: Any = None


@dataclass
class Recording:
    """The disk before a process ran, and the events that followed."""

    before: Disk
    events: list[Event] = field(default_factory=list)


def apply(disk: Disk, event: Event) -> None:
    """Applies an event to a disk."""
    if event.kind == "folder":
        disk.folders.add(event.number)
    elif event.kind == "file":
        disk.files[event.number] = File(sizes=[0])
    elif event.kind == "page":
        disk.files[event.number].store(*event.value)
    elif event.kind == "size":
        disk.files[event.number].resize(event.value)
    elif event.kind == "names":
        disk.pending.append(event.value)
    elif event.kind == "synced":
        disk.sync(event.number)


def record(tree: Path, attic: Path, work: Callable[[Reporter], None]) -> Recording:
    """Runs ``work`` in a child and records what it does below ``tree``.

    Args:
        tree: a directory, whose content is already on the disk.
        attic: a directory for files that are removed.
        work: gets the reporter, whose `mark` notes what the child says of itself.
    """

    def child(tell: int, hear: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        reporter = Reporter(tell, hear, attic)
        with reporter.watching():
            _core.arm("*", "pause", notify_fd=tell, wait_fd=hear)
            work(reporter)
            _core.disarm()

    watch = _Watch(tree)
    try:
        with closing(each_point(child)) as lines:
            for line in lines:
                watch.step(line)
    finally:
        watch.close()
    return watch.recording


class Reporter:
    """Reports steps that are no crash points. It runs in the recorded process."""

    def __init__(self, tell: int, hear: int, attic: Path) -> None:
        self._tell = tell
        self._hear = hear
        self._attic = attic
        self._numbers: dict[int, int] = {}

    def mark(self, kind: str, **values: Any) -> None:
        self._say(f"mark {json.dumps([kind, values])}")

    def _say(self, line: str) -> None:
        _write(self._tell, line.encode() + b"\n")
        assert os.read(self._hear, 1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        for name in ("rename", "replace", "mkdir", "rmdir", "ftruncate", "posix_fallocate"):
            setattr(os, name, self.told(getattr(os, name), name))
        for name in ("open", "write", "pwrite"):
            setattr(os, name, self.told(getattr(os, name), name))
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._synced(getattr(os, name)))
        os.unlink = os.remove = self._put_away  # type: ignore[assignment]
        real_map, real_sync = _core.Map, _core.Map.sync

        def map_of(fd: int, *arguments: Any, **options: Any) -> Any:
            made = real_map(fd, *arguments, **options)
            if fd >= 0:
                self._numbers[made.address] = os.fstat(fd).st_ino
            return made

        def sync(mapping: Any) -> None:
            self._say("before sync")
            real_sync(mapping)
            if mapping.address in self._numbers:
                self._say(f"synced {self._numbers[mapping.address]}")

        _core.Map = map_of  # type: ignore[assignment,misc]
        real_map.sync = sync  # type: ignore[method-assign]
        yield

    def told(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps a call so that it is a step, whose changes of names are recorded at once."""

        @wraps(call)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            self._say(f"before {name}")
            result = call(*arguments, **options)
            self._say(f"after {name}")
            return result

        return wrapper

    def _synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        @wraps(call)
        def wrapper(fd: int) -> None:
            self._say("before sync")
            call(fd)
            self._say(f"synced {os.fstat(fd).st_ino}")

        return wrapper

    def _put_away(self, path: Any, *, dir_fd: int | None = None) -> None:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if found.st_dev != self._attic.stat().st_dev:
            _unlink(path, dir_fd=dir_fd)
            return
        _rename(path, self._attic / str(found.st_ino), src_dir_fd=dir_fd)
        self._say("after unlink")


_write, _rename, _unlink = os.write, os.rename, os.unlink


class _Watch:
    """Compares the files with their previous state. It runs in the recording process."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._fds: dict[int, int] = {}
        self._data: dict[int, bytes] = {}
        self._names: dict[Name, int] = {}
        self._folders = {tree.stat().st_ino}
        self.recording = Recording(Disk(tree.stat().st_ino))
        self._look()
        for event in self.recording.events:
            apply(self.recording.before, event)
        self.recording.before.sync_all()
        self.recording.events = []

    def step(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in _NATIVE:
            self._compare()
        else:
            self._look(at_once=word == "after")
        if word == "synced":
            if int(rest) in self._fds or int(rest) in self._folders:
                self._add("synced", int(rest))
        elif word == "mark":
            self._add("mark", value=json.loads(rest))
        self._add("step", value=line[:40])

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def _add(self, kind: str, number: int = 0, value: Any = None) -> None:
        self.recording.events.append(Event(kind, number, value))

    def _look(self, *, at_once: bool = False) -> None:
        """Records changes of names, and then changes in the files."""
        there = dict(self._walk(self._tree))
        changed: dict[Name, int | None] = {
            name: number for name, number in there.items() if self._names.get(name) != number
        }
        changed |= {name: None for name in self._names if name not in there}
        for one in [changed] if at_once else [{name: changed[name]} for name in changed]:
            if one:
                self._add("names", value=one)
        self._names = there
        self._compare()

    def _walk(self, folder: Path) -> Iterator[tuple[Name, int]]:
        number = folder.stat().st_ino
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                inode = entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    if inode not in self._folders:
                        self._folders.add(inode)
                        self._add("folder", inode)
                    with suppress(FileNotFoundError):
                        yield from self._walk(Path(entry.path))
                elif inode not in self._fds:
                    self._fds[inode] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                    self._data[inode] = b""
                    self._add("file", inode)
                yield (number, entry.name), inode

    def _compare(self) -> None:
        for number, fd in self._fds.items():
            before, size = self._data[number], os.fstat(fd).st_size
            data = os.pread(fd, size, 0)
            if data == before:
                continue
            if size != len(before):
                self._add("size", number, size)
            for page in differing(before, data):
                at = page * PAGE
                if data[at : at + PAGE].strip(b"\0") or before[at : at + PAGE].strip(b"\0"):
                    self._add("page", number, (page, data[at : at + PAGE]))
            self._data[number] = data
