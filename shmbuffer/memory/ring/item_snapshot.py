"""Copies the state of a ring at one point in time."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.memory.system.progress import Progress

# Limits of a copy: the rounds without a lock, and the slots that are copied between checks of
# signals. The last number is that of changed slots that may remain for the copy under the mutex.
_COPY_ROUNDS = 8
_COPY_SLOTS = 65536
_COPY_LOCKED = 256


class ItemSnapshot(NamedTuple):
    """State of a ring at one point in time, without the bytes of its items."""

    tickets: Ints
    """int64[capacity]: the ticket of the item in each slot; -1 if the slot has no item."""
    sources: NDArray[np.uint64]
    """uint64[capacity]: writer and stream of each item, see `layout.source_of`."""
    priorities: Floats
    """float64[elements]: raw priorities; NaN if an element has no priority."""
    head: int
    """The next ticket."""
    write_count: int
    """The number of elements written so far."""
    max_priority: float | None
    """The largest raw priority ever set; None before the first."""
    extents: NDArray[Any] | None = None
    """`layout.EXTENT` [capacity]: the place of each record in the byte ring; None for rows."""
    byte_tail: int = 0
    """The position of the oldest record."""
    byte_head: int = 0
    """The position of the next record."""

    @property
    def used(self) -> int:
        """The number of slots up to the last one that contains an item."""
        occupied = np.flatnonzero(self.tickets >= 0)
        return int(occupied[-1]) + 1 if len(occupied) else 0


class _LiveReads:
    """The class of `LIVE_READS`."""

    def __repr__(self) -> str:
        return "LIVE_READS"


LIVE_READS: Final = _LiveReads()
"""Replaces a snapshot if the ring itself is saved while clients continue to use the ring."""


def copy_rows(calls: Calls, out: tuple[int, ...], length: int) -> ItemSnapshot:
    """Copies the rows of a ring to one address for each leaf; see `Ring.copy_out`.

    Slots that changed since the last round are copied again, without a lock. When only a few such
    slots remain, they are copied under the mutex, together with the counters. The snapshot contains
    the state at that time.
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
            used = min(int(seat.native.head), capacity)  # no later slot was ever written
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
