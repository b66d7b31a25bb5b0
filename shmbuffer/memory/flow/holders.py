"""Finds the clients that hold reservations, for error messages and for ``shmbuffer top``.

The table of reservations is read without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import layout, ledger
from shmbuffer.memory.format.ledger import ReservationState


@dataclass(frozen=True)
class Holder:
    """A client that holds reservations, and the space that it has reserved."""

    entry: int  # index in the registry
    pid: int
    reservations: int  # number of reservations
    items: int  # number of reserved items
    nbytes: int  # number of reserved bytes in the byte ring
    oldest_s: float  # age of the oldest reservation in seconds


def table_of(seat: Seat) -> NDArray[Any]:
    """Returns the table of reservations in shared memory. Empty before the first reservation."""
    if seat.mapped is None:
        return np.empty(0, ledger.RESERVATION)
    return ledger.reservations(seat.mapped.ledger)


def holders(table: NDArray[Any], entries: Any, width: int = 1) -> list[Holder]:
    """Returns the clients that hold reservations, sorted by the number of items, largest first.

    Args:
        table: The table of reservations.
        entries: The entries of the registry.
        width: The number of items in a slot.
    """
    reserved = table[(table["state"] == ReservationState.OPEN)]
    now, found = _core.boot_ns(), []
    for entry in np.unique(reserved["entry"][reserved["entry"] < layout.ENTRIES]):
        own = reserved[reserved["entry"] == entry]
        own = own[own["incarnation"] == entries["incarnation"][entry]]
        if len(own):
            found.append(
                Holder(
                    int(entry),
                    int(entries["pid"][entry]),
                    len(own),
                    int(own["rows"].sum()) * width,
                    int(own["bytes"].sum()),
                    max(0, now - int(own["since_ns"].min())) / 1e9,
                )
            )
    return sorted(found, key=lambda holder: -holder.items)


def describe_holders(found: list[Holder]) -> str:
    """Returns text like "pid 12 holds 3 reservations of 96 items", or "" for an empty list."""
    if not found:
        return ""
    first = found[0]
    what = "a reservation" if first.reservations == 1 else f"{first.reservations} reservations"
    text = f"pid {first.pid} holds {what} of {first.items:,} items"
    if len(found) == 1:
        return text
    rest = sum(holder.items for holder in found[1:])
    others = "another process" if len(found) == 2 else f"{len(found) - 1} other processes"
    return f"{text}, and {others} {rest:,}"
