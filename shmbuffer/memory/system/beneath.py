"""Opens paths below a directory component by component, without following links.

    root ──openat "next", O_NOFOLLOW──▶ fd ──openat ...──▶ fd of the directory with the file

O_NOFOLLOW applies only to the last component of a path. In the other components, the kernel would
follow links if the whole path were passed in one call. This user must own each directory on the
path, unless the root belongs to another user and is only read.
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
"""Name of the subdirectory whose mode decides whether the group can read new files.

shmbuffer creates this subdirectory as private, so its owner must have made it readable for the
group intentionally. A directory that the user created is often readable unintentionally.
"""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def leads_down(name: str) -> bool:
    """True if a name is a relative path that cannot leave its directory through "..".

    Names with ".", empty components or NUL are rejected, too, so that each file has only one name.
    """
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def parts(name: str, root: Path) -> list[str]:
    """Splits a file name into its components.

    Raises:
        UnsafePathError: The name does not lead to a path below ``root``.
    """
    if not leads_down(name):
        raise UnsafePathError(
            f"{root}: {name!r} is not a valid name of a file in this directory; pass a relative"
            " path without NUL and without the components '.', '..' and ''",
            path=root,
            name=name,
        )
    return name.split("/")


@contextmanager
def walk(
    root: int, where: Path, folders: list[str], *, make: int | None = None, foreign: bool = False
) -> Iterator[int]:
    """Opens a directory below ``root`` and yields its descriptor, which is closed afterwards.

    Args:
        root: Descriptor of the directory where the path begins.
        where: Path of ``root``, for error messages.
        folders: Components of the path below ``root``. If it is empty, ``root`` is yielded.
        make: Mode with which missing directories are created, or None to create none.
        foreign: Whether the root belongs to another user and is only read. If not, this user must
            own all directories of the path.
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
    """Returns the mode of new files and the mode of new directories below ``root``.

    ``root`` is a descriptor, and ``where`` is its path. The group can read new files if it can read
    the subdirectory `PRIVATE`.
    """
    with explain_errors(where / PRIVATE, wanted="a directory"):
        try:
            found = os.stat(PRIVATE, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            return 0o600, 0o700
    group_reads = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IRGRP
    return (0o640, 0o750) if group_reads else (0o600, 0o700)


def make_with_parents(where: Path) -> bool:
    """Creates a directory of mode 0700 and the missing directories above it.

    The directories above it get the default mode that the umask gives them. They are synced if the
    file system supports it. Without this, the directory could be lost in a power cut together with
    the synced files in it.

    Returns:
        True if the directory was created, False if it existed already.
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
    """Creates a directory of mode 0700 in the system's temporary directory and returns its path.

    Its name is ``prefix`` and eight random hexadecimal digits.
    """
    while True:
        path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(4)}").absolute()
        if make_folder(path, 0o700):
            return path


def remove_if_empty(where: Path) -> bool:
    """Removes a directory if it is empty. Returns False if it could not be removed."""
    with suppress(OSError):
        where.rmdir()
        _core.reached("folder.removed")
        return True
    return False


def make_folder(name: str | Path, mode: int, *, dir_fd: int | None = None) -> bool:
    """Creates a directory with exactly the permissions ``mode``, whatever the umask.

    The directory is setgid if its parent is. Returns False if the directory existed already.
    """
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    _core.reached("folder.made")
    # The umask may have removed the owner's permission to read the directory. Opening it for fchmod
    # would need this permission, but opening it with O_PATH does not.
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # FileNotFoundError: another process has removed the new directory
    with suppress(FileNotFoundError), _core.Descriptor() as made:
        fd = made.take(os.open, name, flags, dir_fd=dir_fd)
        found = os.fstat(fd).st_mode
        if found & 0o777 != mode & 0o777:
            os.chmod(f"/proc/self/fd/{fd}", (mode & 0o777) | (found & stat.S_ISGID))
            _core.reached("folder.mode")
    return True


def _sync_if_possible(folder: Path) -> None:
    """Syncs the entries of a directory, unless it cannot be opened or synced."""
    with suppress(OSError), _core.Descriptor() as opened:
        os.fsync(opened.take(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
