"""Margin between the writers and a draw, so that drawn items are not overwritten before the read.

        ┌ next to be overwritten
    head▼    margin      windows that can be chosen
    ────┼───────────────┼──────────────────────── ... ──┤ newest

Windows within the margin are skipped, because they would be overwritten before they are read. The
margin is 0 until the items of a draw are overwritten before they are read. Then it grows to the
number of slots written during the draw, and doubles with each further attempt. Each new draw halves
the margin.
"""

from __future__ import annotations

from shmbuffer.memory import Ring


class Race:
    """Adapts the margin of a sampler. The caller must hold the lock of the trajectories."""

    def __init__(self) -> None:
        self._margin = 0  # in slots
        self._began = 0, 0

    def begin(self, ring: Ring) -> None:
        """Starts a new draw."""
        self._margin //= 2
        self._began = _moment(ring)

    def is_overtaken(self, ring: Ring) -> None:
        """Records that chosen items were overwritten before they were read."""
        before, now = self._began, _moment(ring)
        self._began = now
        # A write to explicit slots advances the head by the capacity, but overwrites nothing else.
        written = (now[0] - before[0]) % ring.capacity
        if written and now[1] != before[1]:
            self._margin = min(max(written, 2 * self._margin), ring.capacity // 2)

    def newest(self, ring: Ring) -> int:
        """Returns the number of newest slots from which to choose."""
        if not self._margin:
            return ring.capacity
        reach = ring.length if ring.schema.record_bytes else ring.capacity
        return max(1, reach - self._margin)


def _moment(ring: Ring) -> tuple[int, int]:
    """Returns the head and the position of the oldest item."""
    head = ring.head
    if ring.schema.record_bytes:
        return head, int(ring.seat.control.runtime["byte_tail"][0])
    return head, head
