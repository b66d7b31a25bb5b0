"""Adapts how far a draw stays away from the items that writers overwrite next.

        ┌ next to be overwritten
    head▼    margin      windows that can be chosen
    ────┼───────────────┼──────────────────────── ... ──┤ newest

Windows within the margin are skipped, because they would be overwritten before they are read. The
margin is 0 at first. When items of a draw are overwritten before they are read, the margin becomes
the number of slots written during the draw, and doubles with each further attempt. Each new draw
halves the margin.
"""

from __future__ import annotations

from shmbuffer.memory import Ring


class Race:
    """The margin of one sampler. The caller must hold `Boundaries.lock`."""

    def __init__(self) -> None:
        self._margin = 0  # number of slots
        self._began = 0, 0  # head and oldest position when the draw began

    def begin(self, ring: Ring) -> None:
        """Records the start of a draw, and halves the margin."""
        self._margin //= 2
        self._began = _positions(ring)

    def record_overtaken(self, ring: Ring) -> None:
        """Widens the margin, because drawn items were overwritten before they were read."""
        before, now = self._began, _positions(ring)
        self._began = now
        # A write to explicit indices advances the head by the capacity, but overwrites only the
        # items at these indices. The remainder therefore does not count such writes.
        written = (now[0] - before[0]) % ring.capacity
        if written and now[1] != before[1]:
            self._margin = min(max(written, 2 * self._margin), ring.capacity // 2)

    def newest(self, ring: Ring) -> int:
        """Returns the number of newest slots from which windows can be chosen."""
        if not self._margin:
            return ring.capacity
        reach = ring.length if ring.schema.record_bytes else ring.capacity
        return max(1, reach - self._margin)


def _positions(ring: Ring) -> tuple[int, int]:
    """Returns the head, and a position that increases whenever the oldest items are overwritten.

    The latter is the position of the oldest record, or the head in a ring of rows.
    """
    head = ring.head
    if ring.schema.record_bytes:
        return head, int(ring.seat.control.runtime["byte_tail"][0])
    return head, head
