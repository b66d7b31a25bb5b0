"""The directory that a save is written into before it is published; see `publication`.

    owner           locked for as long as who saves is alive; holds the pid
    checkpoint/     what is going to be published
    complete.json   the save counts from now on, and has to be moved to its place

If its owner dies, whoever saves next takes the lock, and removes it or finishes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from shmbuffer.errors import BufferInUseError

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
            try:
                self._fd = os.open(path / _OWNER, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
            except FileNotFoundError:
                if make:  # swept between the two calls
                    continue
                raise
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.pid = os.pread(self._fd, 32, 0).decode(errors="replace")
                if make:
                    os.close(self._fd)
                    raise in_use(path.parent, self.pid) from None
                return
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # swept while we took it
        self.mine = True
        self.pid = str(os.getpid())
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, self.pid.encode(), 0)

    @property
    def new(self) -> Path:
        """What is going to be published."""
        return self.path / _NEW

    def leave(self) -> None:
        """Remove it, unless it holds a complete save that has not been moved to its place.

        The lock goes last, so that what somebody leaves who dies here is swept later.
        """
        if self.mine and not (self.path / COMPLETE).exists():
            shutil.rmtree(self.new, ignore_errors=True)
            with suppress(OSError):
                (self.path / _OWNER).unlink()
                self.path.rmdir()
        os.close(self._fd)


def sweep(path: Path) -> None:
    """Remove work directories for ``path`` whose owners are dead."""
    beside = path.parent.glob(f".{_escaped(path.name)}.*{MARK}")
    for directory in [*beside, path / MARK]:
        with suppress(OSError):  # not there; or not ours to remove
            if not (directory / _OWNER).exists():
                directory.rmdir()  # died before it was locked: nothing is in it
                continue
            Work(directory, make=False).leave()


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def in_use(path: Path, pid: str) -> BufferInUseError:
    """The error for a directory that the process ``pid`` is saving into."""
    return BufferInUseError(
        f"{path}: process {pid or '?'} is saving here right now; wait for it, or save elsewhere",
        pids=[int(pid)] if pid.isdigit() else [],
    )
