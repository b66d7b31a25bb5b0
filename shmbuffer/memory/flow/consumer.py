"""Implements a consumer: a group of learners that together receive each item once.

    c.take(count, lease) ──▶ items under a lease ──▶ c.ack(...)     done for this consumer
    c.claim(groups)      ──▶ selected items; each group is claimed completely or not at all
    c.drop(...)          ──▶ done without delivery
                 holder dead, or lease expired ──▶ delivered again, before all other items

`Consumer.take` waits for items. Callers that select the items to claim wait with
`Consumer.wait_for`. This module calls ``_native/core/ledger.c``, which describes the changes of the
ledger.
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
from shmbuffer.memory.flow.waiting import CHECK_INTERVAL_S, Calls
from shmbuffer.memory.format import ledger
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.layout import Alone, Side
from shmbuffer.memory.format.ledger import LEASED_HERE, Acknowledged, ItemStates, LeasedItems
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, nanoseconds

_CHECK_SHARE = 50
"""Checks for dead holders take at most 1/50 of a learner's time."""


class Leases:
    """The leases that one call begins, so that their items can be returned after an exception."""

    def __init__(self) -> None:
        self._begun: list[tuple[Consumer, NDArray[np.uint64]]] = []

    def begin(self, consumer: Consumer) -> NDArray[np.uint64]:
        """Returns an array ``[1]`` in which the core stores the number of a new lease.

        The array contains 0 until the lease begins.
        """
        lease = np.zeros(1, np.uint64)
        self._begun.append((consumer, lease))
        return lease

    def give_back(self) -> None:
        """Ends these leases, so that their items can be delivered again immediately."""
        while self._begun:
            consumer, lease = self._begun.pop()
            consumer.give_back(int(lease[0]))


@contextmanager
def given_back_unless_delivered() -> Iterator[Leases]:
    """Yields a collection of leases, which end if the ``with`` block raises an exception."""
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
    """The head of the ring. No item with a lower ticket is being written."""
    room: int
    """Number of items that can be written while this item is not acknowledged."""
    waits: bool
    """True if a writer waits to overwrite this item, and no client has reservations."""


class Consumer:
    """A consumer as seen by one handle; created by `Consumers.open`.

    Every method can raise these errors:
        ConsumerError: The consumer was removed.
        BufferClosedError, LockTimeout, BufferNeedsRestart: The call changed nothing.
    """

    def __init__(self, calls: Calls, name: str, which: int, number: int) -> None:
        self._calls = calls
        self._seat = calls.seat
        self.name = name
        self.which = which  # index of the record in the ledger
        self.number = number  # unique number, because a record can be reused
        self._next_check_s = 0.0  # time of the next check for dead holders

    @property
    def is_there(self) -> bool:
        """True unless the consumer was removed."""
        assert self._seat.mapped is not None
        record = ledger.consumers(self._seat.mapped.ledger)[self.which]
        return bool(record["state"] == ledger.CONSUMES and record["number"] == self.number)

    def take(
        self, count: int, lease_s: float = math.inf, leases: Leases | None = None
    ) -> LeasedItems:
        """Returns the oldest ``count`` items that are not delivered, under a new lease.

        Waits until there are enough items. Returns fewer items if no client can write more, or if
        the writers wait for the acknowledgement of these items (`is_stuck`).

        Args:
            count: The number of items.
            lease_s: Seconds until the items can be delivered to other learners. With inf, the lease
                ends when this handle is closed or its process exits.
            leases: Collection to which the lease is added, so that the caller can return the items
                after an exception.

        Raises:
            EmptyBufferError: No item is left, and no client writes.
            RateLimitTimeout: The wait has reached its timeout.
            RateLimitError: The wait can never end.
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
        request = self.which, self.number, count
        lease_ns = nanoseconds(lease_s)
        self._calls.sides.note_sampler()
        self._reap_dead_holders()
        lease = (leases or Leases()).begin(self)
        addresses = slots, tickets, address(lease)

        def deliver(least: int) -> int:
            native = self._seat.native
            return int(native.deliver(*request, least, lease_ns, *addresses, LOCK_TIMEOUT_NS))

        call = self._take_batch_or_rest(deliver, count, lambda: "was given every item")
        return (self._run_taking(call, lease), int(lease[0])) if count else (0, 0)

    def wait_for(
        self, choose: Callable[[int], int], most: int, size: int, why: Callable[[], str]
    ) -> None:
        """Waits like `take`, for callers that select the items to claim.

        Args:
            choose: Function that claims at least as many units as its argument says, and returns
                the number of claimed units. Returns 0 if there are fewer units.
            most: The number of requested units: items, groups or windows.
            size: The number of items in a unit.
            why: Function that returns the reason for an `EmptyBufferError`. The message contains
                the reason after the name of the consumer.

        Raises:
            EmptyBufferError, RateLimitTimeout, RateLimitError: As for `take`.
        """
        waits = False
        self._calls.sides.note_sampler()

        def attempt(least: int) -> int:
            nonlocal waits
            if not waits and (found := choose(least)):
                return found
            waits, since = True, np.zeros(1, np.uint64)
            # A write that was committed before this wait was registered did not wake this thread.
            # The claim is therefore tried once more after the registration.
            for turn in range(2):
                if turn and (found := choose(least)):
                    return found
                request = self.which, self.number, most * size, since.ctypes.data
                result = int(self._seat.native.await_items(*request, LOCK_TIMEOUT_NS))
                if result != -_core.LIMITED:
                    break
            return result

        if most:
            self._calls.run(self._take_batch_or_rest(attempt, most, why), "sample")

    def _take_batch_or_rest(
        self, take: Callable[[int], int], most: int, why: Callable[[], str]
    ) -> Callable[[], int]:
        """Returns a function that takes ``most`` units, or the remaining ones if no client writes.

        The function raises EmptyBufferError if no unit is left and no client writes.
        """

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
        """Runs a call that takes items under a lease. Ends the lease if the call is interrupted."""
        try:
            return self._calls.run(call, "sample", index=index)
        except BaseException:
            self.give_back(int(lease[0]))
            raise

    def _reap_dead_holders(self) -> None:
        """Checks at most every 0.1 s whether the holders of leases are alive, and reaps dead ones.

        The items of dead holders are then delivered before all others. A sample that must wait
        makes its own checks.

        Cost: 0.1 µs without a check. A check takes about 100 µs per client that holds leases.
        """
        began_s, seat = time.monotonic(), self._seat
        if began_s < self._next_check_s or seat.mapped is None or not seat.is_ours():
            return
        content, capacity = seat.mapped.ledger, self._calls.schema.capacity
        are_open = bool(ledger.consumers(content)["open_leases"][self.which])
        leases = ledger.open_leases(content, self.which, capacity) if are_open else None
        if leases is not None:
            holders = {*leases[["entry", "incarnation"]].tolist()}
            for entry, incarnation in holders.intersection(seat.registry.live()):
                seat.reap_if_dead(entry, incarnation)
        ended_s = time.monotonic()
        self._next_check_s = ended_s + max(CHECK_INTERVAL_S, _CHECK_SHARE * (ended_s - began_s))

    def is_over(self) -> bool:
        """True if no client writes, and the limiter does not require to wait for a new writer."""
        seat = self._seat
        found = seat.control.limits()
        if found is not None and found.alone != Alone.PASS:
            return False
        if seat.is_alone():
            return not self._calls.sides.has_thread(Side.INSERTS)
        return self._calls.sides.is_empty(Side.INSERTS, time.monotonic())

    def all_writers_wait(self) -> bool:
        """True if every writer waits for another client, or no writer is attached."""
        return self._calls.sides.all_wait(Side.INSERTS)

    def available(self, count: int) -> int:
        """Returns the number of items that can be delivered; 0 if ``take(count)`` would wait."""
        there = self._count_available(self._calls.schema.capacity)
        return there if there >= count or self.cannot_grow(there, count) else 0

    def can_give(self, count: int) -> bool:
        """True if `take` of ``count`` items would not wait.

        Cost: O(count), plus O(1) per item whose lease has ended.
        """
        there = self._count_available(count)
        return there >= count or self.cannot_grow(there, count)

    def cannot_grow(self, there: int, count: int) -> bool:
        """True if the ``there`` items that exist will not become ``count`` items.

        Either no client writes, or the writers wait for the acknowledgement of these items.
        """
        return there > 0 and (self.is_over() or self.is_stuck(count - there))

    def _count_available(self, most: int) -> int:
        """Returns the number of items that can be delivered now, at most ``most``."""
        self._seat.reap_dead()  # the items of dead holders can be delivered, too
        return self._calls.ask("count_deliverable", self.which, self.number, most)

    def returned(self, known: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """Returns the slots and tickets of the items whose leases have ended since the last call.

        Args:
            known: Array ``[LEASES]``, initially zeros, in which the core stores the leases that
                earlier calls have returned.

        Cost: 2 µs. For each lease that has ended, the slots between its first and its last item are
        also read.
        """
        self._reap_dead_holders()
        request = "list_returned", self.which, self.number, known.ctypes.data
        if not self._calls.ask(*request, 0, 0, 0):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        capacity = self._calls.schema.capacity
        slots, tickets = np.empty((2, capacity), np.int64)
        found = self._calls.ask(*request, slots.ctypes.data, tickets.ctypes.data, capacity)
        return slots[:found].copy(), tickets[:found].copy()

    def oldest_to_give(self) -> Oldest | None:
        """Returns the oldest item that is not acknowledged; None if a client holds or writes it."""
        found = np.empty(5, np.int64)
        if not self._calls.ask("find_oldest", self.which, self.number, found.ctypes.data):
            return None
        slot, ticket, head, room, waits = found.tolist()
        return Oldest(slot, ticket, head, room, bool(waits))

    def is_stuck(self, missing: int) -> bool:
        """True if ``missing`` more items cannot be written before the oldest item is acknowledged.

        Returns False if a learner holds the oldest item, because the learner may acknowledge it.
        """
        is_possible = missing < self._calls.schema.capacity  # otherwise no batch can be complete
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
            index: The slots of the items, in the order of the groups.
            tickets: The tickets of the items.
            sizes: The number of items in each group. A group is not taken if any of its items was
                removed, is done, or is held by a living client. None: each item is a group.
            lease_s: As for `take`.
            leases: As for `take`.

        Returns:
            A mask of the groups that were taken, and the lease, which is 0 if no group was taken.
        """
        self._calls.sides.note_sampler()
        under = nanoseconds(lease_s), (leases or Leases()).begin(self)
        taken, lease = self._claim(index, tickets, sizes, *under)
        return taken, lease if taken.any() else 0

    def could_claim(
        self, index: Ints, tickets: Ints, sizes: Sequence[int] | Ints | None = None
    ) -> Flags:
        """Returns a mask of the groups that `claim` would take now, without taking them."""
        return self._claim(index, tickets, sizes, 0, np.zeros(1, np.uint64))[0]

    def _claim(
        self,
        index: Ints,
        tickets: Ints,
        sizes: Sequence[int] | Ints | None,
        lease_ns: int,
        lease: NDArray[np.uint64],
    ) -> tuple[Flags, int]:
        """Claims groups of items for `claim`, or only tests them for `could_claim`.

        If ``lease_ns`` is 0, nothing is claimed. Returns a mask of the groups and the lease.
        """
        groups = np.ones(len(index), np.int64) if sizes is None else np.asarray(sizes, np.int64)
        index, tickets = _pair(index, tickets)
        if int(groups.sum()) != len(index) or (groups < 0).any():
            raise ValueError(
                f"claim: the sizes of the groups must add up to {len(index)}, which is the number "
                f"of items, got {groups.tolist()}"
            )
        taken = np.zeros(len(groups), np.uint8)

        def call() -> int:
            return int(
                self._seat.native.claim_groups(
                    *(self.which, self.number, address(index), address(tickets)),
                    *(groups.ctypes.data, len(groups), lease_ns),
                    *(taken.ctypes.data, lease.ctypes.data, LOCK_TIMEOUT_NS),
                )
            )

        self._run_taking(call, lease, index)
        return taken.astype(bool), int(lease[0])

    def drop(self, index: Ints, tickets: Ints) -> int:
        """Acknowledges items that will never be delivered, such as those of incomplete groups.

        Items that a living client holds are skipped. Returns the number of acknowledged items.
        """
        index, tickets = _pair(index, tickets)
        request = self.which, self.number, address(index), address(tickets), len(index)
        return self._calls.ask("drop_items", *request, what="drop", index=index)

    def ack(self, leases: int | NDArray[np.uint64], index: Ints, tickets: Ints) -> Acknowledged:
        """Acknowledges items that were delivered.

        Args:
            leases: The lease of each item, or one lease for all items.
            index: The slots of the items.
            tickets: The tickets of the items.

        Returns:
            The numbers of acknowledged items and of items that were too late. Items that were
            already acknowledged under the same lease count as acknowledged.
        """
        index, tickets = _pair(index, tickets)
        under = np.ascontiguousarray(np.broadcast_to(np.asarray(leases, np.uint64), index.shape))
        return self.ack_at(address(under), address(index), address(tickets), len(index), index)

    def ack_at(
        self, leases: int, index: int, tickets: int, count: int, shown: object = None
    ) -> Acknowledged:
        """Acknowledges ``count`` items like `ack`, but takes the addresses of the arrays.

        ``shown`` is the array of slots, for error messages.
        """
        request = self.which, self.number, leases, index, tickets, count, LOCK_TIMEOUT_NS

        def call() -> int:
            return int(self._seat.native.acknowledge(*request))

        applied = self._calls.run(call, "ack", index=shown)
        return Acknowledged(applied, count - applied)

    def give_back(self, lease: int) -> None:
        """Ends a lease, so that its unacknowledged items can be delivered again.

        Lease 0 is ignored.
        """
        if lease:
            self._calls.ask("return_lease", self.which, self.number, lease, what="give_back")

    def item_states(self) -> ItemStates:
        """Returns the state of every slot's item for this consumer. O(capacity)."""
        capacity = self._calls.schema.capacity
        found = ItemStates(
            np.empty(capacity, np.uint8),
            np.empty(capacity, np.int64),
            np.empty(capacity, np.uint64),
        )
        addresses = (array.ctypes.data for array in found)
        self._calls.ask("read_item_states", self.which, self.number, *addresses)
        return found

    def held_items(self) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Returns the slots, tickets and leases of items that this handle holds. O(capacity)."""
        found = self.item_states()
        here = (found.states == LEASED_HERE).nonzero()[0]
        return here, found.tickets[here], found.leases[here]


def _pair(index: Ints, tickets: Ints) -> tuple[Ints, Ints]:
    """Returns slots and tickets as contiguous arrays. Raises ValueError if their shapes differ."""
    if np.shape(index) != np.shape(tickets):
        raise ValueError(
            f"index and generation must have the same length, got {len(index)} indices and "
            f"{len(tickets)} generations"
        )
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(tickets, np.int64)
