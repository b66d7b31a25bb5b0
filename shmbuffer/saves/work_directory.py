"""The directory to which a save is written before it is published; see `publication`.

    owner           locked while the process that saves is alive; contains its pid
    checkpoint/     the directory that will be published
    earlier/        the replaced save, if two directories cannot be exchanged atomically

If the owner dies, the next process that saves or loads acquires the lock. It moves the earlier save
back if its path is free, and removes the rest.

Invariants:
  1. A work directory and its contents are accessed through a descriptor. No link is followed, even
     if other users can rename files next to the directory.
  2. It belongs to this user and has mode 0700. Those of other users are ignored.
  3. `owner` is a regular file of this user with a single link. Nothing is truncated.
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
"""The directory that will be published."""

OLD = "earlier"
"""The replaced save, if two directories cannot be exchanged atomically."""

_OWNER = "owner"
_PID_BYTES = 20


class Work:
    """A work directory that is held open and locked while its owner is alive."""

    directory: Directory

    def __init__(self, above: Directory, name: str, *, make: bool = True) -> None:
        self.above, self.name = above, name
        self.mine, self.pid, self._file = False, "", Lock()
        while not self._opens(make):
            self.close()  # another process has removed it in the meantime

    def _opens(self, make: bool) -> bool:
        """Opens and locks the directory if it is not locked; returns False if it was removed."""
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
                if self._is_anothers():
                    return True
                if os.fstat(self._file.fd).st_nlink == 0:
                    return False
                self.mine = True
                self._sign()
            return True
        except BaseException:
            self.leave()
            with suppress(OSError, ShmBufferError):
                if made:  # created but not locked, so no other process has written to it
                    self.above.unlink(f"{self.name}/{_OWNER}")
            with suppress(OSError, ShmBufferError):
                if make:
                    self.above.rmdir(self.name)  # succeeds only if it is empty
            raise

    def _is_anothers(self) -> bool:
        """Tries to lock the directory; returns True if another process holds the lock."""
        try:
            fcntl.flock(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.pid = os.pread(self._file.fd, _PID_BYTES, 0).decode(errors="replace").strip()
            return True
        return False

    def _sign(self) -> None:
        self.pid = str(os.getpid())
        os.pwrite(self._file.fd, self.pid.ljust(_PID_BYTES).encode(), 0)
        _core.reached("save.owned")

    @property
    def path(self) -> Path:
        """The path of the directory, for messages."""
        return self.above.path / self.name

    @property
    def way(self) -> Path:
        """The path of the new directory in this process, which is immune to renames."""
        return Path(f"/proc/self/fd/{self.directory.file.fd}/{NEW}")

    def make_new(self) -> None:
        """Makes the empty directory that will be published."""
        with self.named():
            make_folder(self.way, exist_ok=False)
        _core.reached("save.new")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Replaces paths of descriptors with real paths in errors of the block."""

        def named(text: Any) -> Any:
            if not isinstance(text, str | Path):
                return text
            return type(text)(str(text).replace(str(self.way), str(self.path / NEW)))

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
        """Removes the directory, with the lock last.

        If the process dies before the end, the next save removes the rest.
        """
        with suppress(OSError, ShmBufferError):
            if self.mine:
                self._restore()
                for name in (NEW, OLD):
                    remove_tree(self.directory, name)
                _core.reached("save.emptied")
                # Otherwise the next process that saves tries again.
                if not self.directory.exists(NEW):
                    self.directory.unlink(_OWNER)
                    self.above.rmdir(self.name)
        self.close()

    def _restore(self) -> None:
        """Moves the earlier save back if its path is free."""
        name = self.name.removesuffix(MARK).rpartition(".")[0].removeprefix(".")
        if self.directory.exists(OLD) and not self.above.exists(name):
            self.directory.rename(OLD, name, into=self.above)

    def close(self) -> None:
        """Closes the directory, which releases the lock."""
        self.mine = False
        self._file.close()
        if hasattr(self, "directory"):
            self.directory.close()


def shared_way(way: Path) -> Path:
    """Returns the path under which other processes access a directory that `publish` yielded."""
    return Path(os.readlink(way.parent)) / way.name


def make_folder_of(path: Path) -> None:
    """Makes the directory for a save.

    Within a work directory, only the process that saves there may create it. The outer save
    contains this one and may already have ended.
    """
    if not any(name.endswith(MARK) for name in path.parent.parts):
        make_folders(path.parent)
    elif not path.parent.is_dir():
        raise BufferNotFoundError(
            f"{path.parent}: does not exist, because the save that it belongs to has ended, or "
            "this machine does not see its directory; save again, to a directory that all nodes "
            "see",
            path=path.parent,
        )


def sweep(above: Directory, name: str) -> None:
    """Removes this user's work directories for ``name`` whose owners are dead."""
    pattern = re.compile(re.escape(f".{name}.") + ".*" + re.escape(MARK), re.DOTALL)
    with suppress(ReadOnlyError):  # raised if the directory may not be listed
        for each in above.listdir():
            if pattern.fullmatch(each):
                sweep_one(above, each)


def sweep_one(above: Directory, name: str) -> None:
    """Removes a work directory of this user whose owner is dead."""
    with suppress(OSError, ShmBufferError):  # it does not exist, or this user may not remove it
        if above.exists(f"{name}/{_OWNER}"):
            Work(above, name, make=False).leave()
        else:
            above.rmdir(name)  # the owner died before the lock, so the directory is empty


@contextmanager
def located(where: Path) -> Iterator[None]:
    """Adds the path to an OSError; operations on a descriptor do not set it."""
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
    """Returns the error for a directory to which the process ``pid`` is saving."""
    return BufferInUseError(
        f"{path}: process {pid or '?'} is saving to this directory; wait until it has finished, "
        "or save to another directory",
        pids=[int(pid)] if is_number(pid) else [],
    )
