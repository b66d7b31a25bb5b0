"""Reads the status of a ring's consumers without a lock, for monitoring and error messages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from shmbuffer._native import _core
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import ledger
from shmbuffer.memory.format.layout import EntryState
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.mapped.native import Mapped


class HeldItems(NamedTuple):
    """The items that a client holds under one lease."""

    pid: int
    items: int
    """Number of items that are not acknowledged yet."""
    held_s: float
    """Seconds since the items were delivered."""
    ends_in_s: float
    """Seconds until the lease expires; inf if it has no time limit.

    The value is 0 if the lease has expired or its holder is no longer attached. The next sample
    then gets the items.
    """
    entry: int
    """The registry entry of the handle that holds the items."""
    lease: int
    """The number of the lease, as in the entry ``"index_lease"`` of a batch."""


class ConsumerStatus(NamedTuple):
    """The status of a consumer."""

    name: str
    max_sample_count: int
    """Number of times that each item must be acknowledged."""
    holds: bool
    """True if writers wait for the consumer."""
    position: int
    """Ticket of the next item to deliver for the first time."""
    floor: int
    """Ticket of the oldest item that is not acknowledged. All earlier items are done."""
    behind: int
    """Number of tickets from ``floor`` to the newest item."""
    delivered: int
    """Number of items delivered since the consumer was created."""
    acked: int
    """Number of items acknowledged."""
    redelivered: int
    """Number of items delivered again because their holder died or their lease expired."""
    refused: int
    """Number of acknowledgements that were rejected because they were too late."""
    dropped: int
    """Number of items that were marked as done without a delivery."""
    leases: tuple[HeldItems, ...]
    """The items that learners hold, per lease."""

    @property
    def held(self) -> int:
        """Number of items that learners hold."""
        return sum(lease.items for lease in self.leases)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict that can be written as JSON; ``ends_in_s`` is None instead of inf."""
        leases = [
            {
                **lease._asdict(),
                "ends_in_s": lease.ends_in_s if lease.ends_in_s < math.inf else None,
            }
            for lease in self.leases
        ]
        return {**self._asdict(), "held": self.held, "leases": leases}


COUNTS = ("delivered", "acked", "redelivered", "refused", "dropped")


def parse_consumers(content: Any, capacity: int, head: int, entries: Any) -> list[ConsumerStatus]:
    """Reads the status of every consumer from the content of a ledger, without a lock.

    Args:
        content: The ledger, mapped or copied.
        capacity: The capacity of the ring in slots.
        head: The head of the ring, which is the ticket of the next write.
        entries: The entries of the registry.
    """
    if memoryview(content).nbytes < ledger.HEAD.itemsize:
        return []  # another program has truncated the file
    found = []
    for which, one in enumerate(ledger.consumers(content).copy()):
        used = ledger.open_leases(content, which, capacity)
        if one["state"] != ledger.CONSUMES or used is None:
            continue
        floor = min(int(one["floor"]), head)
        found.append(
            ConsumerStatus(
                name=one["name"].decode(errors="replace"),
                max_sample_count=int(one["times"]),
                holds=bool(one["holds"]),
                position=int(one["next"]),
                floor=floor,
                behind=head - floor,
                leases=tuple(_parse_lease(lease, entries) for lease in used),
                **{count: int(one[count]) for count in COUNTS},
            )
        )
    return found


def read_consumers(mapped: Mapped, control: Control) -> list[ConsumerStatus]:
    """Reads the status of every consumer of a mapped buffer."""
    head = int(control.runtime["head"][0])
    return parse_consumers(mapped.ledger, mapped.schema.capacity, head, control.entries)


def _parse_lease(lease: Any, entries: Any) -> HeldItems:
    """Decodes the record of a lease."""
    number = int(lease["entry"]) % len(entries)
    entry = entries[number]
    alive = entry["state"] == EntryState.LIVE and entry["incarnation"] == lease["incarnation"]
    now, deadline = _core.boot_ns(), int(lease["deadline_ns"])
    ends = math.inf if deadline == 2**64 - 1 else max(0, deadline - now) / 1e9
    held_s = max(0, now - int(lease["taken_ns"])) / 1e9
    ends = ends if alive else 0.0
    return HeldItems(int(entry["pid"]), int(lease["left"]), held_s, ends, number, int(lease["id"]))


def consumer_stats(seat: Seat) -> dict[str, int | float]:
    """Returns the counters of all consumers together, by their metric names."""
    found = [] if seat.mapped is None else read_consumers(seat.mapped, seat.control)
    return {
        "consumers": len(found),
        "consumers_behind": max((one.behind for one in found), default=0),
        "leased": sum(one.held for one in found),
        **{f"consumers_{name}": sum(getattr(one, name) for one in found) for name in COUNTS},
    }
