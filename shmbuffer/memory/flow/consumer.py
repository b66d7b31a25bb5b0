"""A consumer, which gives each item once to one of its clients.

    c.take(count, lease) ──▶ items under a lease ──▶ c.ack(...)     done, for this consumer
    c.claim(groups)      ──▶ chosen items, each group completely or not at all
    c.drop(...)          ──▶ done without a delivery
                 holder dead, or its lease over ──▶ given again, before all other items

Callers that choose the items to claim wait with `Consumer.wait_for`, like `Consumer.take`.
``_native/core/ledger.c`` describes the changes of the ledger, and this module calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory.flow.waiting import LOOK_S, Calls
from shmbuffer.memory.format import ledger
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.layout import Alone, Side
from shmbuffer.memory.format.ledger import HELD_HERE, Acknowledged, ItemStates, LeasedItems
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, nanoseconds

_RARELY = 50
"""Checks for dead holders take at most 1/50 of a learner's time."""


class Leases:
    """The leases that one call takes."""

    def __init__(self) -> None:
        self._begun: list[tuple[Consumer, NDArray[np.uint64]]] = []

    def begin(self, consumer: Consumer) -> NDArray[np.uint64]:
        """Returns memory in which the core stores the number of a lease; 0 before it begins."""
        lease = np.zeros(1, np.uint64)
        self._begun.append((consumer, lease))
        return lease

    def give_back(self) -> None:
        """Returns the items under these leases to the consumer at once."""
        while self._begun:
            consumer, lease = self._begun.pop()
            consumer.give_back(int(lease[0]))


@contextmanager
def given_back_unless_delivered() -> Iterator[Leases]:
    """Yields leases that are given back if the body raises an exception."""
    leases = Leases()
    try:
        yield leases
    except BaseException:
        leases.give_back()
        raise


class Oldest(NamedTuple):
    """The oldest item that is not acknowledged, if no learner holds it."""

    slot: int
    ticket: int
    head: int
    """The head of the ring; no slot below it is being written."""
    room: int
    """The number of items that can be written before it is acknowledged."""
    waits: bool
    """True if a writer waits to overwrite the item, and no client has reservations."""


class Consumer:
    """A consumer as seen by one handle; created by `Consumers.open`.

    Every call may raise:
        ConsumerError: The consumer was removed.
        BufferClosedError, LockTimeout, BufferNeedsRestart: Nothing was changed.
    """

    def __init__(self, calls: Calls, name: str, which: int, number: int) -> None:
        self._calls = calls
        self._seat = calls.seat
        self.name = name
        self.which = which  # place in the ledger
        self.number = number
        self._next_look_s = 0.0  # for dead holders

    @property
    def is_there(self) -> bool:
        """True if the consumer was not removed."""
        assert self._seat.mapped is not None
        record = ledger.consumers(self._seat.mapped.ledger)[self.which]
        return bool(record["state"] == ledger.CONSUMES and record["number"] == self.number)

    def take(
        self, count: int, lease_s: float = math.inf, leases: Leases | None = None
    ) -> LeasedItems:
        """Returns the oldest ``count`` items that were not delivered yet, under a lease.

        Waits until there are enough items. It returns fewer items if no client could write more, or
        if the writers wait for the acknowledgement of these items (`is_stuck`).

        Args:
            count: The number of items.
            lease_s: Seconds until the items are given to others. inf: until this handle is closed
                or its process ends.
            leases: Records the lease, so that it can be given back after an exception.

        Raises:
            EmptyBufferError: No item is left, and no client writes.
            RateLimitTimeout, RateLimitError: As for a sample of a limited buffer.
        """
        slots, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        found, lease = self.take_at(count, lease_s, address(slots), address(tickets), leases)
        return LeasedItems(slots[:found], tickets[:found], lease)

    def take_at(
        self, count: int, lease_s: float, slots: int, tickets: int, leases: Leases | None = None
    ) -> tuple[int, int]:
        """Takes items like `take`, into existing memory: addresses of slots and tickets.

        Returns:
            The number of items, and their lease.
        """
        given = self.which, self.number, count
        lease_ns = nanoseconds(lease_s)
        self._calls.sides.draws_here()
        self._reap_dead_holders()
        lease = (leases or Leases()).begin(self)
        where = slots, tickets, address(lease)

        def deliver(least: int) -> int:
            native = self._seat.native
            return int(native.deliver(*given, least, lease_ns, *where, LOCK_TIMEOUT_NS))

        call = self._take_batch_or_rest(deliver, count, lambda: "was given every item")
        return (self._run_taking(call, lease), int(lease[0])) if count else (0, 0)

    def wait_for(
        self, choose: Callable[[int], int], most: int, size: int, why: Callable[[], str]
    ) -> None:
        """Waits like `take`, for callers that choose the items to claim.

        Args:
            choose: Claims at least as many items as its argument says. Returns how many it has
                claimed, or 0 if there are fewer.
            most: The number of items, groups or windows that are wanted.
            size: The number of items of each.
            why: Returns the reason of an `EmptyBufferError`, which follows the name of the
                consumer.

        Raises:
            The errors of `take`.
        """
        waits = False
        self._calls.sides.draws_here()

        def attempt(least: int) -> int:
            nonlocal waits
            if not waits and (found := choose(least)):
                return found
            waits, since = True, np.zeros(1, np.uint64)
            # writes before our wait was registered did not wake us, so try again after it
            for turn in range(2):
                if turn and (found := choose(least)):
                    return found
                given = self.which, self.number, most * size, since.ctypes.data
                result = int(self._seat.native.await_items(*given, LOCK_TIMEOUT_NS))
                if result != -_core.LIMITED:
                    break
            return result

        if most:
            self._calls.run(self._take_batch_or_rest(attempt, most, why), "sample")

    def _take_batch_or_rest(
        self, take: Callable[[int], int], most: int, why: Callable[[], str]
    ) -> Callable[[], int]:
        """Returns a call that takes a whole batch, or the remaining items if no client writes."""

        def call() -> int:
            result = take(most)
            if result == -_core.LIMITED and self.is_over():
                result = take(1)
                if result == -_core.LIMITED:
                    raise EmptyBufferError(
                        f"{self._seat.where}: Cannot sample from an empty storage; consumer "
                        f"{self.name!r} {why()}, and no client writes"
                    )
            return result

        return call

    def _run_taking(
        self, call: Callable[[], int], lease: NDArray[np.uint64], index: object = None
    ) -> int:
        """Runs a call that takes items, and gives them back if it is interrupted."""
        try:
            return self._calls.run(call, "sample", index=index)
        except BaseException:
            self.give_back(int(lease[0]))
            raise

    def _reap_dead_holders(self) -> None:
        """Checks every 0.1 s whether holders of leases are alive, and reaps dead ones.

        Their items are then delivered before all others. A sample that must wait makes its own
        checks.

        Cost: 0.1 µs. A check takes about 100 µs for each other client that holds leases.
        """
        began_s, seat = time.monotonic(), self._seat
        if began_s < self._next_look_s or seat.mapped is None or not seat.is_ours():
            return
        content, capacity = seat.mapped.ledger, self._calls.schema.capacity
        are_open = bool(ledger.consumers(content)["open_leases"][self.which])
        leases = ledger.open_leases(content, self.which, capacity) if are_open else None
        if leases is not None:
            holders = {*leases[["entry", "incarnation"]].tolist()}
            for entry, incarnation in holders.intersection(seat.registry.live()):
                seat.reap_if_dead(entry, incarnation)
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(LOOK_S, _RARELY * (ended_s - began_s))

    def is_over(self) -> bool:
        """True if no client writes, and the limiter does not wait for one."""
        seat = self._seat
        found = seat.control.limits()
        if found is not None and found.alone != Alone.PASS:
            return False
        if seat.is_alone():
            return not self._calls.sides.has_thread(Side.INSERTS)
        return self._calls.sides.are_left(Side.INSERTS, time.monotonic())

    def all_writers_wait(self) -> bool:
        """True if every writer waits for another client, or none is attached."""
        return self._calls.sides.all_wait(Side.INSERTS)

    def available(self, count: int) -> int:
        """Returns how many items could be delivered now; 0 if `take` of ``count`` would wait."""
        there = self._count_available(self._calls.schema.capacity)
        return there if there >= count or self.cannot_grow(there, count) else 0

    def can_give(self, count: int) -> bool:
        """True if `take` of ``count`` would not wait. O(count), plus the returned items."""
        there = self._count_available(count)
        return there >= count or self.cannot_grow(there, count)

    def cannot_grow(self, there: int, count: int) -> bool:
        """True if a batch of ``count`` items must use the items that exist now."""
        return there > 0 and (self.is_over() or self.is_stuck(count - there))

    def _count_available(self, most: int) -> int:
        # other processes may not do it, and items of dead holders can be delivered
        self._seat.reap_dead()
        return self._calls.ask("count_deliverable", self.which, self.number, most)

    def returned(self, known: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """Returns slots and tickets of items whose leases have ended since the last call.

        Args:
            known: ``[LEASES]``, zeros at first: the leases that have been returned already.

        Cost: 2 µs. If leases have ended, also the slots between the first and the last item of
        each.
        """
        self._reap_dead_holders()
        given = "list_returned", self.which, self.number, known.ctypes.data
        if not self._calls.ask(*given, 0, 0, 0):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        capacity = self._calls.schema.capacity
        slots, tickets = np.empty((2, capacity), np.int64)
        found = self._calls.ask(*given, slots.ctypes.data, tickets.ctypes.data, capacity)
        return slots[:found].copy(), tickets[:found].copy()

    def oldest_to_give(self) -> Oldest | None:
        """Returns the oldest unacknowledged item; None if it is held or being written."""
        found = np.empty(5, np.int64)
        if not self._calls.ask("find_oldest", self.which, self.number, found.ctypes.data):
            return None
        slot, ticket, head, room, waits = found.tolist()
        return Oldest(slot, ticket, head, room, bool(waits))

    def is_stuck(self, missing: int) -> bool:
        """True if ``missing`` items cannot be written before the oldest item is acknowledged.

        That item must be held by no learner.
        """
        is_possible = missing < self._calls.schema.capacity  # otherwise no batch is ever complete
        return is_possible and self._calls.ask("is_stuck", self.which, self.number, missing) > 0

    def claim(
        self,
        index: Ints,
        tickets: Ints,
        sizes: Sequence[int] | Ints | None = None,
        lease_s: float = math.inf,
        leases: Leases | None = None,
    ) -> tuple[Flags, int]:
        """Takes chosen items under one lease.

        Args:
            index: Slots.
            tickets: Tickets of the chosen items.
            sizes: The number of items of each group. A group is taken completely, or not at all if
                one of its items is gone, done, or held by a living client. None: each item is a
                group.
            lease_s: As for `take`.
            leases: As for `take`.

        Returns:
            Which groups were taken, and the lease, which is 0 if none was.
        """
        self._calls.sides.draws_here()
        under = nanoseconds(lease_s), (leases or Leases()).begin(self)
        kept, lease = self._claim(index, tickets, sizes, *under)
        return kept, lease if kept.any() else 0

    def could_claim(
        self, index: Ints, tickets: Ints, sizes: Sequence[int] | Ints | None = None
    ) -> Flags:
        """Returns which groups `claim` would take now."""
        return self._claim(index, tickets, sizes, 0, np.zeros(1, np.uint64))[0]

    def _claim(
        self,
        index: Ints,
        tickets: Ints,
        sizes: Sequence[int] | Ints | None,
        lease_ns: int,
        lease: NDArray[np.uint64],
    ) -> tuple[Flags, int]:
        """Claims groups of items; returns which were taken, and the lease."""
        groups = np.ones(len(index), np.int64) if sizes is None else np.asarray(sizes, np.int64)
        index, tickets = _pair(index, tickets)
        if int(groups.sum()) != len(index) or (groups < 0).any():
            raise ValueError(
                f"claim: the groups {groups.tolist()} do not add up to {len(index)} items; pass "
                "the size of each group"
            )
        kept = np.zeros(len(groups), np.uint8)

        def call() -> int:
            return int(
                self._seat.native.claim_groups(
                    *(self.which, self.number, address(index), address(tickets)),
                    *(groups.ctypes.data, len(groups), lease_ns),
                    *(kept.ctypes.data, lease.ctypes.data, LOCK_TIMEOUT_NS),
                )
            )

        self._run_taking(call, lease, index)
        return kept.astype(bool), int(lease[0])

    def drop(self, index: Ints, tickets: Ints) -> int:
        """Acknowledges items without a delivery, except those that a living client holds.

        Returns how many. Used for items that are given up, such as incomplete groups and ends of
        streams.
        """
        index, tickets = _pair(index, tickets)
        where = self.which, self.number, address(index), address(tickets), len(index)
        return self._calls.ask("drop_items", *where, what="drop", index=index)

    def ack(self, leases: int | NDArray[np.uint64], index: Ints, tickets: Ints) -> Acknowledged:
        """Acknowledges items under the lease of each; doing so twice has no further effect."""
        index, tickets = _pair(index, tickets)
        under = np.ascontiguousarray(np.broadcast_to(np.asarray(leases, np.uint64), index.shape))
        return self.ack_at(address(under), address(index), address(tickets), len(index), index)

    def ack_at(
        self, leases: int, index: int, tickets: int, count: int, shown: object = None
    ) -> Acknowledged:
        """Acknowledges items like `ack`, by the addresses of numbers; errors use ``shown``."""
        where = self.which, self.number, leases, index, tickets, count, LOCK_TIMEOUT_NS
        applied = self._calls.run(lambda: self._seat.native.acknowledge(*where), "ack", index=shown)
        return Acknowledged(applied, count - applied)

    def give_back(self, lease: int) -> None:
        """Gives the unacknowledged items of a lease to others; does nothing for lease 0."""
        if lease:
            self._calls.ask("return_lease", self.which, self.number, lease, what="give_back")

    def item_states(self) -> ItemStates:
        """Returns the state of each slot's item for this consumer at one moment. O(capacity)."""
        capacity = self._calls.schema.capacity
        found = ItemStates(
            np.empty(capacity, np.uint8),
            np.empty(capacity, np.int64),
            np.empty(capacity, np.uint64),
        )
        where = (one.ctypes.data for one in found)
        self._calls.ask("read_item_states", self.which, self.number, *where)
        return found

    def held_items(self) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Returns slots, tickets and leases of the items that this handle holds. O(capacity)."""
        found = self.item_states()
        here = (found.states == HELD_HERE).nonzero()[0]
        return here, found.tickets[here], found.leases[here]


def _pair(index: Ints, tickets: Ints) -> tuple[Ints, Ints]:
    """Returns indices and tickets as contiguous arrays of the same length."""
    if np.shape(index) != np.shape(tickets):
        raise ValueError(
            f"{len(index)} indices and {len(tickets)} generations were given; pass as many"
            " generations as indices"
        )
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(tickets, np.int64)
