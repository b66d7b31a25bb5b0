"""How far ahead of the writers a draw chooses, so that its items are still there to be read.

        ┌ overwritten next
    head▼    margin      windows to choose from
    ────┼───────────────┼──────────────────────── ... ──┤ newest

Windows within the margin are given up: they would be overwritten before they are read. The margin
is 0 until a draw is overtaken. Then it is as large as what was written meanwhile, and doubles with
each further attempt; each draw halves it.
"""

from __future__ import annotations

from shmbuffer.memory import Ring


class Race:
    """The margin of a sampler. The caller holds the lock of the trajectories."""

    def __init__(self) -> None:
        self._margin = 0  # slots
        self._began = 0, 0

    def begin(self, ring: Ring) -> None:
        """Another draw."""
        self._margin //= 2
        self._began = _moment(ring)

    def is_overtaken(self, ring: Ring) -> None:
        """The choice was overwritten before it was read."""
        before, now = self._began, _moment(ring)
        self._began = now
        # A write into named slots takes the tickets of a lap, and no slot of another item.
        written = (now[0] - before[0]) % ring.capacity
        if written and now[1] != before[1]:
            self._margin = min(max(written, 2 * self._margin), ring.capacity // 2)

    def newest(self, ring: Ring) -> int:
        """How many of the newest slots to choose from."""
        if not self._margin:
            return ring.capacity
        reach = ring.length if ring.schema.record_bytes else ring.capacity
        return max(1, reach - self._margin)


def _moment(ring: Ring) -> tuple[int, int]:
    """The head, and the position of the oldest item."""
    head = ring.head
    if ring.schema.record_bytes:
        return head, int(ring.seat.control.runtime["byte_tail"][0])
    return head, head
