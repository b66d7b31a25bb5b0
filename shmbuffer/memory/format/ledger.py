"""The ledger: reservations, and the items that consumers have been given.

    page | reservations | leases and deliveries of consumer 0 | of consumer 1 ...
    ├─ always there ─┤ ├─ allocated under init.lock by the first client that needs a part ─┤

Every handle maps the largest possible ledger from the start, beyond the end of the file. ``bytes``
of the page is the length in use, and no process reads or writes beyond it.

Always true: ``bytes`` is stored after the file has that length, and the file never becomes shorter.
If a process dies while it extends the file: the new space is unused, and is allocated again.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.layout import make_core_dtype
from shmbuffer.memory.system.path_checks import wrong_size

# The table of consumers, and the sizes of the other tables.
CONSUMERS, LEASES, RESERVATIONS = 8, 1024, 4096
CONSUMES, NAME_BYTES = 1, 48
CONSUMER = make_core_dtype("consumer", 256, u4="state times holds", name=f"S{NAME_BYTES}")

# A lease: items that one client was given together.
LEASE = make_core_dtype("lease", 64, u4="entry")

# Space that a client has reserved for later items.
RESERVATION = make_core_dtype("reservation", 64, u4="entry state flags")

# The notes of a consumer about a slot.
DELIVERY = make_core_dtype("delivery", 16)
LEASE_BITS, MOST_ACKS, LEASED = 53, 1023, 2**63

HEAD = make_core_dtype("ledger", layout.PAGE, consumers=f"V{CONSUMERS * CONSUMER.itemsize}")


class LeasedItems(NamedTuple):
    """Items under one lease."""

    slots: Ints
    tickets: Ints
    lease: int  # 0 if there are no items


class Acknowledged(NamedTuple):
    """The result of an acknowledgement."""

    applied: int
    """Items that are done under the lease with which they were given."""
    refused: int
    """Items that were acknowledged too late: another client has them, or they are gone."""


class ItemStates(NamedTuple):
    """The state of each slot's item for a consumer; ``enum shmb_item_state`` has the values."""

    states: Bytes
    tickets: Ints
    notes: NDArray[np.uint64]
    """The current or last lease of each item, and how often the item was acknowledged."""

    @property
    def leases(self) -> NDArray[np.uint64]:
        """Returns the current or last lease of each item; 0 if it never had one."""
        return self.notes & np.uint64(2**LEASE_BITS - 1)

    @property
    def acks(self) -> Ints:
        """Returns how often each item was acknowledged; unknown for `COMPLETE` items."""
        return (self.notes >> np.uint64(LEASE_BITS)).astype(np.int64)


NO_ITEM, DELIVERABLE, LEASED_HERE, LEASED_ELSEWHERE, COMPLETE = range(5)
"""The values of `ItemStates.states`."""


class ReservationState(IntEnum):
    """The state of a reservation."""

    UNRESERVED = 0
    OPEN = 1
    CLAIMED = 2
    DONE = 3


def require_length(fd: int, where: Path) -> None:
    """Raises CorruptBufferError if a ledger is shorter than its page says."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, layout.PAGE, 0)
    needed = layout.PAGE
    if len(data) == layout.PAGE:
        needed = max(needed, int(np.frombuffer(data, HEAD)["bytes"][0]))
    if size < needed:
        raise wrong_size(where, f"at least {needed}", needed, size)


def reservations(mapped: _core.Map) -> NDArray[Any]:
    """Returns a live view of all reservations; empty if the ledger has no space for them yet."""
    start = _core.parts(1)["reservations"]
    end = start + RESERVATIONS * RESERVATION.itemsize
    if int(np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"][0]) < end:
        return np.empty(0, RESERVATION)
    table: NDArray[Any] = np.frombuffer(memoryview(mapped), RESERVATION, RESERVATIONS, start)
    return table


def read_reservations(fd: int) -> NDArray[Any]:
    """Returns a copy of the reservations in a file."""
    data = os.pread(fd, RESERVATIONS * RESERVATION.itemsize, _core.parts(1)["reservations"])
    count = len(data) // RESERVATION.itemsize
    table: NDArray[Any] = np.frombuffer(data, RESERVATION, count)
    return table


def store_length(mapped: _core.Map, nbytes: int) -> None:
    """Stores the new length of the file; the caller holds init.lock."""
    head = np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"]
    if head[0] < nbytes:
        head[0] = nbytes
    _core.reached("ledger.extended")


def end_reservations(mapped: _core.Map, runtime: NDArray[Any]) -> None:
    """Ends all reservations in a recovery, except for those whose items were committed."""
    table = reservations(mapped)
    table["state"][table["state"] != ReservationState.DONE] = ReservationState.UNRESERVED
    _core.reached("recover.reservations")
    last = max(int(runtime["next_reservation"][0]), int(table["id"].max(initial=0)))
    runtime["next_reservation"] = last
    _core.reached("recover.reservations")


def consumers(content: Any) -> Any:
    """Returns a live view of the consumers in a mapped ledger."""
    return np.frombuffer(content, CONSUMER, CONSUMERS)


def open_leases(content: Any, which: int, capacity: int) -> Any:
    """Returns a copy of one consumer's leases; None if the ledger has no space for it yet."""
    parts, length = _core.parts(capacity), int(np.frombuffer(content, HEAD, 1)["bytes"][0])
    available = min(length, memoryview(content).nbytes)
    start = parts["consumers"] + which * parts["each"]
    if available < start + parts["each"]:
        return None
    leases = np.frombuffer(content, LEASE, LEASES, start)
    used = (leases["id"] != 0).nonzero()[0]  # of a copy, because numpy reads the array twice
    return leases[used]
