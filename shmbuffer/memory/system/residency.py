"""Measures how much of a file is in memory, using the kernel's page cache.

cachestat(2) needs no map of the file and touches none of its pages, so it does not disturb other
processes. Large files are sampled in windows that are spread over the file. Measuring a file takes
a few microseconds, whatever its size.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
_WINDOW_BYTES = 2**18
_WINDOWS = 32


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Answer(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@dataclass(frozen=True)
class Residency:
    """Bytes of files that are in memory."""

    cached: int
    unwritten: int  # bytes of these that were changed and are not yet on the disk

    def __add__(self, other: Residency) -> Residency:
        """Adds the bytes of two measurements."""
        return Residency(self.cached + other.cached, self.unwritten + other.unwritten)


def residency(fd: int, nbytes: int) -> Residency | None:
    """Measures an open file; None before Linux 6.5, on hugetlbfs, or if seccomp forbids it."""
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
    """Calls cachestat(2) for a part of a file; None if it is not available."""
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
    return ctypes.CDLL(None)


def resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process of our pid namespace; None if it is not visible.

    It is read from /proc/PID/statm. Reading smaps would walk the page tables under a lock that the
    process needs.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return None
