"""Creates, reads and removes the files of saves, exports and data sets.

    create_file, write_file                              new files; existing ones are never changed
    make_folder, make_folders, make_folders_below        missing directories
    exists, open_file, open_binary, read_file            files that other programs may have created
    require_plain, require_own_content                   checks before a library reads these files
    remove_file, remove_tree                             files that this package has created
    temporary_folder, unnamed_file                       files that are removed when they are closed

Modules above `memory.system` create, replace and remove files only through these functions,
`publication` and `memory.system.region.Directory`. `tests/test_file_access.py` reads the sources
and rejects any other way.

Invariants:
  1. The last component of a path is not followed if it is a link. Existing files are not changed.
  2. Only regular files are opened. A FIFO or a device is rejected immediately, without waiting.
  3. Users other than the owner and the group cannot write to the created files, regardless of the
     umask.
  4. A tree is removed below a directory that is held open, so that no link leads out of it.
If the process dies here, a file may be incomplete. `publication` ensures that no reader sees it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError, UnsafePathError
from shmbuffer.memory.system.beneath import remove_if_empty
from shmbuffer.memory.system.path_checks import explain_errors, require_regular_file, resolve_path
from shmbuffer.memory.system.region import Directory

# without O_NONBLOCK, opening a FIFO would wait for a writer
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE, _FOLDER_MODE = 0o664, 0o775  # before the umask is applied


def create_file(path: Path) -> BinaryIO:
    """Creates a file and opens it for writing. Raises BufferExistsError if the path exists."""
    with explain_errors(path):
        return open(path, "w+b", opener=lambda name, _: os.open(name, _CREATE, _FILE_MODE))


def write_file(path: Path, content: bytes | str) -> None:
    """Creates a file with the given content. Text is encoded as UTF-8."""
    with create_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Creates a directory.

    Args:
        path: The path of the directory.
        exist_ok: If True, an existing directory is not an error.

    Raises:
        UnsafePathError: The path exists and is not a directory.
    """
    with explain_errors(path, wanted="a directory"):
        try:
            os.mkdir(path, _FOLDER_MODE)
        except FileExistsError:
            if not exist_ok:
                raise
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path)) from None


def make_folders_below(root: Path, file: Path) -> None:
    """Creates the directory ``root``, and the directories between it and ``file``."""
    for folder in reversed(file.relative_to(root).parents):
        make_folder(root / folder)


def make_folders(path: Path) -> None:
    """Creates a directory and its missing parents, and syncs the directories that contain them.

    A parent that this process cannot read is not synced.

    Raises:
        UnsafePathError: The path is a link that another user created in a sticky directory.
    """
    path = resolve_path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _core.reached("save.parents")
    for folder in missing:
        with suppress(PermissionError), Directory.open(folder.parent, any_owner=True) as above:
            above.sync()


@contextmanager
def without_leftover(path: Path) -> Iterator[None]:
    """Removes an empty directory if the ``with`` block has created it and raised an error."""
    existed = path.exists()
    try:
        yield
    except BaseException:
        if not existed:
            remove_if_empty(path)
        raise


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """Opens a regular file for reading and yields its descriptor.

    Raises:
        FileNotFoundError: The file does not exist.
        UnsafePathError: The path is a link, a FIFO, a device, a socket or a directory.
    """
    with _core.Descriptor() as opened:
        try:
            with explain_errors(path):
                fd = opened.take(os.open, path, READ)
                require_regular_file(os.fstat(fd), path)
        except BufferNotFoundError as error:  # its message is about buffers
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        yield fd


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading and yields it. Raises the same errors as `open_file`."""
    with open_file(path) as fd, open(fd, "rb", closefd=False) as file:
        yield file


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file. Raises the same errors as `open_file`."""
    with open_binary(path) as file:
        return file.read()


def exists(path: Path) -> bool:
    """True if the path exists, even as a link without a target."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def require_plain(path: Path) -> None:
    """Raises UnsafePathError unless a path is a regular file, or a tree of regular files.

    Call this function before you pass a path to a library that would follow links or wait for a
    FIFO.
    """
    with explain_errors(path):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            require_regular_file(os.lstat(path), path)
            return
    for name in sorted(os.listdir(path)):
        require_plain(path / name)


def require_own_content(path: Path) -> None:
    """Raises UnsafePathError if an HDF5 file refers to data in other files.

    HDF5 would read these files, even if they are private files or FIFOs that never end.
    """
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path, "r") as opened:
        groups, seen = [opened["/"]], set()
        while groups:
            group = groups.pop()
            seen.add(h5py.h5o.get_info(group.id).addr)
            for name in group:
                link = group.get(name, getlink=True)
                member = group[name] if isinstance(link, h5py.HardLink) else None
                if isinstance(member, h5py.Group):
                    if h5py.h5o.get_info(member.id).addr not in seen:
                        groups.append(member)
                elif isinstance(link, h5py.ExternalLink) or (
                    isinstance(member, h5py.Dataset) and (member.external or member.is_virtual)
                ):
                    raise UnsafePathError(
                        f"{path}: the data of {group.name.rstrip('/')}/{name} are in another "
                        "file, which was not opened; copy the data into this file (with h5repack "
                        "or h5copy)",
                        path=path,
                    )


def remove_file(path: Path) -> None:
    """Removes a file, or a link itself."""
    with explain_errors(path):
        os.unlink(path)


def remove_tree(above: Directory, name: str) -> None:
    """Removes a directory and its contents, except files that cannot be removed."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=above.file.fd)


def unnamed_file(folder: Path) -> BinaryIO:
    """Creates and opens an unnamed file on the file system that contains a directory.

    The file is removed when it is closed.
    """
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, prefix=".shmbuffer-"))


@contextmanager
def temporary_folder(above: Path | None = None) -> Iterator[Path]:
    """Yields a new directory with mode 0700, which is removed at the end of the ``with`` block.

    The directory is created in ``above``, by default in `tempfile.gettempdir`. If other processes
    are still writing files there at the end, these files may remain.
    """
    with tempfile.TemporaryDirectory("", "shmbuffer-", above, ignore_cleanup_errors=True) as path:
        yield Path(path)
