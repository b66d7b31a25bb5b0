"""File locks, which serialize rare operations and show whether a process is alive.

    .shmbuffer/init.lock        InitLock: creation, attach, recovery, cleanup
    .shmbuffer/procs/NNN.lock   LivenessFile: the client of registry entry NNN is alive

A lock is a flock(2) on a descriptor that this module opens. The kernel releases it when the last
copy of the descriptor is closed, however the process ends. The age and the content of the file do
not matter.

`filelock.lock_descriptor` takes the lock. filelock's `FileLock` is not used, because it opens the
path itself and follows links in all but the last component. Without flock, it would also fall back
to a soft lock, which remains if its process dies.

Always true
  1. A lock is valid only if its file name still leads to the locked inode. A lock on a removed file
     does not exclude other processes.
  2. A forked child does not keep locks, because its copy of the descriptor would keep the lock of a
     dead parent. The child closes the descriptors (`_core.close_in_child`), and no fork can happen
     while a descriptor is being opened (`_gate`).
  3. Closing a lock unlocks it first. The lock is therefore released even if a fork in C code has
     copied the descriptor.
  4. A descriptor belongs to its `Lock` before it is locked, and leaving the ``with`` block is a
     single call into the C core. Ctrl-C therefore never leaves a lock behind, whenever it arrives.
     Functions that take a lock release it if an exception is raised. A `Lock` that is no longer
     referenced is closed.
If a process dies here: the kernel unlocks its files. The empty files remain for other processes.
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
"""Seconds for which a lock is retried while other processes test it. A test takes microseconds."""

_LOCKS = Path("/proc/locks")

# Held while a descriptor is opened and during a fork. It is reentrant, because a signal handler may
# fork while its thread opens a descriptor.
_gate = threading.RLock()


class Lock(_core.Descriptor):
    """A file lock, which `hold` takes and `close` releases. Each instance is used by one thread.

    As a context manager, it only releases the lock.
    """

    def __init__(self) -> None:
        super().__init__(inherited=False)

    def take(self, open: Callable[..., int], /, *args: Any, **kwargs: Any) -> int:
        """Opens a descriptor and takes ownership of it. No fork can happen in between.

        Args:
            open: Function that opens the descriptor, such as `os.open`.
            args: Arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The descriptor.
        """
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
        """Locks a file. Polls every 5 ms, because flock(2) has no timeout.

        Args:
            directory: The directory of the buffer.
            name: Name of the file in the directory.
            timeout: Number of seconds after which the attempt fails. 0 tries only once.
            purpose: Clause for the error message that describes the process with the lock, such as
                "continues this rollout".
            make: Whether the file is created if it does not exist.

        Raises:
            AttachTimeout: Another process has held the lock for ``timeout`` seconds.
        """
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
    """True if no process holds the lock on a file.

    Also returns False if the file does not exist, because this does not prove that its process is
    dead.
    """
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
    """Returns the pids of the processes that hold a lock on an open file, according to /proc/locks.

    /proc/locks shows the processes in this pid namespace and in namespaces below it. It shows the
    process that took the lock, even if another process has inherited the descriptor. On btrfs and
    overlayfs, the device numbers in /proc/locks may differ from those of stat(2). In this case no
    process is found.
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
    """The lock for creation, attach, recovery and cleanup. It excludes processes and threads.

    It is not reentrant: a thread that takes it a second time gets AttachTimeout.

    Args:
        directory: The directory of the buffer.
        timeout: Number of seconds to wait for the lock.
        creating: Whether the caller can create a buffer. If not, and if the buffer was removed,
            entering the ``with`` block raises BufferUnlinkedError. A new lock file is not created
            in this case, because no process would remove it.
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
        """Locks the file ``init.lock`` of the buffer. ``make`` creates the file if necessary."""
        self.hold(
            self.directory,
            INIT_LOCK,
            timeout=self.timeout,
            purpose="creates, attaches, recovers or removes this buffer",
            make=make,
        )


class LivenessFile:
    """The lock file of a registry entry, which the kernel unlocks when the client dies."""

    @staticmethod
    def name(entry: int) -> str:
        """Returns the name of an entry's lock file in the directory of the buffer."""
        return f".shmbuffer/procs/{entry:03d}.lock"

    @staticmethod
    def hold(directory: Directory, entry: int) -> Lock:
        """Locks the file of an entry. Its client counts as alive until the lock is released."""
        return Lock().hold(
            directory,
            LivenessFile.name(entry),
            timeout=TESTER_PATIENCE_S,
            purpose=f"is the living client of registry entry {entry}",
        )

    @staticmethod
    def is_free(directory: Directory, entry: int) -> bool:
        """True if no process holds the lock of an entry, so that its client is dead."""
        return is_free(directory, LivenessFile.name(entry))


def _lock(fd: int, where: Path) -> bool:
    """Tries to lock a descriptor. Returns False if another process holds the lock.

    Raises:
        UnsafeFilesystemError: The file system does not support locks.
    """
    # Imported here because the import takes 40 ms, and processes that only read do not need it.
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
    """True if a file name still leads to the inode of a locked descriptor."""
    with explain_errors(directory.path / name):
        locked = os.fstat(fd)
    try:
        named = directory.stat(name)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino)


def _timeout(where: Path, fd: int, timeout: float, purpose: str) -> AttachTimeout:
    """Returns the error for a lock that other processes have held for ``timeout`` seconds."""
    pids = holders(fd)
    if pids:
        who = " and ".join(f"pid {pid} ({process_state(pid)})" for pid in pids)
        advice = (
            f"pass a longer timeout, or inspect the process with `ps -fp {pids[0]}`:"
            f" `kill -CONT {pids[0]}` continues a stopped process, and killing it frees the lock"
        )
    else:
        who = "a process that /proc/locks does not show"
        advice = (
            f"pass a longer timeout, or find the process with `fuser -v {where}`, which does not"
            " see other containers"
        )
    return AttachTimeout(
        f"{where}: waited {timeout:g} s for {who}, which {purpose}; {advice}",
        path=where,
        timeout_s=timeout,
        pids=pids,
    )


def _close_in_child() -> None:
    """Closes the descriptors of all locks in the child of a fork."""
    _core.close_in_child()
    _gate.release()


# `before` and `after_in_parent` are functions in C, because Ctrl-C could interrupt a function in
# Python at its start, and the gate would then not be released.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_close_in_child
)
