"""Margin between the writers and a draw, so that drawn items are not overwritten before the read.

        ┌ overwritten next
    head▼    margin      windows to choose from
    ────┼───────────────┼──────────────────────── ... ──┤ newest

Windows within the margin are given up, because they would be overwritten before they are read. The
margin is 0 until a draw is overtaken. Then it grows to the number of slots written meanwhile, and
doubles with each further attempt. Each draw halves it.
"""

from __future__ import annotations

from shmbuffer.memory import Ring


class Race:
    """Margin of a sampler. The caller holds the lock of the trajectories."""

    def __init__(self) -> None:
        self._margin = 0  # in slots
        self._began = 0, 0

    def begin(self, ring: Ring) -> None:
        """Starts another draw."""
        self._margin //= 2
        self._began = _moment(ring)

    def is_overtaken(self, ring: Ring) -> None:
        """Notes that the choice was overwritten before it was read."""
        before, now = self._began, _moment(ring)
        self._began = now
        # A write at given slots uses the tickets of a lap, but overwrites no other item.
        written = (now[0] - before[0]) % ring.capacity
        if written and now[1] != before[1]:
            self._margin = min(max(written, 2 * self._margin), ring.capacity // 2)

    def newest(self, ring: Ring) -> int:
        """Returns how many of the newest slots to choose from."""
        if not self._margin:
            return ring.capacity
        reach = ring.length if ring.schema.record_bytes else ring.capacity
        return max(1, reach - self._margin)


def _moment(ring: Ring) -> tuple[int, int]:
    """Returns the head, and the position of the oldest item."""
    head = ring.head
    if ring.schema.record_bytes:
        return head, int(ring.seat.control.runtime["byte_tail"][0])
    return head, head
