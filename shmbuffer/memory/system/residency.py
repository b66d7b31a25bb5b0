"""Measures how much of a file is in the kernel's page cache, and how much memory a process uses.

cachestat(2) does not map the file or touch its pages, so it does not disturb other processes. In a
large file, only a fixed number of windows that are spread evenly is measured. Measuring a file
therefore takes a few microseconds, whatever its size.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

_CACHESTAT = 451  # number of the system call on every architecture, since Linux 6.5
_WINDOW_BYTES = 2**18
_WINDOWS = 32


class _Range(ctypes.Structure):
    """The kernel's struct cachestat_range."""

    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Answer(ctypes.Structure):
    """The kernel's struct cachestat: numbers of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@dataclass(frozen=True)
class Residency:
    """Numbers of bytes of one or several files that are in memory."""

    cached: int  # bytes in the page cache
    unwritten: int  # cached bytes that were changed and are not yet on the disk

    def __add__(self, other: Residency) -> Residency:
        """Returns the sums of two measurements."""
        return Residency(self.cached + other.cached, self.unwritten + other.unwritten)


def residency(fd: int, nbytes: int) -> Residency | None:
    """Measures the residency of the first ``nbytes`` bytes of an open file.

    Returns None if cachestat(2) is not available: before Linux 6.5, on hugetlbfs, or if seccomp
    forbids it.
    """
    if nbytes <= _WINDOWS * _WINDOW_BYTES:
        windows = [(0, nbytes)]
    else:
        step = (nbytes - _WINDOW_BYTES) / (_WINDOWS - 1)
        windows = [(int(number * step), _WINDOW_BYTES) for number in range(_WINDOWS)]
    measured = sum(length for _, length in windows)
    found = Residency(0, 0)
    for offset, length in windows:
        part = _cachestat(fd, offset, length)
        if part is None:
            return None
        found += part
    scale = nbytes / measured if measured else 0.0
    return Residency(
        min(nbytes, round(found.cached * scale)), min(nbytes, round(found.unwritten * scale))
    )


def _cachestat(fd: int, offset: int, nbytes: int) -> Residency | None:
    """Calls cachestat(2) for a byte range of a file. Returns None if the call fails."""
    where, answer = _Range(offset, nbytes), _Answer()
    if _libc().syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_long(fd),
        ctypes.byref(where),
        ctypes.byref(answer),
        ctypes.c_long(0),
    ):
        return None
    page = os.sysconf("SC_PAGESIZE")
    return Residency(answer.cached * page, (answer.dirty + answer.writeback) * page)


@cache
def _libc() -> ctypes.CDLL:
    """Returns the C library of this process."""
    return ctypes.CDLL(None)


def resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process in bytes, or None if /proc does not show it.

    The value is read from /proc/PID/statm. Reading smaps instead would block the process, because
    the kernel walks the page tables under a lock that page faults of the process need.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return None
