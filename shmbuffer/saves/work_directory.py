"""The directory that a save is written into before it is published; see `publication`.

    owner           locked for as long as the process that saves is alive; holds its pid
    checkpoint/     the directory that is going to be published
    earlier/        the save that is replaced, where two directories cannot be exchanged in one step

If its owner dies, the next process that saves or loads takes the lock, moves the earlier save back
if nothing has its place, and removes the rest.

Always true
  1. A work directory is reached through a descriptor, and so is all that is in it: no link is
     followed, also where others can exchange names beside it.
  2. It belongs to this user and is 0700; another user's is ignored.
  3. `owner` is a regular file of this user with one name. Nothing is truncated.
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
"""The directory that is going to be published."""

OLD = "earlier"
"""The save that is replaced, where two directories cannot be exchanged in one step."""

_OWNER = "owner"
_PID_BYTES = 20


class Work:
    """A work directory, held open, and locked by its owner for as long as that lives."""

    directory: Directory

    def __init__(self, above: Directory, name: str, *, make: bool = True) -> None:
        self.above, self.name = above, name
        self.mine, self.pid, self._file = False, "", Lock()
        while not self._opens(make):
            self.close()  # another process swept it meanwhile

    def _opens(self, make: bool) -> bool:
        """Opens and locks the directory, unless another process has; False if it was removed."""
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
                if made:  # but not locked: no other process has written to it
                    self.above.unlink(f"{self.name}/{_OWNER}")
            with suppress(OSError, ShmBufferError):
                if make:
                    self.above.rmdir(self.name)  # only if it is empty
            raise

    def _is_anothers(self) -> bool:
        """Tries to lock the directory; True if another process has the lock."""
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
        """The path, for messages."""
        return self.above.path / self.name

    @property
    def way(self) -> Path:
        """The new directory, as a path of this process that no renaming can divert."""
        return Path(f"/proc/self/fd/{self.directory.file.fd}/{NEW}")

    def make_new(self) -> None:
        """Makes the empty directory that is going to be published."""
        with self.named():
            make_folder(self.way, exist_ok=False)
        _core.reached("save.new")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Replaces the path of a descriptor by the real one in errors of the block."""

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
        """Removes the directory, and the lock last; after a death the next save removes it."""
        with suppress(OSError, ShmBufferError):
            if self.mine:
                self._restore()
                for name in (NEW, OLD):
                    remove_tree(self.directory, name)
                _core.reached("save.emptied")
                if not self.directory.exists(NEW):  # else the next process that saves tries again
                    self.directory.unlink(_OWNER)
                    self.above.rmdir(self.name)
        self.close()

    def _restore(self) -> None:
        """Moves the earlier save back, if nothing has its place."""
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
    """Returns the path by which other processes reach the directory that `publish` yielded."""
    return Path(os.readlink(way.parent)) / way.name


def make_folder_of(path: Path) -> None:
    """Makes the directory that a save is put into.

    Within a work directory, only the process that saves there makes one, because the other save
    contains this one and may already be gone.
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
    """Removes work directories of this user beside ``name`` whose owners are dead."""
    pattern = re.compile(re.escape(f".{name}.") + ".*" + re.escape(MARK), re.DOTALL)
    with suppress(ReadOnlyError):  # of a directory that may not be listed
        for each in above.listdir():
            if pattern.fullmatch(each):
                sweep_one(above, each)


def sweep_one(above: Directory, name: str) -> None:
    """Removes a work directory of this user whose owner is dead."""
    with suppress(OSError, ShmBufferError):  # not there; or not ours to remove
        if above.exists(f"{name}/{_OWNER}"):
            Work(above, name, make=False).leave()
        else:
            above.rmdir(name)  # died before it was locked: nothing is in it


@contextmanager
def located(where: Path) -> Iterator[None]:
    """Adds the path to an OSError, which lacks it for operations on a descriptor."""
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
    """Returns the error for a directory that the process ``pid`` is saving into."""
    return BufferInUseError(
        f"{path}: process {pid or '?'} is saving to this directory; wait until it has finished, "
        "or save to another directory",
        pids=[int(pid)] if is_number(pid) else [],
    )
