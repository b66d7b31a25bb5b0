"""Checks which paths may be opened, and explains the errors of the others.

This user must own the directory, and other users may not write to it. Files must be regular, have
one name and belong to this user. Directories that are opened only for reading may belong to another
user, and so may their files. All other errors of the kernel are converted to errors that say where
they happened and what to do.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shmbuffer.errors import (
    BufferExistsError,
    BufferNotFoundError,
    CorruptBufferError,
    DurabilityError,
    ReadOnlyError,
    ShmBufferError,
    UnsafePathError,
)
from shmbuffer.memory.system.filesystem import space_error
from shmbuffer.memory.system.progress import is_from_callback

_SHARED = stat.S_ISVTX | stat.S_IWOTH
_LINKS = 40  # the kernel's own limit
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

_CHOOSE_ANOTHER = "choose a directory where you may write, or change its permissions"
_ASK_OWNER = (
    "read it as its owner or as root, or ask its owner to let your group read: `chmod -R g+rX`"
)


def require_own_directory(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError if another user owns the directory, or all users may write to it."""
    # The group may write because umask 002 creates such directories, with the user's own group.
    require_owner(found, where)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafePathError(
            f"{where}: all users can write to this directory (mode"
            f" {stat.S_IMODE(found.st_mode):#o}), so files could be replaced; run"
            f" `chmod o-w {where}`, or choose a directory below it",
            path=where,
            mode=stat.S_IMODE(found.st_mode),
        )


def require_regular_file(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless the file is regular. It may have any owner."""
    if not stat.S_ISREG(found.st_mode):
        raise _another_kind(where, "a regular file")


def require_one_name(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless the file is regular and has one name. It may have any owner."""
    require_regular_file(found, where)
    if found.st_nlink != 1:
        raise UnsafePathError(
            f"{where}: the file has {found.st_nlink} names (hard links), as after `cp -al`, so"
            " a copy of the directory would change with it; remove the other name, which"
            f" `find {_mount_of(where)} -xdev -samefile {where}` finds, and copy with `cp -r`",
            path=where,
            links=found.st_nlink,
        )


def require_own_file(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless the file is regular, has one name and belongs to this user."""
    require_one_name(found, where)
    require_owner(found, where)


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Resolves a path; raises UnsafePathError if its last part is a link of an untrusted user.

    As with fs.protected_symlinks, links in a sticky directory are followed if they belong to this
    user, root or the owner of the directory. Do not resolve the result again, because a link may
    have appeared there.
    """
    where = Path(path).absolute()
    for _ in range(_LINKS):
        where = Path(os.path.normpath(os.path.join(os.path.realpath(where.parent), where.name)))
        try:
            found, folder = os.lstat(where), os.stat(where.parent)
        except OSError:  # it does not exist, or is not visible
            break
        if not stat.S_ISLNK(found.st_mode):
            break
        trusted = (os.geteuid(), 0, folder.st_uid)
        if folder.st_mode & _SHARED == _SHARED and found.st_uid not in trusted:
            raise UnsafePathError(
                f"{where}: this is a link of uid {found.st_uid} in a directory where all users can"
                " write, so it was not followed; pass the path that it leads to, or another path",
                path=where,
                uid=found.st_uid,
            )
        where = where.parent / os.readlink(where)
    return where


@contextmanager
def explain_errors(
    where: Path,
    *,
    wanted: str = "a regular file",
    needed: int = 0,
    free: Callable[[], int] | None = None,
    reading: bool = False,
) -> Iterator[None]:
    """Converts an OSError of the body to the corresponding error of this package.

    Args:
        where: The file or directory that the body opens, creates or changes.
        wanted: The expected kind of file.
        needed: The bytes that the body allocates.
        free: Returns the free bytes. None uses the free bytes of the file system at ``where``.
        reading: The directory belongs to another user, and is only read.
    """
    try:
        yield
    except ShmBufferError:
        raise
    except OSError as error:
        if is_from_callback(error):
            raise
        meaning: ShmBufferError
        match error.errno:
            case errno.ENOENT:
                meaning = _not_found(where)
            case errno.EEXIST:
                meaning = BufferExistsError(
                    f"{where}: already exists; remove it, or choose another name", path=where
                )
            case errno.EROFS | errno.EACCES | errno.EPERM:
                advice = _ASK_OWNER if reading else _CHOOSE_ANOTHER
                meaning = ReadOnlyError(
                    f"{where}: {os.strerror(error.errno).lower()}{_whose(where)}; {advice}",
                    path=where,
                )
            case errno.ELOOP | errno.ENOTDIR | errno.EISDIR | errno.ENXIO:
                meaning = _another_kind(where, wanted)
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                meaning = space_error(where, needed, free, why=error.errno)
            case errno.ENOMEM if needed:
                meaning = space_error(where, needed, free, why=error.errno)
            # the system's message names no path for a descriptor, and only the last part of a name
            case _:
                what = str(error.strerror)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    what += ": close some, or raise `ulimit -n`"
                raise OSError(error.errno, what, str(where)) from error
        try:
            raise meaning from error
        finally:
            del meaning  # a frame that keeps its exception would keep itself and its callers alive


def wrong_size(where: Path, expected: str, limit: int, found: int) -> CorruptBufferError:
    """Returns the error for a file whose size was changed by something else than this package."""
    return CorruptBufferError(
        f"{where}: the file has {found} bytes instead of {expected}, because something outside of"
        " shmbuffer changed it; restore it from a copy, or remove the buffer",
        path=where,
        expected=limit,
        found=found,
    )


def not_durable(where: str, error: OSError) -> DurabilityError:
    """Returns the error for a failed sync."""
    return DurabilityError(
        f"{where}: could not be written to the disk ({error.strerror}); the data in memory are"
        " usable, but may be lost in a power cut: save a copy on another disk",
        path=where,
        errno=error.errno,
    )


def name_of(fd: int) -> str:
    """Returns the current path of an open file, or its number if the path is unknown."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"


def require_owner(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless this user owns the file or directory."""
    if found.st_uid != os.geteuid():
        raise UnsafePathError(
            f"{where}: belongs to uid {found.st_uid}, but this process runs as uid {os.geteuid()};"
            " use a directory of your own, or run as its owner",
            path=where,
            uid=found.st_uid,
        )


def _mount_of(where: Path) -> Path:
    """Returns the root of the file system, which a hard link cannot leave."""
    return next((folder for folder in where.parents if folder.is_mount()), Path("/"))


def _whose(where: Path) -> str:
    """Describes the owner of a path if it is another user; otherwise ""."""
    try:
        found = os.lstat(where).st_uid
    except OSError:
        return ""
    me = os.geteuid()
    return "" if found == me else f": it belongs to uid {found}, and this process runs as uid {me}"


def _not_found(where: Path) -> BufferNotFoundError:
    return BufferNotFoundError(
        f"{where}: does not exist; check the path, or create the buffer first", path=where
    )


def _another_kind(where: Path, wanted: str) -> UnsafePathError:
    """Returns the error for a path that leads to another kind of file."""
    try:
        found = _KINDS[stat.S_IFMT(os.lstat(where).st_mode)]
    except (OSError, KeyError):
        found = "something below a file"
    return UnsafePathError(
        f"{where}: this is {found}, but {wanted} was expected, so it was not opened; move it away,"
        " or choose another path",
        path=where,
        wanted=wanted,
        found=found,
    )
