"""Copies a consistent snapshot of a ring while other clients continue to write."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.progress import Progress

# The maximum number of rounds without a lock. Then the number of slots per native call, because
# signals are handled only between calls. Last, the number of changed slots that can remain for the
# round under the mutex.
_COPY_ROUNDS = 8
_COPY_SLOTS = 65536
_COPY_LOCKED = 256


class ItemSnapshot(NamedTuple):
    """A consistent snapshot of a ring, without the bytes of its items."""

    tickets: Ints
    """Ticket of each slot's item, int64[capacity], or -1 if the slot has no item."""
    sources: NDArray[np.uint64]
    """Writer and stream of each slot's item, uint64[capacity] (`layout.source_of`)."""
    priorities: Floats
    """Raw priority of each element, float64[elements], or NaN if it has no priority."""
    head: int
    """The next ticket."""
    write_count: int
    """Number of elements that were written so far."""
    max_priority: float | None
    """Largest raw priority that was ever set, or None if no priority was set."""
    extents: NDArray[Any] | None = None
    """Location of each slot's record, `layout.EXTENT` [capacity]. None without a byte ring."""
    byte_tail: int = 0
    """Position of the tail of the byte ring."""
    byte_head: int = 0
    """Position of the head of the byte ring."""

    @property
    def used(self) -> int:
        """Number of slots up to and including the last slot with an item."""
        occupied = np.flatnonzero(self.tickets >= 0)
        return int(occupied[-1]) + 1 if len(occupied) else 0


class _LiveReads:
    """Type of the constant `LIVE_READS`."""

    def __repr__(self) -> str:
        return "LIVE_READS"


LIVE_READS: Final = _LiveReads()
"""Stands for a snapshot if the live ring is saved instead of a copy, while clients use it."""


def copy_rows(calls: Calls, out: tuple[int, ...], length: int) -> ItemSnapshot:
    """Copies all rows of a ring (`Ring.copy_out`).

    Several rounds copy the slots that have changed since the previous round, without a lock. When
    only a few such slots remain, they are copied under the mutex, together with the counters. The
    snapshot contains the state of the ring at this time.

    Args:
        calls: The native calls of the ring.
        out: Address of the destination for each leaf.
        length: Number of elements with an item, for the progress report.
    """
    seat, schema = calls.seat, calls.schema
    capacity, width = schema.capacity, schema.width
    tickets = np.full(capacity, -1, np.int64)
    raw, sources = np.full(schema.elements, np.nan), np.zeros(capacity, np.uint64)
    tickets_address, sources_address = tickets.ctypes.data, sources.ctypes.data
    slot_bytes = sum(schema.leaf_bytes) // capacity if out else 0
    with Progress("copy", length // width * slot_bytes) as progress:
        for _ in range(_COPY_ROUNDS):
            changed = 0
            used = min(int(seat.native.head), capacity)  # later slots have never been written
            for first, count in progress.cut(used, slot_bytes, _COPY_SLOTS):
                copied = seat.native.copy_slots(first, count, out, tickets_address)
                progress.advance(copied * slot_bytes)
                changed += copied
            if changed <= _COPY_LOCKED:
                break
    head, write_count, greatest = calls.answer(
        lambda: seat.native.finish_snapshot(
            out, tickets_address, sources_address, raw.ctypes.data, LOCK_TIMEOUT_NS
        ),
        "copy_out",
    )
    used = min(head, capacity)
    raw[: used * width][np.repeat(tickets[:used] < 0, width)] = np.nan
    return ItemSnapshot(
        tickets, sources, raw, head, write_count, greatest if greatest >= 0 else None
    )
