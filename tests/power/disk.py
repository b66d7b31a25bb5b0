"""What a power cut leaves: every state that the disk may be in, given what was synced.

A page that was stored to reaches the disk whenever the kernel likes, so after a cut it has any of
the versions from its last sync on. A sync of a file keeps the versions, and the size, that it has
then. What happened to names (made, moved, removed) is kept by a sync of their directory; of what
was not synced any part may have happened, but a rename happens as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PAGE = 4096
SECTOR = 512

#: A name: the directory's number, and the name in it.
Name = tuple[int, str]


@dataclass
class File:
    """The newest content, and what else may be on the disk instead."""

    data: bytearray = field(default_factory=bytearray)
    older: dict[int, list[bytes]] = field(default_factory=dict)
    """Of pages that were stored to since the last sync: the versions from then on."""
    sizes: list[int] = field(default_factory=list)
    """From the last sync on, the newest last."""

    def store(self, number: int, page: bytes) -> None:
        """A page has another content now."""
        at = number * PAGE
        self.data.extend(bytes(max(0, at + PAGE - len(self.data))))
        newest = bytes(self.data[at : at + PAGE])
        self.older.setdefault(number, []).append(newest)
        self.data[at : at + PAGE] = page.ljust(PAGE, b"\0")

    def resize(self, size: int) -> None:
        self.sizes.append(size)

    def sync(self) -> None:
        self.older.clear()
        del self.sizes[:-1]


class Choice(Protocol):
    """Which of the possible states of the disk it is."""

    def page(self, role: str, number: int, versions: list[bytes]) -> bytes:
        """One of them, oldest first, or two of them torn at a sector."""

    def size(self, role: str, sizes: list[int]) -> int:
        """One of them, oldest first."""

    def happened(self, operation: Mapping[Name, int | None]) -> bool:
        """Whether names that were changed are on the disk."""


@dataclass
class Disk:
    """Files and directories by number, as they are now, and as they may be on the disk."""

    root: int
    files: dict[int, File] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    names: dict[Name, int] = field(default_factory=dict)
    """Those that are on the disk for certain."""
    pending: list[dict[Name, int | None]] = field(default_factory=list)
    """What happened to names since, each as a whole."""

    def sync(self, number: int) -> None:
        """A file, or the names in a directory, are on the disk now."""
        if number in self.files:
            self.files[number].sync()
            return
        changed = {name for operation in self.pending for name in operation if name[0] == number}
        kept = []
        for operation in reversed(self.pending):  # what came before on the same names too
            if changed.isdisjoint(operation):
                kept.append(operation)
            else:
                changed.update(operation)
        for operation in self.pending:
            if not changed.isdisjoint(operation):
                _apply(self.names, operation)
        self.pending = kept[::-1]

    def sync_all(self) -> None:
        for file in self.files.values():
            file.sync()
        for operation in self.pending:
            _apply(self.names, operation)
        self.pending = []

    @property
    def settled(self) -> bool:
        """Whether every size is on the disk, and every name but those of locks."""
        return all(map(_of_locks, self.pending)) and all(
            len(file.sizes) < 2 for file in self.files.values()
        )

    def newest(self) -> dict[str, int]:
        """Path -> number of everything, as processes see it."""
        names = dict(self.names)
        for operation in self.pending:
            _apply(names, operation)
        return self._paths(names)

    def cut(self, choice: Choice) -> Image:
        """One image that a power cut may leave."""
        names = dict(self.names)
        for operation in self.pending:
            if choice.happened(operation):
                _apply(names, operation)
        paths = self._paths(names)
        files = {
            path: (number, self._content(self.files[number], path.rpartition("/")[2], choice))
            for path, number in paths.items()
            if number in self.files
        }
        return Image(files, sorted(path for path in paths if paths[path] in self.folders))

    def _content(self, file: File, role: str, choice: Choice) -> bytes:
        data = bytearray(file.data)
        for number, older in file.older.items():
            at = number * PAGE
            newest = bytes(data[at : at + PAGE])
            data[at : at + PAGE] = choice.page(role, number, [*older, newest])
        size = file.sizes[0] if len(file.sizes) == 1 else choice.size(role, file.sizes)
        return bytes(data[:size]).ljust(size, b"\0")

    def _paths(self, names: Mapping[Name, int]) -> dict[str, int]:
        below: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in names.items():
            below.setdefault(folder, []).append((name, number))

        def walk(folder: int, before: str) -> Iterator[tuple[str, int]]:
            for name, number in sorted(below.get(folder, [])):
                yield before + name, number
                if number in self.folders:
                    yield from walk(number, f"{before}{name}/")

        return dict(walk(self.root, ""))


@dataclass(frozen=True)
class Image:
    """What is on the disk when the machine starts again."""

    files: dict[str, tuple[int, bytes]]
    """Path -> number and content."""
    folders: list[str]

    def disk(self, root: int) -> Disk:
        """As the disk that the next processes find: all of it is there for certain."""
        disk = Disk(root)
        numbers = {"": root}
        for path in self.folders:
            numbers[path] = -1 - len(numbers)
            disk.folders.add(numbers[path])
        for path, (number, data) in self.files.items():
            numbers[path] = number
            disk.files[number] = File(bytearray(_padded(data)), {}, [len(data)])
        for path in [*self.folders, *self.files]:
            folder, _, name = path.rpartition("/")
            disk.names[numbers[folder], name] = numbers[path]
        return disk


def torn(one: bytes, other: bytes, sectors: int) -> bytes:
    """The first sectors of one version, the rest of another."""
    return one[: sectors * SECTOR] + other[sectors * SECTOR :]


def differing(one: bytes, other: bytes) -> Iterable[int]:
    """Numbers of the pages in which two contents differ."""
    if one == other:
        return []
    return [
        at // PAGE
        for at in range(0, max(len(one), len(other)), PAGE)
        if one[at : at + PAGE] != other[at : at + PAGE]
    ]


def _of_locks(operation: Mapping[Name, int | None]) -> bool:
    return all(name == "procs" or name.endswith(".lock") for _, name in operation)


def _apply(names: dict[Name, int], operation: Mapping[Name, int | None]) -> None:
    for name, number in operation.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // PAGE) * PAGE, b"\0")
