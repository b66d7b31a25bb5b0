"""Implements a consumer: a group of learners that together receive each item once.

    c.take(count, lease) ──▶ items under a lease ──▶ c.ack(...)     done for this consumer
    c.claim(groups)      ──▶ selected items, each group completely or not at all
    c.drop(...)          ──▶ done without delivery
                 holder dead, or lease expired ──▶ delivered again, before all other items

Callers that select the items to claim wait with `Consumer.wait_for`; `Consumer.take` waits itself.
This module calls ``_native/core/ledger.c``, which describes the changes of the ledger.
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
from shmbuffer.memory.format.ledger import LEASED_HERE, Acknowledged, ItemStates, LeasedItems
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, nanoseconds

_RARELY = 50
"""Checks for dead holders take at most 1/50 of a learner's time."""


class Leases:
    """Collects the leases that one call takes."""

    def __init__(self) -> None:
        self._begun: list[tuple[Consumer, NDArray[np.uint64]]] = []

    def begin(self, consumer: Consumer) -> NDArray[np.uint64]:
        """Returns memory where the core stores the number of a lease; 0 before the lease begins."""
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
    """Yields leases whose items are returned to the consumer if the body raises an exception."""
    leases = Leases()
    try:
        yield leases
    except BaseException:
        leases.give_back()
        raise


class Oldest(NamedTuple):
    """Describes the oldest unacknowledged item, if no learner holds that item."""

    slot: int
    ticket: int
    head: int
    """The head of the ring; no slot below it is being written."""
    room: int
    """The number of items that can be written before the item is acknowledged."""
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
        """Returns the oldest ``count`` undelivered items, under a lease.

        Waits until there are enough items. Returns fewer items if no client can write more, or if
        the writers wait for the acknowledgement of these items (`is_stuck`).

        Args:
            count: The number of items.
            lease_s: Seconds until the items can be delivered to other learners. inf: until this
                handle is closed or its process ends.
            leases: Stores the lease, so that the items can be returned after an exception.

        Raises:
            EmptyBufferError: No item is left, and no client writes.
            RateLimitTimeout, RateLimitError: See the sampling of a limited buffer.
        """
        slots, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        found, lease = self.take_at(count, lease_s, address(slots), address(tickets), leases)
        return LeasedItems(slots[:found], tickets[:found], lease)

    def take_at(
        self, count: int, lease_s: float, slots: int, tickets: int, leases: Leases | None = None
    ) -> tuple[int, int]:
        """Takes items like `take`, and stores their slots and tickets at the given addresses.

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
        """Waits like `take`, for callers that select the items to claim.

        Args:
            choose: Function that claims at least as many items as its argument, and returns the
                number of claimed items; 0 if there are fewer items.
            most: The requested number of items, groups or windows.
            size: The number of items in each of these.
            why: Function that returns the reason of an `EmptyBufferError`. The message contains it
                after the name of the consumer.

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
            # writes before this wait was registered did not wake this thread, so try again
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
        """Returns a function that takes a full batch, or the rest if no client writes."""

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
        """Runs a call that takes items, and returns them to the consumer if it is interrupted."""
        try:
            return self._calls.run(call, "sample", index=index)
        except BaseException:
            self.give_back(int(lease[0]))
            raise

    def _reap_dead_holders(self) -> None:
        """Checks every 0.1 s whether holders of leases are alive, and reaps dead ones.

        The items of dead holders are then delivered before all others. A sample that must wait
        makes its own checks.

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
        """True if no client writes, and the limiter does not wait for a writer."""
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
        """Returns how many items `take` of ``count`` could deliver; 0 if it would wait."""
        there = self._count_available(self._calls.schema.capacity)
        return there if there >= count or self.cannot_grow(there, count) else 0

    def can_give(self, count: int) -> bool:
        """True if `take` of ``count`` items would not wait. O(count), plus the returned items."""
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
            known: ``[LEASES]``, initially zeros: the leases that were already returned.

        Cost: 2 µs. For each lease that has ended, the slots between its first and its last item are
        also read.
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
        """Returns the oldest unacknowledged item; None if a client holds or writes that item."""
        found = np.empty(5, np.int64)
        if not self._calls.ask("find_oldest", self.which, self.number, found.ctypes.data):
            return None
        slot, ticket, head, room, waits = found.tolist()
        return Oldest(slot, ticket, head, room, bool(waits))

    def is_stuck(self, missing: int) -> bool:
        """True if ``missing`` items cannot be written before the oldest item is acknowledged.

        If a learner holds the oldest item, the result is False.
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
        """Takes selected items under one lease.

        Args:
            index: Slots of the items.
            tickets: Tickets of the items.
            sizes: The number of items in each group. A group is not taken if any of its items was
                removed, is done, or is held by a living client. None: each item is a group.
            lease_s: See `take`.
            leases: See `take`.

        Returns:
            A mask of the groups that were taken, and the lease, which is 0 if no group was taken.
        """
        self._calls.sides.draws_here()
        under = nanoseconds(lease_s), (leases or Leases()).begin(self)
        kept, lease = self._claim(index, tickets, sizes, *under)
        return kept, lease if kept.any() else 0

    def could_claim(
        self, index: Ints, tickets: Ints, sizes: Sequence[int] | Ints | None = None
    ) -> Flags:
        """Returns a mask of the groups that `claim` would take now."""
        return self._claim(index, tickets, sizes, 0, np.zeros(1, np.uint64))[0]

    def _claim(
        self,
        index: Ints,
        tickets: Ints,
        sizes: Sequence[int] | Ints | None,
        lease_ns: int,
        lease: NDArray[np.uint64],
    ) -> tuple[Flags, int]:
        """Claims groups of items; returns a mask of the groups that were taken, and the lease."""
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

        Returns the number of acknowledged items. Used for items that will never be delivered, such
        as those of incomplete groups and ends of streams.
        """
        index, tickets = _pair(index, tickets)
        where = self.which, self.number, address(index), address(tickets), len(index)
        return self._calls.ask("drop_items", *where, what="drop", index=index)

    def ack(self, leases: int | NDArray[np.uint64], index: Ints, tickets: Ints) -> Acknowledged:
        """Acknowledges items, each under its lease; a second call has no further effect."""
        index, tickets = _pair(index, tickets)
        under = np.ascontiguousarray(np.broadcast_to(np.asarray(leases, np.uint64), index.shape))
        return self.ack_at(address(under), address(index), address(tickets), len(index), index)

    def ack_at(
        self, leases: int, index: int, tickets: int, count: int, shown: object = None
    ) -> Acknowledged:
        """Acknowledges items like `ack`, but takes addresses; ``shown`` is for error messages."""
        where = self.which, self.number, leases, index, tickets, count, LOCK_TIMEOUT_NS
        applied = self._calls.run(lambda: self._seat.native.acknowledge(*where), "ack", index=shown)
        return Acknowledged(applied, count - applied)

    def give_back(self, lease: int) -> None:
        """Returns the unacknowledged items of a lease to the consumer; ignores lease 0."""
        if lease:
            self._calls.ask("return_lease", self.which, self.number, lease, what="give_back")

    def item_states(self) -> ItemStates:
        """Returns a snapshot of the state of each slot's item for this consumer. O(capacity)."""
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
        """Returns the slots, tickets and leases of items that this handle holds. O(capacity)."""
        found = self.item_states()
        here = (found.states == LEASED_HERE).nonzero()[0]
        return here, found.tickets[here], found.leases[here]


def _pair(index: Ints, tickets: Ints) -> tuple[Ints, Ints]:
    """Returns indices and tickets as contiguous arrays of the same length."""
    if np.shape(index) != np.shape(tickets):
        raise ValueError(
            f"{len(index)} indices and {len(tickets)} generations were given; pass as many"
            " generations as indices"
        )
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(tickets, np.int64)
