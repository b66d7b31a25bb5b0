"""Finds writers that the kernel throttles because a disk is slower than their writes.

    store to a clean page of a file on a disk ──▶ page fault ──▶ the page is dirty
          too many dirty pages (vm.dirty_ratio, vm.dirty_bytes, a limit of the disk or cgroup)
                       └──▶ the writer sleeps in balance_dirty_pages(), up to 200 ms at a time

Throttling leaves no trace in shared memory, and measuring the time of each store would cost more
than the store. /proc shows the kernel function in which a thread sleeps. The coordinator reads it
twice a second. If no process on the machine waits for a disk, it reads only one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

THROTTLE = "balance_dirty_pages"
"""Name of the kernel function. The compiler of the kernel may have added a suffix to it."""

PRESSURE = Path("/proc/pressure/io")
VMSTAT = Path("/proc/vmstat")


def sleeps_in(pid: int) -> set[str]:
    """Returns the names of the kernel functions in which the threads of a process sleep.

    Takes about 15 µs per thread.
    """
    found = set()
    with suppress(OSError):  # the process has ended, or belongs to another user
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found.add(Path(f"/proc/{pid}/task/{thread}/wchan").read_text("ascii"))
    return found - {"0", ""}  # a running thread, or a kernel that hides this information


def throttled(pids: Iterable[int]) -> list[int]:
    """Returns the pids of those processes that have a throttled thread at this time."""
    return [pid for pid in pids if any(name.startswith(THROTTLE) for name in sleeps_in(pid))]


def disk_wait_us() -> int | None:
    """Returns the time since boot in which some thread was waiting for a disk, in microseconds.

    Returns None if the kernel does not measure this time (CONFIG_PSI).
    """
    try:
        line = PRESSURE.read_text("ascii").splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2])


def dirty_bytes() -> tuple[int, int]:
    """Returns the number of bytes in dirty pages of the machine, and the kernel's limit for them.

    A disk or a cgroup may have a lower limit.
    """
    counts = dict(line.split() for line in VMSTAT.read_text("ascii").splitlines())
    page = os.sysconf("SC_PAGE_SIZE")
    dirty = int(counts["nr_dirty"]) + int(counts["nr_writeback"])
    return dirty * page, int(counts["nr_dirty_threshold"]) * page
