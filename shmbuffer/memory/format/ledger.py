"""The ledger: a file with the reservations, and with the items that consumers have received.

    page | reservations | leases and deliveries of consumer 0 | of consumer 1 ...
    └ always allocated  └ each section is allocated under init.lock by its first user

Every handle maps the ledger with its maximum length from the start, beyond the end of the file. The
field ``bytes`` of the first page is the length that is in use. No process reads or writes beyond
this length.

Always true: ``bytes`` is stored after the file has been extended to this length, and the file is
never shortened.
If a process dies while it extends the file: the new space is not used, and the next process that
needs the section allocates it again.
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

# The maximum numbers of consumers, leases per consumer, and reservations.
CONSUMERS, LEASES, RESERVATIONS = 8, 1024, 4096
CONSUMES, NAME_BYTES = 1, 48
CONSUMER = make_core_dtype("consumer", 256, u4="state times holds", name=f"S{NAME_BYTES}")

# A lease: items that were delivered together to one client.
LEASE = make_core_dtype("lease", 64, u4="entry")

# Space that a client has reserved for later items.
RESERVATION = make_core_dtype("reservation", 64, u4="entry state flags")

# A delivery: the state of a slot's item for one consumer.
DELIVERY = make_core_dtype("delivery", 16)
LEASE_BITS, MOST_ACKS, LEASED = 53, 1023, 2**63

HEAD = make_core_dtype("ledger", layout.PAGE, consumers=f"V{CONSUMERS * CONSUMER.itemsize}")


class LeasedItems(NamedTuple):
    """Items that were delivered together under one lease."""

    slots: Ints
    tickets: Ints
    lease: int  # number of the lease; 0 if there are no items


class Acknowledged(NamedTuple):
    """The result of acknowledging items."""

    applied: int
    """Number of items that were acknowledged under the lease with which they were delivered."""
    refused: int
    """Number of items that were acknowledged too late, after the lease had ended.

    Such an item may have been delivered to another client, or it was overwritten.
    """


class ItemStates(NamedTuple):
    """The states of all slots' items from the point of view of one client of a consumer."""

    states: Bytes
    """The state of each item, from `NO_ITEM` to `COMPLETE` (``enum shmb_item_state``)."""
    tickets: Ints
    """The ticket of each item."""
    notes: NDArray[np.uint64]
    """The lease and the number of acknowledgements of each item, as the ledger stores them."""

    @property
    def leases(self) -> NDArray[np.uint64]:
        """Returns the number of each item's current or last lease, or 0 if it never had a lease."""
        return self.notes & np.uint64(2**LEASE_BITS - 1)

    @property
    def acks(self) -> Ints:
        """Returns the number of acknowledgements of each item. Not valid for `COMPLETE` items."""
        return (self.notes >> np.uint64(LEASE_BITS)).astype(np.int64)


NO_ITEM, DELIVERABLE, LEASED_HERE, LEASED_ELSEWHERE, COMPLETE = range(5)
"""The values of `ItemStates.states`."""


class ReservationState(IntEnum):
    """The state of an entry in the table of reservations."""

    UNRESERVED = 0
    OPEN = 1
    CLAIMED = 2
    DONE = 3


def require_length(fd: int, where: Path) -> None:
    """Raises CorruptBufferError if a ledger's file is shorter than the length in its first page."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, layout.PAGE, 0)
    needed = layout.PAGE
    if len(data) == layout.PAGE:
        needed = max(needed, int(np.frombuffer(data, HEAD)["bytes"][0]))
    if size < needed:
        raise wrong_size(where, f"at least {needed}", needed, size)


def reservations(mapped: _core.Map) -> NDArray[Any]:
    """Returns a view of the reservations in shared memory.

    The view is empty if their section has not been allocated yet.
    """
    start = _core.parts(1)["reservations"]
    end = start + RESERVATIONS * RESERVATION.itemsize
    if int(np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"][0]) < end:
        return np.empty(0, RESERVATION)
    table: NDArray[Any] = np.frombuffer(memoryview(mapped), RESERVATION, RESERVATIONS, start)
    return table


def read_reservations(fd: int) -> NDArray[Any]:
    """Reads the reservations from a ledger's file."""
    data = os.pread(fd, RESERVATIONS * RESERVATION.itemsize, _core.parts(1)["reservations"])
    count = len(data) // RESERVATION.itemsize
    table: NDArray[Any] = np.frombuffer(data, RESERVATION, count)
    return table


def store_length(mapped: _core.Map, nbytes: int) -> None:
    """Stores the length of an extended ledger in its first page. The caller must hold init.lock."""
    head = np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"]
    if head[0] < nbytes:
        head[0] = nbytes
    _core.reached("ledger.extended")


def end_reservations(mapped: _core.Map, runtime: NDArray[Any]) -> None:
    """Ends all reservations during a recovery, except those whose items were committed."""
    table = reservations(mapped)
    table["state"][table["state"] != ReservationState.DONE] = ReservationState.UNRESERVED
    _core.reached("recover.reservations")
    last = max(int(runtime["next_reservation"][0]), int(table["id"].max(initial=0)))
    runtime["next_reservation"] = last
    _core.reached("recover.reservations")


def consumers(content: Any) -> Any:
    """Returns a view of the consumers in the buffer ``content``, a mapped ledger."""
    return np.frombuffer(content, CONSUMER, CONSUMERS)


def open_leases(content: Any, which: int, capacity: int) -> Any:
    """Returns a copy of the open leases of the consumer with the index ``which``.

    Returns None if the section of this consumer has not been allocated yet.

    Args:
        content: The content of a ledger, as a buffer.
        which: Index of the consumer in the table of consumers.
        capacity: Number of slots of the ring.
    """
    parts, length = _core.parts(capacity), int(np.frombuffer(content, HEAD, 1)["bytes"][0])
    available = min(length, memoryview(content).nbytes)
    start = parts["consumers"] + which * parts["each"]
    if available < start + parts["each"]:
        return None
    leases = np.frombuffer(content, LEASE, LEASES, start)
    # The comparison makes a copy. Without it, `nonzero` would read the shared memory twice, and
    # other processes may change it in between.
    used = (leases["id"] != 0).nonzero()[0]
    return leases[used]
