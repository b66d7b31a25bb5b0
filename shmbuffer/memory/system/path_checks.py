"""Checks whether a path is safe to open, and converts errors of the kernel to errors with advice.

This user must own the directory of a buffer, and other users must not be able to write to it. Files
must be regular files of this user with one name (hard link). A directory that is opened only for
reading, and the files in it, may belong to another user. The converted errors contain the path and
advice on how to solve the problem.
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
_LINKS = 40  # the kernel's limit for the number of links that it follows in a path
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

_CHOOSE_ANOTHER = "choose a directory where you can write, or change its permissions"
_ASK_OWNER = (
    "read it as its owner or as root, or ask its owner to let your group read: `chmod -R g+rX`"
)


def require_own_directory(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError if another user owns a directory, or if all users can write to it."""
    # Write permission for the group is accepted, because umask 002 creates directories that the
    # user's private group can write to.
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
    """Raises UnsafePathError unless the file is regular. Its owner is not checked."""
    if not stat.S_ISREG(found.st_mode):
        raise _another_kind(where, "a regular file")


def require_one_name(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless the file is regular and has exactly one name (hard link).

    The owner of the file is not checked.
    """
    require_regular_file(found, where)
    if found.st_nlink != 1:
        raise UnsafePathError(
            f"{where}: the file has {found.st_nlink} names (hard links), for example after"
            " `cp -al`, so a change of the buffer would also change the copy; find the other names"
            f" with `find {_mount_of(where)} -xdev -samefile {where}`, remove them, and copy the"
            " directory with `cp -r` instead",
            path=where,
            links=found.st_nlink,
        )


def require_own_file(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless this user owns the file and `require_one_name` accepts it."""
    require_one_name(found, where)
    require_owner(found, where)


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Resolves all symbolic links in a path and returns an absolute path.

    A link in a sticky directory that all users can write to is followed only if it belongs to this
    user, to root or to the owner of the directory. Linux has the same rule
    (``fs.protected_symlinks``). Do not resolve the result a second time, because another user may
    have created a link at this path in the meantime.

    Raises:
        UnsafePathError: The last component of the path is a link that must not be followed.
    """
    where = Path(path).absolute()
    for _ in range(_LINKS):
        where = Path(os.path.normpath(os.path.join(os.path.realpath(where.parent), where.name)))
        try:
            found, folder = os.lstat(where), os.stat(where.parent)
        except OSError:  # the path does not exist, or this user cannot see it
            break
        if not stat.S_ISLNK(found.st_mode):
            break
        trusted = (os.geteuid(), 0, folder.st_uid)
        if folder.st_mode & _SHARED == _SHARED and found.st_uid not in trusted:
            raise UnsafePathError(
                f"{where}: this is a link of uid {found.st_uid} in a directory that all users can"
                " write to, so it was not followed; pass the path that the link leads to, or"
                " another path",
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
    """Converts an OSError raised in the ``with`` block to the corresponding error of this package.

    Args:
        where: The file or directory that the block opens, creates or changes.
        wanted: The expected type of file, such as ``"a directory"``, for error messages.
        needed: Number of bytes that the block allocates.
        free: Function that returns the number of free bytes. None means the free bytes of the file
            system at ``where``.
        reading: Whether the directory belongs to another user and is only read.
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
            # The system's message has no path if the call used a descriptor, and otherwise only the
            # last component of the path.
            case _:
                what = str(error.strerror)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    what += ": close some files, or raise `ulimit -n`"
                raise OSError(error.errno, what, str(where)) from error
        try:
            raise meaning from error
        finally:
            # The exception refers to this frame through its traceback. Without `del`, this
            # reference cycle would keep the frames of all callers alive.
            del meaning


def wrong_size(where: Path, expected: str, limit: int, found: int) -> CorruptBufferError:
    """Returns the error for a file whose size another program has changed.

    Args:
        where: Path of the file.
        expected: The expected size, as text.
        limit: The expected size, or the largest one, in bytes.
        found: The size of the file in bytes.
    """
    return CorruptBufferError(
        f"{where}: the file has {found} bytes instead of {expected}, because another program"
        " changed its size; restore the file from a copy, or remove the buffer",
        path=where,
        expected=limit,
        found=found,
    )


def not_durable(where: str, error: OSError) -> DurabilityError:
    """Returns the error for a sync that failed with the system error ``error``."""
    return DurabilityError(
        f"{where}: could not be written to the disk ({error.strerror}); the data in memory are"
        " intact, but may be lost in a power cut: save a copy on another disk",
        path=where,
        errno=error.errno,
    )


def name_of(fd: int) -> str:
    """Returns the current path of an open file, or "file descriptor N" if the path is unknown."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"


def require_owner(found: os.stat_result, where: Path) -> None:
    """Raises UnsafePathError unless this user owns the file or directory ``where``."""
    if found.st_uid != os.geteuid():
        raise UnsafePathError(
            f"{where}: belongs to uid {found.st_uid}, but this process runs as uid {os.geteuid()};"
            " use a directory of your own, or run as its owner",
            path=where,
            uid=found.st_uid,
        )


def _mount_of(where: Path) -> Path:
    """Returns the mount point of the file system of a file. All its hard links are below it."""
    return next((folder for folder in where.parents if folder.is_mount()), Path("/"))


def _whose(where: Path) -> str:
    """Returns a phrase about the owner of a path if another user owns it, otherwise ""."""
    try:
        found = os.lstat(where).st_uid
    except OSError:
        return ""
    me = os.geteuid()
    return "" if found == me else f": it belongs to uid {found}, and this process runs as uid {me}"


def _not_found(where: Path) -> BufferNotFoundError:
    """Returns the error for a path that does not exist."""
    return BufferNotFoundError(
        f"{where}: does not exist; check the path, or create the buffer first", path=where
    )


def _another_kind(where: Path, wanted: str) -> UnsafePathError:
    """Returns the error for a path that does not lead to the expected type of file."""
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
