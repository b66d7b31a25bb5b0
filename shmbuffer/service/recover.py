"""Defines ``recover``, which recovers a directory after a crash.

The recovery itself is implemented in the package ``memory``, and runs in the first process that
opens the directory. This module does not import torch.
"""

from __future__ import annotations

import os
import time

from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.opening import Existing
from shmbuffer.memory.system.progress import OnProgress, report_to
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport

__all__ = ["RecoveryReport", "recover"]


def recover(
    scratch_dir: str | os.PathLike[str],
    *,
    verify: bool = False,
    timeout: float = 60.0,
    on_progress: OnProgress | None = None,
) -> RecoveryReport:
    """Recovers the buffer in a directory, and returns a report.

    This call is optional, because ``attach`` and ``Coordinator(on_existing="recover")`` also
    recover the buffer. It can be repeated, and the process can be killed at any time. If living
    processes use the buffer, only the claims and locks of dead processes are cleaned up.

    Args:
        scratch_dir: the directory of the buffer.
        verify: if True, each item is compared with its checksum, and items that differ are dropped.
            No other process may use the buffer. After a reboot, or in a copied directory, items are
            always verified.
        timeout: seconds to wait for another process that is creating or recovering the buffer.
        on_progress: function that is called with a `ProgressReport` several times per second. The
            function must not open the directory. If it raises an exception, this call raises the
            exception, and the next process that opens the directory starts the recovery again.

    Returns:
        The report. ``print(report)`` shows it as a table.

    Raises:
        BufferNotFoundError: the directory contains no buffer.
        FormatError, CorruptBufferError, UnsafePathError, ReadOnlyError: the directory cannot be
            used. Nothing was changed.
        BufferInUseError: ``verify`` was requested, but living processes use the buffer. The
            attribute ``pids`` contains their pids.
        AttachTimeout: another process kept the directory locked until the timeout.

    Cost: tens of milliseconds per million items. Verification reads all bytes once, which takes a
    few seconds for 10 GB in memory.
    """
    began, before = time.perf_counter_ns(), _read_counters(scratch_dir)
    existing: Existing = "verify" if verify else "recover"
    with (
        report_to(on_progress),
        Engine.open(scratch_dir, None, existing=existing, timeout=timeout) as engine,
    ):
        if engine.report is not None:
            return engine.report
        engine.seat.reap_dead()
        after, ring = _read_counters(scratch_dir), engine.ring()
        width = ring.width if ring else 1
        return RecoveryReport(
            str(engine.path),
            "in use",
            items=ring.length if ring else 0,
            rolled_back=(after["rolled_back"] - before["rolled_back"]) * width,
            rolled_forward=(after["rolled_forward"] - before["rolled_forward"]) * width,
            clients_retired=after["reaped"] - before["reaped"],
            epoch=engine.superblock.epoch,
            duration_ms=(time.perf_counter_ns() - began) / 1e6,
        )


def _read_counters(path: str | os.PathLike[str]) -> dict[str, int]:
    """Returns the counters of rolled back and forward slots and of reaped clients in a directory.

    All counters are 0 if the directory has no control file.
    """
    with Directory.open(path) as directory:
        files = Files(directory)
        found = files.open_control().runtime if files.has_control() else None
        return {
            name: int(found[name][0]) if found is not None else 0
            for name in ("rolled_back", "rolled_forward", "reaped")
        }
