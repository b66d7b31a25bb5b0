"""Walks the files of a save below an open directory.

Links are never followed, even if another process replaces a directory by a link during the walk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shmbuffer._native import _core
from shmbuffer.errors import ShmBufferError
from shmbuffer.memory.format.layout import PAGE, PRIVATE
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.progress import Progress
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.safe_files import READ

MANIFEST = f"{PRIVATE}/files.json"
"""File in a save that lists all files of the save."""

LIST_BYTES = 2**26
"""Maximum size of a manifest in bytes."""

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


class TreeFolder(NamedTuple):
    """A directory of the tree, which stays open until `walk` continues."""

    where: Path
    """The path, for messages."""
    at: str
    """The path relative to the root; "." for the root."""
    folders: list[str]
    """The names of the subdirectories."""
    files: list[str]
    """The names of all other entries: files, links and devices."""
    fd: int
    """The descriptor of the directory."""

    def below(self, name: str) -> str:
        """Returns the path of a file or subdirectory of this directory, relative to the root."""
        return os.path.normpath(os.path.join(self.at, name))

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a file or subdirectory of this directory; of a link itself."""
        with explain_errors(self.where / name):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)


def walk(root: Directory, *, topdown: bool = True) -> Iterator[TreeFolder]:
    """Yields ``root`` and each directory below it, like `os.fwalk`.

    Raises the OSError if a directory cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    with explain_errors(root.path):
        for at, folders, names, fd in os.fwalk(
            ".", topdown, refuse, follow_symlinks=False, dir_fd=root.file.fd
        ):
            found = TreeFolder(root.path / at, os.path.normpath(at), folders, names, fd)
            links = [name for name in folders if not stat.S_ISDIR(found.stat(name).st_mode)]
            real = [name for name in folders if name not in links]
            yield found._replace(folders=real, files=[*names, *links])


def files_below(root: Directory) -> list[str]:
    """Returns the relative paths of all files below ``root``."""
    return sorted(folder.below(name) for folder in walk(root) for name in folder.files)


def read_manifest(target: Directory, what: str) -> set[str]:
    """Returns the paths of the files that the manifest of a save lists, relative to the save.

    Returns an empty set if there is no valid manifest, or if it belongs to another kind of save
    than ``what``.
    """
    try:
        found = json.loads(target.read(MANIFEST, limit=LIST_BYTES))
        return {name for name in found["files"] if is_below(name) and found["what"] == what}
    except (OSError, ShmBufferError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def is_below(name: Any) -> bool:
    """True if a path that was read from a file is relative and stays below the root."""
    return (
        isinstance(name, str)
        and name not in ("", ".")
        and name == os.path.normpath(name)
        and not name.startswith(("/", "../"))
        and name != ".."
    )


def find_foreign_file(target: Directory, what: str) -> str | None:
    """Returns the relative path of a file that is not part of an earlier save of this kind.

    A link and a directory on another device do not belong to a save either. Returns None if the
    directory contains only a save, or is empty.
    """
    listed = read_manifest(target, what)
    listed |= {MANIFEST} if listed else set()
    for folder in walk(target):
        if os.fstat(folder.fd).st_dev != target.identity[0]:
            return folder.at
        for name in folder.files:
            if folder.below(name) not in listed or stat.S_ISLNK(folder.stat(name).st_mode):
                return folder.below(name)
    return None


def exchange(folder: int, name: str, other_folder: int, other: str) -> bool:
    """Exchanges two directories atomically with renameat2(2).

    Args:
        folder: The descriptor of the directory that contains the first directory.
        name: The name of the first directory.
        other_folder: The descriptor of the directory that contains the second directory.
        other: The name of the second directory.

    Returns:
        False if the system or the file system does not support the exchange.
    """
    rename: Callable[..., int] | None = getattr(
        ctypes.CDLL(None, use_errno=True), "renameat2", None
    )
    if rename is None:
        return False
    if not rename(folder, os.fsencode(name), other_folder, os.fsencode(other), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    where = os.readlink(f"/proc/self/fd/{other_folder}")
    raise OSError(number, os.strerror(number), os.path.join(where, other))


def sync_tree(new: Directory) -> None:
    """Syncs all files of a tree, and removes the write permission of other users from them."""
    total = sum(folder.stat(name).st_size for folder in walk(new) for name in folder.files)
    # The permissions of directories come first, because a path through a directory that other users
    # can write to is rejected.
    for folder in walk(new):
        with explain_errors(folder.where):
            _close_to_others(folder.fd)
    with Progress("sync", total) as progress:
        for folder in walk(new, topdown=False):
            for name in folder.files:
                if stat.S_ISREG(folder.stat(name).st_mode):
                    with explain_errors(folder.where / name):
                        _sync_file(name, folder.fd, progress)
            new.sync(folder.at)


def close_tree(new: Directory) -> None:
    """Removes the write permission of other users from all files and directories of a tree."""
    for folder in walk(new):
        for name in folder.files:
            with explain_errors(folder.where / name), _core.Descriptor() as file:
                _close_to_others(file.take(os.open, name, READ, dir_fd=folder.fd))
        with explain_errors(folder.where):
            _close_to_others(folder.fd)


def _close_to_others(fd: int) -> None:
    """Removes the write permission of other users from an open file or directory."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IWOTH:
        os.fchmod(fd, mode & ~stat.S_IWOTH)
        _core.reached("save.closed")


def _sync_file(name: str, folder: int, progress: Progress) -> None:
    """Syncs a file. A large file is synced in pieces if progress is reported."""
    with _core.Descriptor() as file:
        fd = file.take(os.open, name, READ, dir_fd=folder)
        _close_to_others(fd)
        size = os.fstat(fd).st_size
        pieces = list(progress.cut(-(-size // PAGE), PAGE))
        if len(pieces) > 1:
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content:
                for first, count in pieces:
                    nbytes = min(count * PAGE, size - first * PAGE)
                    content.flush(first * PAGE, nbytes)  # msync(2) acts as an fsync of these bytes
                    progress.advance(nbytes)
        else:
            progress.advance(size)
        Directory.sync_file(fd)  # msync(2) does not sync the size of the file
