"""Walks from a directory to a name, component by component, and never follows a link.

    root ──openat "next", O_NOFOLLOW──▶ fd ──openat ...──▶ fd of the directory that holds the file

If a path of several components is passed to the kernel at once, the kernel follows every link on
the way, and O_NOFOLLOW protects only the last component. This user must own each directory on the
way, unless the root belongs to another user and is only read.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import UnsafePathError
from shmbuffer.memory.system.path_checks import explain_errors, require_own_directory

PRIVATE = ".shmbuffer"
"""The directory whose mode decides whether the group may read new files.

Only its owner changes that mode. A directory that the user created is often readable by the group
unintentionally.
"""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def leads_down(name: str) -> bool:
    """True if a name is a relative path that stays below its directory, without "..".

    ".", empty components and NUL are refused too, so that no two names lead to the same file.
    """
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def parts(name: str, root: Path) -> list[str]:
    """Splits a name; raises UnsafePathError if it does not lead to a path below ``root``."""
    if not leads_down(name):
        raise UnsafePathError(
            f"{root}: {name!r} is not the name of a file in this directory; pass a relative name"
            " without '.', '..', NUL and empty components",
            path=root,
            name=name,
        )
    return name.split("/")


@contextmanager
def walk(
    root: int, where: Path, folders: list[str], *, make: int | None = None, foreign: bool = False
) -> Iterator[int]:
    """Yields the descriptor of a directory below ``root``, which is open and located at ``where``.

    Missing directories are created with the mode ``make``, unless it is None. ``foreign``: the root
    belongs to another user, and is only read.
    """
    with _core.Descriptor() as reached:
        fd = root
        for folder in folders:
            where /= folder
            with explain_errors(where, wanted="a directory", reading=foreign):
                if make is not None:
                    make_folder(folder, make, dir_fd=fd)
                fd = reached.take(os.open, folder, FOLDER, dir_fd=fd)
                if not foreign:
                    require_own_directory(os.fstat(fd), where)
        yield fd


def new_modes(root: int, where: Path) -> tuple[int, int]:
    """Returns the modes of new files and directories below ``root``, which is open at ``where``."""
    with explain_errors(where / PRIVATE, wanted="a directory"):
        try:
            found = os.stat(PRIVATE, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            return 0o600, 0o700
    group_reads = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IRGRP
    return (0o640, 0o750) if group_reads else (0o600, 0o700)


def make_with_parents(where: Path) -> bool:
    """Creates a directory; returns whether it is new. The umask applies to missing parents.

    Parents are synced if possible. Otherwise a power cut could remove the directory together with
    the synced files in it.
    """
    missing = [folder for folder in where.parents if not folder.exists()]
    if missing:
        where.parent.mkdir(parents=True, exist_ok=True)
        _core.reached("folder.parents")
    created = make_folder(where, 0o700)
    if created:
        for folder in (where, *missing):
            _sync_if_possible(folder.parent)
    return created


def make_temporary(prefix: str) -> Path:
    """Creates a directory of mode 0700 with a random name in the temporary directory."""
    while True:
        path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(4)}").absolute()
        if make_folder(path, 0o700):
            return path


def remove_if_empty(where: Path) -> bool:
    """Removes a directory if it is empty and the user may do so; returns whether it was removed."""
    with suppress(OSError):
        where.rmdir()
        _core.reached("folder.removed")
        return True
    return False


def make_folder(name: str | Path, mode: int, *, dir_fd: int | None = None) -> bool:
    """Creates a directory with exactly this mode (setgid if its parent is); false if it exists."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    _core.reached("folder.made")
    # The umask may have removed our own permission to open the directory, which fchmod needs.
    # O_PATH does not need it.
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # another process may have removed it
    with suppress(FileNotFoundError), _core.Descriptor() as made:
        fd = made.take(os.open, name, flags, dir_fd=dir_fd)
        found = os.fstat(fd).st_mode
        if found & 0o777 != mode & 0o777:
            os.chmod(f"/proc/self/fd/{fd}", (mode & 0o777) | (found & stat.S_ISGID))
            _core.reached("folder.mode")
    return True


def _sync_if_possible(folder: Path) -> None:
    with suppress(OSError), _core.Descriptor() as opened:
        os.fsync(opened.take(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
