"""Defines the report of a recovery."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from shmbuffer.memory.mapped.control import Control


@dataclass(frozen=True)
class RecoveryReport:
    """The report of a recovery, with the numbers of items that it kept, repaired or dropped.

    Attributes:
        path: The directory.
        reason: The reason for the recovery: ``"no client alive"``, ``"reboot"``, ``"copy"`` or
            ``"restored"``. ``"in use"`` if a private copy of a buffer in use was repaired.
        items: Number of elements in the buffer after the recovery.
        rolled_back: Number of elements in incomplete batches, whose slots were freed.
        rolled_forward: Number of elements in batches that were written completely, but only partly
            marked as committed.
        clients_retired: Number of registry entries of dead clients that were freed.
        priorities_repaired: Number of invalid raw priorities, which were replaced by the default.
        words_refused: Number of slots whose word was impossible. These slots were emptied.
        checksum_failed: Number of elements that were dropped because they did not match their
            checksum.
        unverified: Number of elements that were kept although the buffer has no checksums.
        epoch: Number of recoveries of this directory, including this one.
        duration_ms: Duration of the recovery in milliseconds.
    """

    path: str
    reason: str
    items: int = 0
    rolled_back: int = 0
    rolled_forward: int = 0
    clients_retired: int = 0
    priorities_repaired: int = 0
    words_refused: int = 0
    checksum_failed: int = 0
    unverified: int = 0
    epoch: int = 0
    duration_ms: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (f"recovered {self.path}", f"({self.reason}, epoch {self.epoch})"),
            ("items present", f"{self.items:,}"),
            ("rolled back", f"{self.rolled_back:,}"),
            ("rolled forward", f"{self.rolled_forward:,}"),
            ("dead clients reaped", f"{self.clients_retired:,}"),
            ("priorities repaired", f"{self.priorities_repaired:,}"),
            ("slot words refused", f"{self.words_refused:,}"),
            ("checksums that failed", f"{self.checksum_failed:,}"),
            ("kept unverified", f"{self.unverified:,}"),
            ("time", f"{self.duration_ms:.1f} ms"),
        ]
        width = max(len(name) for name, _ in rows[1:])
        title = " ".join(rows[0])
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows[1:])])

    def note(self, control: Control) -> None:
        """Stores the report in the control file, so that later processes can read it."""
        found = self.to_json()
        del found["path"]
        duration_ms = found.pop("duration_ms")
        control.note_recovery(
            {
                **found,
                "at_ns": time.time_ns(),
                "duration_ns": int(duration_ms * 1e6),
                "pid": os.getpid(),
            }
        )
