"""Checks and computes the locations of records in the byte ring (extents)."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.mapped.slots_file import SlotsFile


def find_misplaced(runtime: Any, live: SlotsFile, where: slice, record_bytes: int) -> Flags:
    """Returns a mask of the slots with an item whose record has an impossible location.

    Args:
        runtime: The runtime page. None skips the comparison with the head and tail of the ring.
        live: The slots file.
        where: The range of slots to check.
        record_bytes: Size of the byte ring in bytes.
    """
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
    """Returns a mask of the slots whose record has the header of another item.

    Args:
        live: The slots file.
        record_bytes: Size of the byte ring in bytes.
        records_map: The map of the byte ring.
        placed: Mask of the first slots, True if the location of the slot's record is possible. Only
            these slots are checked. The result has the same length.
    """
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
    """Returns the total size of all items' records in bytes, including padding."""
    return int(padded(live.extents["bytes"][live.committed_slots()].astype(np.int64)).sum())


def padded(sizes: Ints) -> Ints:
    """Rounds sizes up to multiples of 8, because records start at multiples of 8."""
    return (sizes + 7) & ~7


def place_records(sizes: Ints) -> tuple[Ints, int]:
    """Computes the offsets of records that follow each other.

    Returns:
        The offset of each record, int64[n], and the total size in bytes.
    """
    nbytes = padded(sizes)
    return np.cumsum(nbytes) - nbytes, int(nbytes.sum())
