"""Writers that the kernel holds back, because a disk is behind with what they have written.

    store to a clean page of a file on a disk ──▶ fault ──▶ page is dirty
          too many dirty pages (vm.dirty_ratio, vm.dirty_bytes, a limit of the disk or cgroup)
                       └──▶ the writer sleeps in balance_dirty_pages(), up to 200 ms at a time

Nothing of that can be seen in the shared memory, and to measure every store would cost more than
the store. The kernel says where a thread sleeps, so somebody else looks (a coordinator, twice a
second): one file, where nobody on the machine waits for a disk.
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
    """The kernel's functions that threads of a process sleep in, where visible. 15 µs a thread."""
    found = set()
    with suppress(OSError):  # gone, or another user's
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found.add(Path(f"/proc/{pid}/task/{thread}/wchan").read_text("ascii"))
    return found - {"0", ""}  # it runs, or we are not told


def throttled(pids: Iterable[int]) -> list[int]:
    """Returns the processes with a thread that is throttled now."""
    return [pid for pid in pids if any(name.startswith(THROTTLE) for name in sleeps_in(pid))]


def waited_for_disks_us() -> int | None:
    """Microseconds since boot in which some thread waited for a disk; None without CONFIG_PSI."""
    try:
        some = PRESSURE.read_text("ascii").splitlines()[0]
    except OSError:
        return None
    return int(some.rpartition("total=")[2])


def dirty_bytes() -> tuple[int, int]:
    """The machine's pages to write back and the kernel's limit; a disk or cgroup may have less."""
    counts = dict(line.split() for line in VMSTAT.read_text("ascii").splitlines())
    page = os.sysconf("SC_PAGE_SIZE")
    dirty = int(counts["nr_dirty"]) + int(counts["nr_writeback"])
    return dirty * page, int(counts["nr_dirty_threshold"]) * page
