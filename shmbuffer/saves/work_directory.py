"""The directory to which a save is written before it is published; see `publication`.

    owner           locked while the process that saves is alive; contains its pid
    checkpoint/     the directory that will be published
    earlier/        the replaced save, if two directories cannot be exchanged atomically

If the owner dies, the next process that saves or loads acquires the lock. It moves the earlier save
back if the path of the save is free, and removes the work directory.

Invariants:
  1. A work directory and its contents are accessed through a descriptor. No link is followed, even
     if other users can rename files next to the directory.
  2. A work directory belongs to this user and has mode 0700. Those of other users are ignored.
  3. `owner` is a regular file of this user with a single link. It is never truncated.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferInUseError,
    BufferNotFoundError,
    BufferUnlinkedError,
    ReadOnlyError,
    ShmBufferError,
)
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.format.key_names import is_number
from shmbuffer.memory.system.filesystem import too_large
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.progress import is_from_callback
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.safe_files import make_folder, make_folders, remove_tree

MARK = ".shmbuffer-save"
"""The suffix of the names of work directories."""

NEW = "checkpoint"
"""The name of the directory that will be published."""

OLD = "earlier"
"""The name of the replaced save, if two directories cannot be exchanged atomically."""

_OWNER = "owner"
_PID_BYTES = 20


class Work:
    """A work directory, which is open and locked while its owner is alive.

    Args:
        above: The directory that contains the work directory.
        name: The name of the work directory.
        make: True to create the directory, False to open an existing one.

    Attributes:
        mine: True if this process holds the lock.
        pid: The pid of the process that holds the lock.
    """

    directory: Directory

    def __init__(self, above: Directory, name: str, *, make: bool = True) -> None:
        self.above, self.name = above, name
        self.mine, self.pid, self._file = False, "", Lock()
        while not self._open(make):
            self.close()  # another process has removed the directory: try again

    def _open(self, make: bool) -> bool:
        """Opens the directory, and locks it unless another process has locked it.

        Returns False if another process has removed the directory during this call.
        """
        made = False
        try:
            made = make and self.above.make(self.name, mode=0o700)
            _core.reached("save.work")
            try:
                self.directory = self.above.folder(self.name)
                self.directory.open_lock(_OWNER, into=self._file)
                _core.reached("save.owner")
            except (BufferNotFoundError, BufferUnlinkedError):
                if make:
                    return False
                raise
            free = self.directory.free_bytes
            with explain_errors(self.path / _OWNER, needed=_PID_BYTES, free=free):
                if self._is_locked_elsewhere():
                    return True
                if os.fstat(self._file.fd).st_nlink == 0:
                    return False
                self.mine = True
                self._sign()
            return True
        except BaseException:
            self.leave()
            with suppress(OSError, ShmBufferError):
                if made:  # this process has created the directory, so the file is its own
                    self.above.unlink(f"{self.name}/{_OWNER}")
            with suppress(OSError, ShmBufferError):
                if make:
                    self.above.rmdir(self.name)  # succeeds only if the directory is empty
            raise

    def _is_locked_elsewhere(self) -> bool:
        """Tries to lock the directory. Returns True if another process holds the lock."""
        try:
            fcntl.flock(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.pid = os.pread(self._file.fd, _PID_BYTES, 0).decode(errors="replace").strip()
            return True
        return False

    def _sign(self) -> None:
        """Stores the pid of this process in `owner`, for messages of other processes."""
        self.pid = str(os.getpid())
        os.pwrite(self._file.fd, self.pid.ljust(_PID_BYTES).encode(), 0)
        _core.reached("save.owned")

    @property
    def path(self) -> Path:
        """The path of the work directory, for messages."""
        return self.above.path / self.name

    @property
    def new_path(self) -> Path:
        """The path of the directory that will be published, through the open descriptor.

        The path is valid only in this process, and renames of directories above do not change it.
        """
        return Path(f"/proc/self/fd/{self.directory.file.fd}/{NEW}")

    def make_new(self) -> None:
        """Creates the directory that will be published."""
        with self.real_paths_in_errors():
            make_folder(self.new_path, exist_ok=False)
        _core.reached("save.new")

    @contextmanager
    def real_paths_in_errors(self) -> Iterator[None]:
        """Replaces `new_path` by the real path in errors that the ``with`` block raises."""

        def named(text: Any) -> Any:
            if not isinstance(text, str | Path):
                return text
            return type(text)(str(text).replace(str(self.new_path), str(self.path / NEW)))

        try:
            yield
        except ShmBufferError as error:
            error.message = named(error.message)
            error.parts = {name: named(part) for name, part in error.parts.items()}
            vars(error).update(error.parts)
            raise
        except OSError as error:
            for name in ("strerror", "filename", "filename2"):
                if (text := getattr(error, name)) is not None:
                    setattr(error, name, named(text))
            raise

    def leave(self) -> None:
        """Removes the work directory, with the lock file last, and closes it.

        If the process dies before the end, the next save removes the remaining files.
        """
        with suppress(OSError, ShmBufferError):
            if self.mine:
                self._restore()
                for name in (NEW, OLD):
                    remove_tree(self.directory, name)
                _core.reached("save.emptied")
                # if a file could not be removed, the lock file stays for the next process
                if not self.directory.exists(NEW):
                    self.directory.unlink(_OWNER)
                    self.above.rmdir(self.name)
        self.close()

    def _restore(self) -> None:
        """Moves the earlier save back if the path of the save is free."""
        name = self.name.removesuffix(MARK).rpartition(".")[0].removeprefix(".")
        if self.directory.exists(OLD) and not self.above.exists(name):
            self.directory.rename(OLD, name, into=self.above)

    def close(self) -> None:
        """Closes the work directory, which releases the lock."""
        self.mine = False
        self._file.close()
        if hasattr(self, "directory"):
            self.directory.close()


def real_path(new_path: Path) -> Path:
    """Returns the path by which other processes can access the directory that `publish` yields."""
    return Path(os.readlink(new_path.parent)) / new_path.name


def make_folder_of(path: Path) -> None:
    """Creates the missing directories above the path of a save.

    A save can be part of another save, whose work directory then contains ``path``. Only the
    process of the outer save creates directories there, and it may already have finished.

    Raises:
        BufferNotFoundError: The path is in a work directory that does not exist.
    """
    if not any(name.endswith(MARK) for name in path.parent.parts):
        make_folders(path.parent)
    elif not path.parent.is_dir():
        raise BufferNotFoundError(
            f"{path.parent}: does not exist; either the save operation that used it has ended, or "
            "it is not visible on this machine; save again, to a directory that is visible on all "
            "nodes",
            path=path.parent,
        )


def sweep(above: Directory, name: str) -> None:
    """Removes this user's work directories for saves to ``above/name`` whose owners are dead."""
    pattern = re.compile(re.escape(f".{name}.") + ".*" + re.escape(MARK), re.DOTALL)
    with suppress(ReadOnlyError):  # raised if the directory may not be listed
        for each in above.listdir():
            if pattern.fullmatch(each):
                sweep_one(above, each)


def sweep_one(above: Directory, name: str) -> None:
    """Removes a work directory, if it belongs to this user and its owner is dead."""
    with suppress(OSError, ShmBufferError):  # the directory is gone, or belongs to another user
        if above.exists(f"{name}/{_OWNER}"):
            Work(above, name, make=False).leave()
        else:
            above.rmdir(name)  # the owner died before the lock, so the directory is empty


@contextmanager
def located(where: Path) -> Iterator[None]:
    """Adds a path to an OSError that has none, as operations on descriptors raise them."""
    try:
        yield
    except ShmBufferError:
        raise
    except OSError as error:
        if error.errno is None or error.filename is not None or is_from_callback(error):
            raise
        if error.errno == errno.EFBIG:
            raise too_large(where) from error
        raise OSError(error.errno, error.strerror, str(where)) from error


def in_use(path: Path, pid: str = "") -> BufferInUseError:
    """Returns the error for a path to which the process ``pid`` is saving; "" if unknown."""
    return BufferInUseError(
        f"{path}: process {pid or '?'} is saving to this directory; wait until it has finished, "
        "or save to another directory",
        pids=[int(pid)] if is_number(pid) else [],
    )
