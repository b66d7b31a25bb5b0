"""Detects whether other programs have replaced the files of a directory since the last client.

If the machine was not rebooted, recovery trusts the page cache, which contains everything that dead
processes stored. If a copy is restored over the files (`cp -T`, `tar --overwrite`,
`rsync --inplace`) or a snapshot is rolled back, the files are older, and may be from different
points in time. Three attributes of files, which no copy preserves, are checked:

    ctime > last store      The ctime of the control file is later than the last store that a client
                            has recorded, or the ctime of another file is later by more than a
                            second. No program can set a ctime.
    ctime != mtime          A store or a write sets both times; utimensat, chmod, link and rename
                            set only one of them to the current time.
    write hint is missing   The hint exists as long as the inode is in memory (fcntl(2),
                            F_SET_RW_HINT). A rollback needs an unmount, which removes the hint.

Always true
  1. Restored files are detected. A false alarm is harmless: if a file was only touched, or its
     inode is no longer in memory, recovery compares the checksums. The first store of a process
     into a page sets the times of the file (file_update_time). Clients record the time of a store
     after the store.
  2. `vouch` is called after the content was created or verified. If a process dies in a recovery
     before this call, the next recovery finds the same attributes.
The following cases are not detected:

* a copy that is restored in the same tick of the kernel's clock (1 to 10 ms) as the last store;
* a copy that is restored after the wall clock was set back;
* a single leaf file that is restored within a second after the last store;
* a rollback of a file system that needs no unmount (ZFS).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

_GET_HINT, _SET_HINT = 1035, 1036  # F_GET_RW_HINT, F_SET_RW_HINT of linux/fcntl.h
_FILLING_NS = 1_000_000_000
"""Time in nanoseconds by which leaf files may be newer than the last store that was recorded.

A client records the time of a batch after it has copied the rows into the leaf files.
"""
_HINT = (1).to_bytes(8, "little")  # RWH_WRITE_LIFE_NONE requests nothing, and is not the default


def is_restored(directory: Directory, control: Control, schema: Schema | None) -> bool:
    """True if the attributes of the files show that another program has changed them.

    Cost: a few µs per file.
    """
    last = max(int(control.runtime["touched_ns"][0]), int(control.entries["last_seen_ns"].max()))
    names = [layout.CONTROL, *(schema.mapped_files if schema else ())]
    try:
        found = [directory.stat(name) for name in names]
        hint = _hint(directory)
    except BufferNotFoundError:
        return True  # the function that needs the missing file raises the error
    return (
        not found[0].st_ctime_ns <= last <= time.time_ns()
        or any(one.st_ctime_ns > last + _FILLING_NS for one in found)
        or any(one.st_ctime_ns != one.st_mtime_ns for one in found)
        or hint != _HINT
    )


def vouch(directory: Directory, names: list[str]) -> None:
    """Marks the content of the named files as valid; the caller holds init.lock.

    Sets the times of the files, and the write hint of the control file.
    """
    for name in names:
        with directory.open_file(name) as file:
            with explain_errors(directory.path / name):
                os.utime(file.fd)
                _core.reached("vouch.times")
            if name == layout.CONTROL:
                # if the file system has no hints, a rollback cannot be detected later
                with suppress(OSError):
                    fcntl.fcntl(file.fd, _SET_HINT, _HINT)
                    _core.reached("vouch.hint")


def _hint(directory: Directory) -> bytes:
    """Returns the write hint of the control file; empty if hints are not supported."""
    with directory.open_file(layout.CONTROL, writable=False) as file:
        try:
            return fcntl.fcntl(file.fd, _GET_HINT, bytes(8))
        except OSError:
            return b""
