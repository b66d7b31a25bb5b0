"""The report of a recovery, for people and for later reading."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from shmbuffer.memory.mapped.control import Control


@dataclass(frozen=True)
class RecoveryReport:
    """The findings and the actions of a recovery.

    Attributes:
        path: the directory.
        reason: ``"no client alive"``, ``"reboot"``, ``"copy"`` or ``"restored"``; ``"in use"`` of a
            private copy.
        items: elements that are there now.
        rolled_back: elements of batches that their writers had not finished; their slots are free.
        rolled_forward: elements of batches that were written whole but not all marked as committed.
        clients_retired: registry entries of dead clients.
        priorities_repaired: invalid raw priorities, which are the default now.
        words_refused: slots with an impossible word.
        checksum_failed: elements whose bytes did not match their checksum; they were dropped.
        unverified: elements kept without a checksum, because the buffer was made without.
        epoch: number of recoveries of this directory, this one included.
        duration_ms: how long it took.
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
        """Converts to a dict of plain values."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (f"recovered {self.path}", f"({self.reason}, epoch {self.epoch})"),
            ("items present", f"{self.items:,}"),
            ("rolled back", f"{self.rolled_back:,}"),
            ("rolled forward", f"{self.rolled_forward:,}"),
            ("dead clients retired", f"{self.clients_retired:,}"),
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
        """Returns plain values for `last_recovery`, which outlives a coordinator's log."""
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
