"""Warns if the kernel throttles the writers of a buffer (``memory/system/writeback.py``)."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from shmbuffer.memory.system import writeback
from shmbuffer.memory.system.filesystem import human_size

log = logging.getLogger("shmbuffer.service")

CHECKS, MIN_THROTTLED = 20, 3
"""A warning is logged if a writer was throttled in MIN_THROTTLED of the last CHECKS checks."""

WARN_EVERY_S = 600.0
MIN_WAIT_US = 10_000
"""Time in µs that processes must have waited for disks between two checks. If they waited less,
the writers are not examined."""


class WritebackWarning:
    """Checks whether the kernel throttles writers, and logs a warning if it does so repeatedly."""

    def __init__(self, path: Path) -> None:
        self.seconds = 0.0  # total time between checks in which a writer was throttled
        self._path = path
        self._checks: deque[list[int]] = deque(maxlen=CHECKS)
        self._warned_s: float | None = None
        self._waited_us = writeback.disk_wait_us()
        self._last_s = time.monotonic()

    def check(self, pids: Iterable[int]) -> None:
        """Checks whether the kernel is throttling any of the processes with these pids."""
        before, self._waited_us = self._waited_us, writeback.disk_wait_us()
        now_s = time.monotonic()
        past_s, self._last_s = now_s - self._last_s, now_s
        found: list[int] = []
        if before is None or self._waited_us is None or self._waited_us - before >= MIN_WAIT_US:
            found = writeback.throttled(pids)
        self._checks.append(found)
        if found:
            self.seconds += past_s
        if sum(map(bool, self._checks)) >= MIN_THROTTLED:
            self._warn(now_s)

    def _warn(self, now_s: float) -> None:
        if self._warned_s is not None and now_s - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s = now_s
        times = Counter(pid for found in self._checks for pid in found)
        who = ", ".join(f"pid {pid} in {count}" for pid, count in times.most_common(3))
        dirty, limit = writeback.dirty_bytes()
        log.warning(
            "%s: the kernel throttles writers because the disk cannot keep up (%s of the last %d "
            "checks; %s are waiting to be written on this machine, the limit is %s). Put the "
            "buffer in memory (/dev/shm), or raise vm.dirty_bytes; see docs/memory.md",
            self._path,
            who,
            len(self._checks),
            human_size(dirty),
            human_size(limit),
        )
