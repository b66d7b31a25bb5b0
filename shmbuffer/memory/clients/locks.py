"""File locks: rare work is done by one process at a time, and a death shows.

    .shmbuffer/init.lock        InitLock: creation, attach, recovery, cleanup
    .shmbuffer/procs/NNN.lock   LivenessFile: the client of registry entry NNN is alive

A lock is flock(2) on a descriptor of our own: it ends with the last copy of that descriptor, in
whatever way its process ends. Age and content of the file mean nothing. It is taken by
`filelock.lock_descriptor`, a FileLock without the path. FileLock itself opens the path again, and
follows links above its last part; and where flock is missing, it becomes a soft lock, which no
death ends.

Always true
  1. A lock counts only if the name still leads to the inode that was locked: a lock on a file that
     was removed keeps nobody out.
  2. No forked child keeps a lock: with a copy of the descriptor it would make its parent immortal.
     So it closes them (`_core.close_in_child`), and no fork gets in while one is opened (`_gate`).
  3. Releasing unlocks before it closes, which also reaches a copy that a fork in C has made.
  4. A descriptor belongs to its `Lock` before it is locked, and leaving the block is one call of
     the core. So Ctrl-C leaves no lock, whichever two bytecodes it comes between: what takes one
     lets go as the exception passes, and what is forgotten is closed with its `Lock`.
If a process dies here: the kernel unlocks; the files stay, empty, for the next one.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from shmbuffer._native import _core
from shmbuffer.errors import (
    AttachTimeout,
    BufferNotFoundError,
    BufferUnlinkedError,
    UnsafeFilesystemError,
)
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.identity import process_state
from shmbuffer.memory.system.path_checks import explained
from shmbuffer.memory.system.region import Directory

INIT_LOCK = ".shmbuffer/init.lock"
POLL_S = 0.005
TESTER_PATIENCE_S = 1.0
"""How long `LivenessFile.hold` lets others test the lock; a test takes microseconds."""

_LOCKS = Path("/proc/locks")

_gate = threading.RLock()  # reentrant: a signal handler may fork while its thread is inside


class Lock(_core.Descriptor):
    """A file that is locked, from `hold` to `close`; in one thread. ``with`` only closes it."""

    def __init__(self) -> None:
        super().__init__(inherited=False)

    def take(self, open: Callable[..., int], /, *args: Any, **kwargs: Any) -> int:
        """Open and own a descriptor, without a fork in between."""
        with _gate:
            super().take(open, *args, **kwargs)
        return self.fd

    def hold(
        self,
        directory: Directory,
        name: str,
        *,
        timeout: float,
        purpose: str,
        make: bool = True,
    ) -> Self:
        """Lock a file. Polls every 5 ms: no wait in the kernel has a deadline; 0 asks once."""
        deadline = time.monotonic() + timeout
        where = directory.path / name
        try:
            while True:
                (directory.open_lock if make else directory.open_file)(name, into=self)
                locked = _lock(self.fd, where)
                if locked and _is_named(directory, name, self.fd):
                    return self
                remaining = deadline - time.monotonic()
                if remaining <= 0 and not locked:
                    raise _timeout(where, self.fd, timeout, purpose)
                self.close()
                if not locked:
                    time.sleep(min(POLL_S, remaining))
        except BaseException:
            self.close()
            raise


def is_free(directory: Directory, name: str) -> bool:
    """True if nobody holds the lock. A missing file is not free: it proves nothing."""
    with Lock() as lock:
        try:
            directory.open_file(name, writable=False, into=lock)
        except FileNotFoundError:
            return False
        with explained(directory.path / name):
            try:
                fcntl.flock(lock.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
        return True


def holders(fd: int) -> list[int]:
    """The pids that hold a lock on an open file, as far as /proc/locks shows them.

    It shows processes of our pid namespace and those below, and where they locked the file, not
    where the descriptor is now. On btrfs and overlayfs its devices may be others, then none match.
    """
    try:
        found = os.fstat(fd)
        lines = _LOCKS.read_text("ascii").splitlines()
    except OSError:
        return []
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    pids = {
        int(pid)
        for _, kind, *_, pid, inode, _, _ in (line.split() for line in lines)
        if kind == "FLOCK" and inode == f"{device}:{found.st_ino}"
    }
    return sorted(pids)


class InitLock(Lock):
    """The lock for creation, attach, recovery and cleanup, for processes and threads.

    A thread that takes it twice waits for itself until the timeout (AttachTimeout). ``creating``: a
    buffer may be made here; where none may and none is, entering raises BufferUnlinkedError, as it
    would leave a lock file that nobody removes.
    """

    def __init__(self, directory: Directory, timeout: float, *, creating: bool = True) -> None:
        super().__init__()
        self.directory = directory
        self.timeout = timeout
        self.creating = creating

    def __enter__(self) -> Self:
        try:
            try:
                self._hold(make=self.creating)
            except BufferNotFoundError as error:
                # The process that removes a buffer removes this file after the control file.
                if not self.directory.exists(layout.CONTROL):
                    raise BufferUnlinkedError(
                        f"{self.directory.path}: the buffer was removed; close this handle, and "
                        "create the buffer again",
                        path=self.directory.path,
                    ) from error
                self._hold(make=True)
            return self
        except BaseException:
            self.close()
            raise

    def _hold(self, *, make: bool) -> None:
        self.hold(
            self.directory,
            INIT_LOCK,
            timeout=self.timeout,
            purpose="creates, attaches, recovers or removes this buffer",
            make=make,
        )


class LivenessFile:
    """One lock file for each registry entry; the kernel frees it when its client is dead."""

    @staticmethod
    def name(entry: int) -> str:
        """Its path."""
        return f".shmbuffer/procs/{entry:03d}.lock"

    @staticmethod
    def hold(directory: Directory, entry: int) -> Lock:
        """Say that the client of this entry lives, until the lock is closed, or its death."""
        return Lock().hold(
            directory,
            LivenessFile.name(entry),
            timeout=TESTER_PATIENCE_S,
            purpose=f"is the living client of registry entry {entry}",
        )

    @staticmethod
    def is_free(directory: Directory, entry: int) -> bool:
        """True if the client of this entry is dead, as far as its lock tells."""
        return is_free(directory, LivenessFile.name(entry))


def _lock(fd: int, where: Path) -> bool:
    from filelock import lock_descriptor  # late: it takes 40 ms, and readers do not need it

    try:
        return lock_descriptor(fd, blocking=False)
    except OSError as error:
        raise UnsafeFilesystemError(
            f"{where}: the file system has no file locks ({error.strerror}); choose a directory on"
            " a local disk or in /dev/shm",
            path=where,
            errno=error.errno,
        ) from error


def _is_named(directory: Directory, name: str, fd: int) -> bool:
    with explained(directory.path / name):
        locked = os.fstat(fd)
    try:
        named = directory.stat(name)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino)


def _timeout(where: Path, fd: int, timeout: float, purpose: str) -> AttachTimeout:
    pids = holders(fd)
    if pids:
        who = " and ".join(f"pid {pid} ({process_state(pid)})" for pid in pids)
        advice = (
            f"pass a longer timeout, or look at it with `ps -fp {pids[0]}`: `kill -CONT {pids[0]}`"
            " continues a stopped process, and killing it frees the lock"
        )
    else:
        who = "a process that /proc/locks does not show"
        advice = f"pass a longer timeout, or look for it (`fuser -v {where}`), also in containers"
    return AttachTimeout(
        f"{where}: waited {timeout:g} s for {who}, which {purpose}; {advice}",
        path=where,
        timeout_s=timeout,
        pids=pids,
    )


def _close_in_child() -> None:
    _core.close_in_child()
    _gate.release()


# Methods of C, where they can be: Ctrl-C comes in at the start of a function.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_close_in_child
)
