"""Finds clients with reservations, without a lock, for messages and for the live view."""

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
    """A client that holds reservations."""

    entry: int  # in the registry
    pid: int
    reservations: int  # how many
    items: int
    nbytes: int  # of the byte ring
    oldest_s: float  # age of its oldest reservation


def table_of(seat: Seat) -> NDArray[Any]:
    """Returns a live view of all reservations; empty before the first reservation."""
    if seat.mapped is None:
        return np.empty(0, ledger.RESERVATION)
    return ledger.reservations(seat.mapped.ledger)


def holders(table: NDArray[Any], entries: Any, width: int = 1) -> list[Holder]:
    """Returns the clients that hold reservations, sorted by the number of items, largest first."""
    held = table[(table["state"] == ReservationState.OPEN)]
    now, found = _core.boot_ns(), []
    for entry in np.unique(held["entry"][held["entry"] < layout.ENTRIES]):
        its = held[held["entry"] == entry]
        its = its[its["incarnation"] == entries["incarnation"][entry]]
        if len(its):
            found.append(
                Holder(
                    int(entry),
                    int(entries["pid"][entry]),
                    len(its),
                    int(its["rows"].sum()) * width,
                    int(its["bytes"].sum()),
                    max(0, now - int(its["since_ns"].min())) / 1e9,
                )
            )
    return sorted(found, key=lambda one: -one.items)


def describe_holders(found: list[Holder]) -> str:
    """Returns "pid 12 holds 3 reservations of 96 items", or "" if there is no reservation."""
    if not found:
        return ""
    first = found[0]
    what = "a reservation" if first.reservations == 1 else f"{first.reservations} reservations"
    text = f"pid {first.pid} holds {what} of {first.items:,} items"
    if len(found) == 1:
        return text
    rest = sum(one.items for one in found[1:])
    others = "another process" if len(found) == 2 else f"{len(found) - 1} other processes"
    return f"{text}, and {others} {rest:,}"
