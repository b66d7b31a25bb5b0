"""The ledger: who was given which items. One page, and what is in use behind it.

    page | reservations | leases and deliveries of consumer 0 | of consumer 1 ...
    ├─ always there ─┤ ├─ room is taken under init.lock by who needs a part first ─┤

Every handle maps all of it from the start, also what the file does not have yet. ``bytes`` of the
page says how far it reaches, and nobody looks behind that.

Always true: ``bytes`` is stored after the file has them, and the file never gets shorter.
If a process dies in it: room that nobody looks at, or takes again.
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
from shmbuffer.memory.format.layout import of_core
from shmbuffer.memory.system.path_checks import wrong_size

#: Of the ledger: who consumes.
CONSUMERS, LEASES, RESERVATIONS = 8, 1024, 4096
CONSUMES, NAME_BYTES = 1, 48
CONSUMER = of_core("consumer", 256, u4="state times holds", name=f"S{NAME_BYTES}")

#: Some items, and who was given them.
LEASE = of_core("lease", 64, u4="entry")

#: Room that a client has reserved for later items.
RESERVATION = of_core("reservation", 64, u4="entry state flags")

#: What a consumer has noted of a slot.
DELIVERY = of_core("delivery", 16)
LEASE_BITS, MOST_ACKS, LEASED = 53, 1023, 2**63

HEAD = of_core("ledger", layout.PAGE, consumers=f"V{CONSUMERS * CONSUMER.itemsize}")


class Taken(NamedTuple):
    """Items under one lease."""

    slots: Ints
    tickets: Ints
    lease: int  # 0: there are none


class Acknowledged(NamedTuple):
    """The result of an acknowledgement."""

    applied: int
    """Items that are done, under the lease that they came with."""
    refused: int
    """Items that came too late: others have been given them since, or they are gone."""


class Standings(NamedTuple):
    """The state of each slot's item for a consumer; see ``enum shmb_item_state``."""

    states: Bytes
    tickets: Ints
    notes: NDArray[np.uint64]
    """The lease that it is under, or was last, and how often it was acknowledged."""

    @property
    def leases(self) -> NDArray[np.uint64]:
        """The lease that each item is under, or was last; 0: none."""
        return self.notes & np.uint64(2**LEASE_BITS - 1)

    @property
    def acks(self) -> Ints:
        """How often each item was acknowledged; unknown for `DONE` ones."""
        return (self.notes >> np.uint64(LEASE_BITS)).astype(np.int64)


NO_ITEM, TO_GIVE, HELD_HERE, HELD_THERE, DONE = range(5)
"""In `Standings.states`."""


class ReservationState(IntEnum):
    """State of a reservation."""

    UNRESERVED = 0
    OPEN = 1
    CLAIMED = 2
    DONE = 3


def require_length(fd: int, where: Path) -> None:
    """Raises CorruptBufferError where a ledger is shorter than it says."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, layout.PAGE, 0)
    needed = layout.PAGE
    if len(data) == layout.PAGE:
        needed = max(needed, int(np.frombuffer(data, HEAD)["bytes"][0]))
    if size < needed:
        raise wrong_size(where, f"at least {needed}", needed, size)


def reservations(mapped: _core.Map) -> NDArray[Any]:
    """Returns all of them, live; none where the ledger does not reach so far yet."""
    start = _core.parts(1)["reservations"]
    end = start + RESERVATIONS * RESERVATION.itemsize
    if int(np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"][0]) < end:
        return np.empty(0, RESERVATION)
    table: NDArray[Any] = np.frombuffer(memoryview(mapped), RESERVATION, RESERVATIONS, start)
    return table


def read_reservations(fd: int) -> NDArray[Any]:
    """Returns a copy of those in the file."""
    data = os.pread(fd, RESERVATIONS * RESERVATION.itemsize, _core.parts(1)["reservations"])
    count = len(data) // RESERVATION.itemsize
    table: NDArray[Any] = np.frombuffer(data, RESERVATION, count)
    return table


def note_bytes(mapped: _core.Map, nbytes: int) -> None:
    """The file has so many bytes by now; under init.lock."""
    head = np.frombuffer(memoryview(mapped), HEAD, 1)["bytes"]
    if head[0] < nbytes:
        head[0] = nbytes
    _core.reached("ledger.extended")


def end_reservations(mapped: _core.Map, runtime: NDArray[Any]) -> None:
    """For recovery: nobody holds any more, and what was committed is not committed once more."""
    table = reservations(mapped)
    table["state"][table["state"] != ReservationState.DONE] = ReservationState.UNRESERVED
    _core.reached("recover.reservations")
    last = max(int(runtime["next_reservation"][0]), int(table["id"].max(initial=0)))
    runtime["next_reservation"] = last
    _core.reached("recover.reservations")


def consumers(content: Any) -> Any:
    """Returns the consumers in a ledger that is mapped, live."""
    return np.frombuffer(content, CONSUMER, CONSUMERS)


def open_leases(content: Any, which: int, capacity: int) -> Any:
    """A copy of the leases in use of one consumer; None if the ledger has no room for it yet."""
    parts, said = _core.parts(capacity), int(np.frombuffer(content, HEAD, 1)["bytes"][0])
    reaches = min(said, memoryview(content).nbytes)
    start = parts["consumers"] + which * parts["each"]
    if reaches < start + parts["each"]:
        return None
    leases = np.frombuffer(content, LEASE, LEASES, start)
    used = (leases["id"] != 0).nonzero()[0]  # of a copy: numpy looks twice
    return leases[used]
