"""Whether the bytes of a directory are what its processes left there, or were put back since.

Recovery within one boot believes the page cache, which holds all that the dead have stored. A copy
that is put back over the files (`cp -T`, `tar --overwrite`, `rsync --inplace`) and a snapshot that
is rolled back are older, and of no single moment. Three facts of the kernel show it, and no copy
carries them along:

    ctime > last store      the control file was written later than its own content says that
                            anybody stored into it, or another one a second later. Nobody can set
                            a ctime.
    ctime != mtime          a store and a write set both; utimensat, chmod, link and rename one
    write hint is gone      it lives as long as the inode does in memory (fcntl(2), F_SET_RW_HINT),
                            so it is lost with an unmount, which a rollback needs

Always true
  1. Each errs in one direction only: what was put back is found, while a file that was just
     touched, or whose inode left memory, costs a comparison of checksums. The first store of a
     process into a page sets the times (file_update_time), so a store is dated after it was made.
  2. `vouch` comes after the bytes were made or verified: a recovery that dies before it is followed
     by one that finds the same.
Not found: a copy that is put back in the tick of the kernel's clock (1 to 10 ms) in which the last
store into it was made, or after the wall clock was set back; a leaf alone within a second; a
rollback of a file system that needs no unmount (ZFS).
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
from shmbuffer.memory.system.path_checks import explained
from shmbuffer.memory.system.region import Directory

_GET_HINT, _SET_HINT = 1035, 1036  # F_GET_RW_HINT, F_SET_RW_HINT of linux/fcntl.h
_FILLING_NS = (
    1_000_000_000  # a batch is dated once it is copied: its leaves may be newer until then
)
_HINT = (1).to_bytes(8, "little")  # RWH_WRITE_LIFE_NONE: asks for nothing, and is not the default


def is_restored(directory: Directory, control: Control, schema: Schema | None) -> bool:
    """True if somebody else has changed the files, as far as it can be told; some µs a file."""
    last = max(int(control.runtime["touched_ns"][0]), int(control.entries["last_seen_ns"].max()))
    names = [layout.CONTROL, *(schema.mapped_files if schema else ())]
    try:
        found = [directory.stat(name) for name in names]
        hint = _hint(directory)
    except BufferNotFoundError:
        return True  # a missing file is reported where it is needed
    return (
        not found[0].st_ctime_ns <= last <= time.time_ns()
        or any(one.st_ctime_ns > last + _FILLING_NS for one in found)
        or any(one.st_ctime_ns != one.st_mtime_ns for one in found)
        or hint != _HINT
    )


def vouch(directory: Directory, names: list[str]) -> None:
    """Records that these files are as they should be; under init.lock."""
    for name in names:
        with directory.open_file(name) as file:
            with explained(directory.path / name):
                os.utime(file.fd)
                _core.reached("vouch.times")
            if name == layout.CONTROL:
                with suppress(OSError):  # no such hint here, so that it cannot be told later
                    fcntl.fcntl(file.fd, _SET_HINT, _HINT)
                    _core.reached("vouch.hint")


def _hint(directory: Directory) -> bytes:
    """The write hint of the control file; empty where there are none."""
    with directory.open_file(layout.CONTROL, writable=False) as file:
        try:
            return fcntl.fcntl(file.fd, _GET_HINT, bytes(8))
        except OSError:
            return b""
