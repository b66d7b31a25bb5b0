"""The directory that a save is written into before it is published; see `publication`.

    owner           locked for as long as who saves is alive; holds the pid
    checkpoint/     what is going to be published
    complete.json   the save counts from now on, and has to be moved to its place

If its owner dies, whoever saves next takes the lock, and removes it or finishes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import BufferInUseError, ShmBufferError
from shmbuffer.memory.filesystem import shut, too_large
from shmbuffer.memory.progress import is_of_callback

MARK = ".shmbuffer-save"
"""The name of a work directory, or its end."""

COMPLETE = "complete.json"
"""The file that says so."""

_OWNER = "owner"
_NEW = "checkpoint"


class Work:
    """A work directory, locked by its owner for as long as he lives.

    Attributes:
        path: the directory.
        mine: whether this is its owner; False where another one lives.
        pid: of the owner, as far as is known.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self.path = path
        self.mine = False
        while True:
            if make:
                with suppress(FileExistsError):
                    path.mkdir()
                    _core.reached("save.work")
            try:
                self._fd = os.open(path / _OWNER, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
                _core.reached("save.owner")
            except FileNotFoundError:
                if make:  # swept between the two calls
                    continue
                raise
            try:
                with located(path / _OWNER):
                    if self._is_anothers():
                        if make:
                            raise in_use(path.parent, self.pid)
                        return
                    if os.fstat(self._fd).st_nlink:
                        self._sign()
                        return
            except BaseException:
                shut(self._fd)
                raise
            shut(self._fd)  # swept while we took it

    def _is_anothers(self) -> bool:
        """Lock it; whether another one has."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.pid = os.pread(self._fd, 32, 0).decode(errors="replace")
            return True
        return False

    def _sign(self) -> None:
        self.pid = str(os.getpid())
        os.truncate(self._fd, 0)
        _core.reached("save.nobody")
        os.pwrite(self._fd, self.pid.encode(), 0)
        _core.reached("save.owned")
        self.mine = True

    @property
    def new(self) -> Path:
        """What is going to be published."""
        return self.path / _NEW

    def leave(self) -> None:
        """Remove it, unless it holds a complete save that has not been moved to its place.

        The lock goes last, so that what somebody leaves who dies here is swept later.
        """
        with suppress(OSError):
            if self.mine and not is_there(self.path / COMPLETE):
                shutil.rmtree(self.new, ignore_errors=True)
                _core.reached("save.emptied")
                if not is_there(self.new):  # else whoever saves next tries again
                    (self.path / _OWNER).unlink()
                    _core.reached("save.unowned")
                    self.path.rmdir()
                    _core.reached("save.gone")
        shut(self._fd)


def sweep(path: Path) -> None:
    """Remove work directories for ``path`` whose owners are dead."""
    beside = path.parent.glob(f".{_escaped(path.name)}.*{MARK}")
    for directory in [*beside, path / MARK]:
        with suppress(OSError):  # not there; or not ours to remove
            if not is_there(directory / _OWNER):
                directory.rmdir()  # died before it was locked: nothing is in it
                _core.reached("save.swept")
                continue
            Work(directory, make=False).leave()


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def is_there(path: Path) -> bool:
    """Whether something has this name; unlike `Path.exists`, an error is not a no."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def located(where: Path) -> Iterator[None]:
    """Have an error of the system say where: of a descriptor it does not."""
    try:
        yield
    except ShmBufferError:
        raise
    except OSError as error:
        if error.errno is None or error.filename is not None or is_of_callback(error):
            raise
        if error.errno == errno.EFBIG:
            raise too_large(where) from error
        raise OSError(error.errno, error.strerror, str(where)) from error


def in_use(path: Path, pid: str) -> BufferInUseError:
    """The error for a directory that the process ``pid`` is saving into."""
    return BufferInUseError(
        f"{path}: process {pid or '?'} is saving here right now; wait for it, or save elsewhere",
        pids=[int(pid)] if pid.isdigit() else [],
    )
