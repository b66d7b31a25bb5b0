"""A model of a disk: the states in which a power cut may leave files and directories.

The kernel may write a page to the disk at any time. After a power cut, the page therefore has any
version since its last sync. A sync of a file stores the current versions of its pages, and its
size. A sync of a directory stores the changes of names (created, moved, removed) in it. Of the
changes since the last sync any part may be on the disk, but a rename is never split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PAGE = 4096
SECTOR = 512

#: A name: the number of the directory, and the name in it.
Name = tuple[int, str]


@dataclass
class File:
    """The newest content of a file, and older content that may be on the disk instead."""

    data: bytearray = field(default_factory=bytearray)
    older: dict[int, list[bytes]] = field(default_factory=dict)
    """For pages that changed since the last sync, all versions since then."""
    sizes: list[int] = field(default_factory=list)
    """All sizes since the last sync, the newest last."""

    def store(self, number: int, page: bytes) -> None:
        """Stores new content in a page."""
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
    """Chooses one of the possible states of the disk."""

    def page(self, role: str, number: int, versions: list[bytes]) -> bytes:
        """Chooses a version, of which the oldest comes first, or tears two versions at a sector."""

    def size(self, role: str, sizes: list[int]) -> int:
        """Chooses a size, of which the oldest comes first."""

    def happened(self, operation: Mapping[Name, int | None]) -> bool:
        """True if a change of names is on the disk."""


@dataclass
class Disk:
    """Files and directories by number, with their present state and what may be on the disk."""

    root: int
    files: dict[int, File] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    names: dict[Name, int] = field(default_factory=dict)
    """Names that are certainly on the disk."""
    pending: list[dict[Name, int | None]] = field(default_factory=list)
    """Changes of names since the last sync, each of which happens as a whole."""

    def sync(self, number: int) -> None:
        """Syncs a file, or the names in a directory."""
        if number in self.files:
            self.files[number].sync()
            return
        changed = {name for operation in self.pending for name in operation if name[0] == number}
        kept = []
        for operation in reversed(self.pending):  # earlier changes of the same names are included
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
        """True if all sizes are on the disk, and all names except those of locks."""
        return all(map(_of_locks, self.pending)) and all(
            len(file.sizes) < 2 for file in self.files.values()
        )

    def newest(self) -> dict[str, int]:
        """Returns the number of every path, as processes see it."""
        names = dict(self.names)
        for operation in self.pending:
            _apply(names, operation)
        return self._paths(names)

    def cut(self, choice: Choice) -> Image:
        """Returns an image that a power cut may leave."""
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
    """The content of the disk when the machine starts again."""

    files: dict[str, tuple[int, bytes]]
    """The number and content of each path."""
    folders: list[str]

    def disk(self, root: int) -> Disk:
        """Returns the disk that the next processes find, on which all of this is synced."""
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
    """Joins the first sectors of one version with the rest of another one."""
    return one[: sectors * SECTOR] + other[sectors * SECTOR :]


def differing(one: bytes, other: bytes) -> Iterable[int]:
    """Yields the numbers of the pages in which two contents differ."""
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
