"""Finds writers that the kernel throttles because a disk is slower than their writes.

    store to a clean page of a file on a disk ──▶ fault ──▶ page is dirty
          too many dirty pages (vm.dirty_ratio, vm.dirty_bytes, a limit of the disk or cgroup)
                       └──▶ the writer sleeps in balance_dirty_pages(), up to 200 ms at a time

Throttling is invisible in shared memory, and measuring every store would cost more than the store.
The kernel shows where a thread sleeps, so the coordinator looks twice a second. It reads only one
file if no process on the machine waits for a disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

THROTTLE = "balance_dirty_pages"
"""The kernel's name of the function; a compiler may have added a suffix."""

PRESSURE = Path("/proc/pressure/io")
VMSTAT = Path("/proc/vmstat")


def sleeps_in(pid: int) -> set[str]:
    """Returns the kernel functions in which threads of a process sleep. Takes 15 µs a thread."""
    found = set()
    with suppress(OSError):  # the process is gone, or belongs to another user
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found.add(Path(f"/proc/{pid}/task/{thread}/wchan").read_text("ascii"))
    return found - {"0", ""}  # the thread runs, or its position is hidden


def throttled(pids: Iterable[int]) -> list[int]:
    """Returns the processes with a thread that is throttled now."""
    return [pid for pid in pids if any(name.startswith(THROTTLE) for name in sleeps_in(pid))]


def disk_wait_us() -> int | None:
    """Returns the microseconds that threads waited for disks; None without CONFIG_PSI."""
    try:
        line = PRESSURE.read_text("ascii").splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2])


def dirty_bytes() -> tuple[int, int]:
    """Returns the bytes of the machine's dirty pages, and the kernel's limit.

    A disk or a cgroup may have a lower limit.
    """
    counts = dict(line.split() for line in VMSTAT.read_text("ascii").splitlines())
    page = os.sysconf("SC_PAGE_SIZE")
    dirty = int(counts["nr_dirty"]) + int(counts["nr_writeback"])
    return dirty * page, int(counts["nr_dirty_threshold"]) * page
