"""One coordinator a directory: ``.shmbuffer/coordinator.lock``, freed by the kernel at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from shmbuffer.errors import AttachTimeout, BufferInUseError
from shmbuffer.memory import layout
from shmbuffer.memory.locks import Lock
from shmbuffer.memory.region import Directory
from shmbuffer.memory.trust import explained
from shmbuffer.service.main_module import refuse_while_imported


class CoordinatorLock:
    """Held from ``take`` to ``release``, or to the end of the process; no forked child has it.

    The file stays when the lock is released: a new file would be another lock.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    @classmethod
    def take(cls, scratch_dir: Path) -> Self:
        """Takes the lock of a buffer that is there.

        Raises:
            BufferInUseError: another coordinator has it; ``pids`` names it.

        Cost: some ten microseconds.
        """
        with Directory.open(scratch_dir) as directory:
            try:
                return cls(
                    Lock().hold(
                        directory, layout.COORDINATOR_LOCK, timeout=0, purpose="is its coordinator"
                    )
                )
            except AttachTimeout as error:
                raise _taken(scratch_dir, getattr(error, "pids", [])) from None

    def release(self) -> None:
        """Lets the next coordinator in. Idempotent."""
        self._lock.close()


def refuse_second(scratch_dir: Path) -> None:
    """Says early that a directory has a coordinator, before it is recovered or removed for nothing.

    Raises:
        RuntimeError: this is a spawned process, and a module makes the coordinator as it is
            imported.
        BufferInUseError: another coordinator has the lock; ``pids`` names it.
    """
    refuse_while_imported(scratch_dir)
    with explained(scratch_dir):
        is_there = (scratch_dir / layout.COORDINATOR_LOCK).exists()
    if is_there:
        CoordinatorLock.take(scratch_dir).release()


def _taken(scratch_dir: Path, pids: list[int]) -> BufferInUseError:
    who = f"pid {pids[0]}" if pids else "a process that /proc/locks does not show"
    return BufferInUseError(
        f"{scratch_dir}: {who} is its coordinator already; stop that one first, or use attach()",
        path=scratch_dir,
        pids=pids,
    )
