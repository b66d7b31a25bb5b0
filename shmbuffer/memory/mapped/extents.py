"""Checks and measures the places of records, using the slots file."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.mapped.slots_file import SlotsFile


def find_misplaced(runtime: Any, live: SlotsFile, where: slice, record_bytes: int) -> Flags:
    """Returns a mask of the slots whose item has an impossible place of its record."""
    position, nbytes = live.extents["position"][where], live.extents["bytes"][where]
    wrong = (nbytes < layout.RECORD.itemsize) | (nbytes > record_bytes) | (position % 8 != 0)
    wrong |= position > np.uint64(2**62)
    if runtime is not None:
        tail, head = int(runtime["byte_tail"]), int(runtime["byte_head"])
        wrong |= (position < tail) | (position + nbytes > head)
        wrong |= head - tail > record_bytes
    found: Flags = wrong & live.holds(where)
    return found


def find_mismatched(live: SlotsFile, record_bytes: int, records_map: Any, placed: Flags) -> Flags:
    """Returns a mask of the first slots: True if the record has the header of another item."""
    held = (placed & live.holds(slice(len(placed)))).nonzero()[0]
    extents = live.extents[held]
    numbers = np.frombuffer(records_map, np.uint64)
    at = (extents["position"] % np.uint64(record_bytes)).astype(np.int64) // 8
    wrong = np.zeros(len(placed), np.bool_)
    wrong[held] = (
        (numbers[at] != slots.tickets(live.words[held]).astype(np.uint64))
        | (numbers[at + 1] != extents["position"])
        | (numbers[at + 2] != extents["bytes"])
    )
    return wrong


def live_bytes(live: SlotsFile) -> int:
    """Returns the bytes of the records of all items."""
    return int(padded(live.extents["bytes"][live.committed_slots()].astype(np.int64)).sum())


def padded(sizes: Ints) -> Ints:
    """Rounds the sizes of records up to multiples of 8."""
    return (sizes + 7) & ~7


def place_records(sizes: Ints) -> tuple[Ints, int]:
    """Returns the start of each record, one after the other, and their total size in bytes."""
    nbytes = padded(sizes)
    return np.cumsum(nbytes) - nbytes, int(nbytes.sum())
