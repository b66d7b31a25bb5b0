"""File locks, which serialize rare operations and reveal the death of a process.

    .shmbuffer/init.lock        InitLock: creation, attach, recovery, cleanup
    .shmbuffer/procs/NNN.lock   LivenessFile: the client of registry entry NNN is alive

A lock is flock(2) on a descriptor of our own. It ends with the last copy of that descriptor,
however the process ends. Age and content of the file have no meaning.

`filelock.lock_descriptor` takes the lock, like a FileLock without a path. FileLock itself opens the
path again, and follows links in it except for the last component. If flock is not supported,
FileLock uses a soft lock, which a death does not end.

Always true
  1. A lock counts only if its name still leads to the locked inode. A lock on a removed file
     excludes no process.
  2. A forked child keeps no lock, because its copy of the descriptor would keep the lock of a dead
     parent. The child closes the descriptors (`_core.close_in_child`), and no fork happens while
     one is opened (`_gate`).
  3. Closing a lock unlocks it first, which also affects copies of the descriptor that a fork in C
     made.
  4. A descriptor belongs to its `Lock` before it is locked, and leaving the ``with`` block is one
     call of the core. Ctrl-C therefore leaves no lock behind, between whichever bytecodes it
     arrives. Functions that take a lock release it on any exception, and a `Lock` without
     references is closed.
If a process dies here: the kernel unlocks its files, which remain, empty, for the next process.
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
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

INIT_LOCK = ".shmbuffer/init.lock"
POLL_S = 0.005
TESTER_PATIENCE_S = 1.0
"""How long `LivenessFile.hold` waits for processes that test the lock, which takes microseconds."""

_LOCKS = Path("/proc/locks")

_gate = threading.RLock()  # reentrant: a signal handler may fork while its thread holds it


class Lock(_core.Descriptor):
    """A locked file, from `hold` to `close`, in one thread. ``with`` only closes it."""

    def __init__(self) -> None:
        super().__init__(inherited=False)

    def take(self, open: Callable[..., int], /, *args: Any, **kwargs: Any) -> int:
        """Opens a descriptor and owns it, without a fork in between."""
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
        """Locks a file. Polls every 5 ms, because flock has no timeout; 0 tries once."""
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
    """True if the lock is free. A missing file is not free, because it proves nothing."""
    with Lock() as lock:
        try:
            directory.open_file(name, writable=False, into=lock)
        except FileNotFoundError:
            return False
        with explain_errors(directory.path / name):
            try:
                fcntl.flock(lock.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
        return True


def holders(fd: int) -> list[int]:
    """Returns the pids that hold a lock on an open file, as far as /proc/locks shows them.

    /proc/locks shows processes of our pid namespace and those below it. It shows the process that
    locked the file, even if the descriptor is now in another one. On btrfs and overlayfs, its
    device numbers may differ from those of stat; then no process matches.
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

    A thread that takes it twice waits for itself until the timeout (AttachTimeout). ``creating``:
    the caller may create a buffer. If it may not, and there is no buffer, entering raises
    BufferUnlinkedError, because no process would remove the new lock file.
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
        """Locks the file of the directory."""
        self.hold(
            self.directory,
            INIT_LOCK,
            timeout=self.timeout,
            purpose="creates, attaches, recovers or removes this buffer",
            make=make,
        )


class LivenessFile:
    """The lock file of a registry entry, which the kernel frees when its client is dead."""

    @staticmethod
    def name(entry: int) -> str:
        """Returns its path."""
        return f".shmbuffer/procs/{entry:03d}.lock"

    @staticmethod
    def hold(directory: Directory, entry: int) -> Lock:
        """Marks the client of this entry as alive, until the lock is closed or it dies."""
        return Lock().hold(
            directory,
            LivenessFile.name(entry),
            timeout=TESTER_PATIENCE_S,
            purpose=f"is the living client of registry entry {entry}",
        )

    @staticmethod
    def is_free(directory: Directory, entry: int) -> bool:
        """True if the client of this entry is dead, according to its lock."""
        return is_free(directory, LivenessFile.name(entry))


def _lock(fd: int, where: Path) -> bool:
    """Tries to lock a descriptor; raises UnsafeFilesystemError if locks are not supported."""
    # imported here because it takes 40 ms, and readers do not need it
    from filelock import lock_descriptor

    try:
        return lock_descriptor(fd, blocking=False)
    except OSError as error:
        raise UnsafeFilesystemError(
            f"{where}: the file system does not support file locks ({error.strerror}); choose a"
            " directory on a local disk or in /dev/shm",
            path=where,
            errno=error.errno,
        ) from error


def _is_named(directory: Directory, name: str, fd: int) -> bool:
    """True if a name still leads to the locked file."""
    with explain_errors(directory.path / name):
        locked = os.fstat(fd)
    try:
        named = directory.stat(name)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino)


def _timeout(where: Path, fd: int, timeout: float, purpose: str) -> AttachTimeout:
    """Returns the error for a lock that other processes hold."""
    pids = holders(fd)
    if pids:
        who = " and ".join(f"pid {pid} ({process_state(pid)})" for pid in pids)
        advice = (
            f"pass a longer timeout, or inspect it with `ps -fp {pids[0]}`: `kill -CONT {pids[0]}`"
            " continues a stopped process, and killing it frees the lock"
        )
    else:
        who = "a process that /proc/locks does not show"
        advice = (
            f"pass a longer timeout, or find it with `fuser -v {where}`, which does not see other"
            " containers"
        )
    return AttachTimeout(
        f"{where}: waited {timeout:g} s for {who}, which {purpose}; {advice}",
        path=where,
        timeout_s=timeout,
        pids=pids,
    )


def _close_in_child() -> None:
    _core.close_in_child()
    _gate.release()


# The callbacks are methods of C if possible, because Ctrl-C is handled at the start of a function.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_close_in_child
)
