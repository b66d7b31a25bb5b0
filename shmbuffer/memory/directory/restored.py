"""Detects whether the files of a directory were replaced since its last processes wrote them.

Recovery within one boot trusts the page cache, which contains everything that dead processes
stored. If a copy is restored over the files (`cp -T`, `tar --overwrite`, `rsync --inplace`) or a
snapshot is rolled back, the files are older, and may be from different points in time. Three
attributes of files, which no copy preserves, are checked:

    ctime > last store      the control file was written later than its own content says that
                            any client stored into it, or another file a second later. No program
                            can set a ctime.
    ctime != mtime          a store and a write set both; utimensat, chmod, link and rename one
    write hint is missing   the hint exists as long as the inode is in memory (fcntl(2),
                            F_SET_RW_HINT); an unmount, which a rollback needs, removes it

Always true
  1. Restored files are detected. The opposite error is harmless: a file that was only touched, or
     whose inode left memory, costs a comparison of checksums. The first store of a process into a
     page sets the times (file_update_time), so a store is dated after it was made.
  2. `vouch` is called after the bytes were created or verified. If a recovery dies before it, the
     next one finds the same attributes.
The following cases are not detected:

* a copy that is restored in the same tick of the kernel's clock (1 to 10 ms) as the last store;
* a copy that is restored after the wall clock was set back;
* a single leaf that is restored within a second;
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
"""A batch is dated after it was copied, so its leaves may be newer by this much."""
_HINT = (1).to_bytes(8, "little")  # RWH_WRITE_LIFE_NONE requests nothing, and is not the default


def is_restored(directory: Directory, control: Control, schema: Schema | None) -> bool:
    """True if another program has detectably changed the files. Cost: a few µs per file."""
    last = max(int(control.runtime["touched_ns"][0]), int(control.entries["last_seen_ns"].max()))
    names = [layout.CONTROL, *(schema.mapped_files if schema else ())]
    try:
        found = [directory.stat(name) for name in names]
        hint = _hint(directory)
    except BufferNotFoundError:
        return True  # the function that needs the file reports it
    return (
        not found[0].st_ctime_ns <= last <= time.time_ns()
        or any(one.st_ctime_ns > last + _FILLING_NS for one in found)
        or any(one.st_ctime_ns != one.st_mtime_ns for one in found)
        or hint != _HINT
    )


def vouch(directory: Directory, names: list[str]) -> None:
    """Records that these files are valid; the caller holds init.lock."""
    for name in names:
        with directory.open_file(name) as file:
            with explain_errors(directory.path / name):
                os.utime(file.fd)
                _core.reached("vouch.times")
            if name == layout.CONTROL:
                # hints are not supported, so a rollback cannot be detected later
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
