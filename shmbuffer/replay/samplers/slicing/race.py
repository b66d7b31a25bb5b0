"""How far ahead of the writers a draw chooses, so that it reads what it chose.

        ┌ the next slots that are written over
    head▼    margin      windows that are chosen
    ────┼───────────────┼──────────────────────── ... ──┤ newest

Windows within the margin are lost: they would be written over before they are read. There is none
until a draw was overtaken. Then it is what was written meanwhile, doubled with each attempt that
follows; each draw halves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmbuffer.memory import Ring


class Race:
    """One sampler's margin. The caller holds the lock of the trajectories."""

    def __init__(self) -> None:
        self._margin = 0  # slots
        self._began = 0, 0

    def begin(self, ring: Ring) -> None:
        """Another draw."""
        self._margin //= 2
        self._began = _moment(ring)

    def is_overtaken(self, ring: Ring) -> None:
        """What was chosen was written over before it was read."""
        before, now = self._began, _moment(ring)
        self._began = now
        # A write into named slots takes the tickets of a lap, and no slot of another item.
        written = (now[0] - before[0]) % ring.capacity
        if written and now[1] != before[1]:
            self._margin = min(max(written, 2 * self._margin), ring.capacity // 2)

    def newest(self, ring: Ring) -> int:
        """So many slots, the newest ones, are chosen from."""
        if not self._margin:
            return ring.capacity
        reach = ring.length if ring.schema.record_bytes else ring.capacity
        return max(1, reach - self._margin)


def _moment(ring: Ring) -> tuple[int, int]:
    """The head, and how far the oldest items have gone."""
    head = ring.head
    if ring.schema.record_bytes:
        return head, int(ring.seat.control.runtime["byte_tail"][0])
    return head, head
