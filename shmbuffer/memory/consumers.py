"""Consumers of a ring: each is given every item once, whichever of its clients asks for it.

    c = ring.consumers.open("learner")
    c.take(count, lease) ──▶ items under a lease ──▶ c.ack(...)     done, for this consumer
    c.claim(groups)      ──▶ those that were chosen, each group whole or not at all
    c.drop(...)          ──▶ done without a delivery
                 holder dead, or its lease over ──▶ given again, before anything else

A consumer is known by its name, in all processes; it stays when they end. With ``holds`` a writer
waits for it rather than write over what it has not acknowledged. What happens to the ledger is
told in ``_native/ledger.c``; this is who asks for it, and what is waited for.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.errors import ConsumerError, EmptyBufferError
from shmbuffer.memory import consumer_status, ledger, limiter
from shmbuffer.memory.claims import address
from shmbuffer.memory.consumer_status import ConsumerStatus
from shmbuffer.memory.deadline import LOCK_TIMEOUT_NS, nanoseconds
from shmbuffer.memory.layout import Alone, Side
from shmbuffer.memory.ledger import HELD_HERE, TO_GIVE, Acknowledged, Standings, Taken
from shmbuffer.memory.waiting import Calls

Start = Literal["oldest", "newest"]

_SEED_BITS = 40  # of the first lease's number: another directory's are not taken for ours


class Consumers:
    """The consumers of one handle's ring. Use `Ring.consumers`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seat = calls.seat

    def __bool__(self) -> bool:
        return bool(self._seat.control.runtime["consumers"][0])

    def status(self) -> list[ConsumerStatus]:
        """Those that there are, as they are now."""
        assert self._seat.mapped is not None
        return consumer_status.of(self._seat.mapped, self._seat.control)

    def open(
        self,
        name: str,
        *,
        times: int = 1,
        holds: bool = True,
        start: Start = "oldest",
        timeout: float = 60.0,
    ) -> Consumer:
        """The consumer of that name, which is made if it is not there.

        Args:
            name: up to 48 bytes of UTF-8.
            times: how often each item is to be acknowledged.
            holds: whether writers wait for it.
            start: of one that is made: with the oldest item that is there, or with the next.
            timeout: seconds to wait for another process that opens one, creates or recovers.

        Raises:
            ConsumerError: it is there with other ``times`` or ``holds``; there are eight already.
            ValueError: there is no such start; the name cannot be; the storage has dimensions.
            SpaceError: there is no room for what it notes.
        """
        encoded = self._checked(name, times, start)
        found = self._find(encoded)
        if found is None:
            with self._seat.ground.lock(timeout):
                self._seat.require_there()
                found = self._find(encoded)
                if found is None:
                    found = self._make(encoded, times, holds, newest=start == "newest")
        which, record = found
        if (int(record["times"]), bool(record["holds"])) != (times, holds):
            raise ConsumerError(
                f"{self._seat.where}: consumer {name!r} is there with max_sample_count "
                f"{int(record['times'])}{'' if record['holds'] else ' and without holding writers'}"
                f", not {times}{'' if holds else ' and without holding them'}; use the same, or "
                "another name",
                name=name,
            )
        return Consumer(self._calls, name, which, int(record["number"]))

    def known(self, name: str) -> Consumer | None:
        """The consumer of that name, or None: it is not made."""
        found = self._find(name.encode())
        return found and Consumer(self._calls, name, found[0], int(found[1]["number"]))

    def remove(self, name: str) -> bool:
        """Removes a consumer: nobody waits for it any more. Returns whether it was there."""
        found = self._find(name.encode())
        if found is None:
            return False
        which, number = found[0], int(found[1]["number"])
        native = self._seat.native
        result = int(native.remove_consumer(which, number, LOCK_TIMEOUT_NS))
        if result == -_core.CONSUMER_GONE:
            return False
        if result < 0:
            self._calls.again(
                result,
                lambda: int(self._seat.native.remove_consumer(which, number, LOCK_TIMEOUT_NS)),
                "remove_consumer",
            )
        return True

    def _checked(self, name: str, times: int, start: str) -> bytes:
        where, encoded = self._seat.where, name.encode()
        if not 0 < len(encoded) <= ledger.NAME_BYTES or "\0" in name:
            raise ValueError(
                f"{where}: the name of a consumer has 1 to {ledger.NAME_BYTES} bytes, not {name!r}"
            )
        if start not in ("oldest", "newest"):
            raise ValueError(f"{where}: start is 'oldest' or 'newest', not {start!r}")
        if not 1 <= times <= ledger.MOST_ACKS:
            raise ValueError(f"{where}: max_sample_count is 1 to {ledger.MOST_ACKS}, not {times}")
        if self._calls.schema.lanes:
            raise ValueError(
                f"{where}: a consumer needs a storage of one dimension, not of "
                f"{1 + len(self._calls.schema.lanes)}; make it with ndim=1"
            )
        return encoded

    def _map(self) -> Any:
        assert self._seat.mapped is not None
        return self._seat.mapped.ledger

    def _find(self, encoded: bytes) -> tuple[int, Any] | None:
        for which, record in enumerate(ledger.consumers(self._map())):
            number, known = int(record["number"]), record.copy()  # its place may be taken meanwhile
            if (known["state"], known["name"]) == (ledger.CONSUMES, encoded):
                return (which, known) if known["number"] == number else None
        return None

    def _make(self, encoded: bytes, times: int, holds: bool, *, newest: bool) -> tuple[int, Any]:
        """Under init.lock."""
        seat, records = self._seat, ledger.consumers(self._map())
        free = [at for at, one in enumerate(records) if one["state"] != ledger.CONSUMES]
        if not free:
            names = ", ".join(repr(one.name) for one in self.status())
            raise ConsumerError(
                f"{seat.where}: there are {len(records)} consumers already ({names}), and no more "
                "can be; remove one (shmbuffer consumers DIRECTORY --remove NAME)",
                name=encoded.decode(),
            )
        parts = _core.parts(self._calls.schema.capacity)
        start = parts["consumers"] + free[0] * parts["each"]
        seat.ground.extend_ledger(start, parts["each"])
        ledger.note_bytes(self._map(), start + parts["each"])
        padded = np.frombuffer(encoded.ljust(ledger.NAME_BYTES, b"\0"), np.uint8)
        seed = 1 + secrets.randbits(_SEED_BITS)

        def call() -> int:
            given = free[0], padded.ctypes.data, times, holds, newest, seed
            return int(seat.native.open_consumer(*given, LOCK_TIMEOUT_NS))

        self._calls.run(call, "open_consumer")
        return free[0], records[free[0]].copy()


class Consumer:
    """One consumer, as one handle sees it; `Consumers.open` makes it.

    Raises, in every call:
        ConsumerError: it was removed meanwhile.
        BufferClosedError, LockTimeout, BufferNeedsRestart: as they say; nothing was changed.
    """

    def __init__(self, calls: Calls, name: str, which: int, number: int) -> None:
        self._calls = calls
        self._seat = calls.seat
        self.name = name
        self.which = which  # place in the ledger
        self.number = number
        self._lease = np.zeros(1, np.uint64)

    @property
    def is_there(self) -> bool:
        """Whether it was not removed."""
        assert self._seat.mapped is not None
        record = ledger.consumers(self._seat.mapped.ledger)[self.which]
        return bool(record["state"] == ledger.CONSUMES and record["number"] == self.number)

    def take(self, count: int, lease_s: float = math.inf) -> Taken:
        """The oldest ``count`` items that it was not given, under a lease.

        Waits until so many are there. It takes what is left where nobody could write more, or only
        once that is acknowledged (`is_stuck`).

        Args:
            count: items.
            lease_s: seconds until they are given to others; inf: until this handle is closed, or
                its process ends.

        Raises:
            EmptyBufferError: nothing is left, and nobody writes.
            RateLimitTimeout, RateLimitError: as a sample of a limited buffer.
        """
        slots, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        lease = np.zeros(1, np.uint64)
        where = address(slots), address(tickets), address(lease)
        found = self.take_at(count, lease_s, *where)
        return Taken(slots[:found], tickets[:found], int(lease[0]))

    def take_at(self, count: int, lease_s: float, *where: int) -> int:
        """`take`, into memory that is there: addresses of slots, tickets and the lease's number, 0.

        Returns:
            How many items it has taken.
        """
        given = self.which, self.number, count
        lease_ns = nanoseconds(lease_s)
        self._calls.sides.draws_here()

        def call() -> int:
            deliver = self._seat.native.deliver
            result: int = deliver(*given, count, lease_ns, *where, LOCK_TIMEOUT_NS)
            if result == -_core.LIMITED and self._is_over():
                result = deliver(*given, 1, lease_ns, *where, LOCK_TIMEOUT_NS)
                if result == -_core.LIMITED:
                    raise EmptyBufferError(
                        f"{self._seat.where}: Cannot sample from an empty storage; consumer "
                        f"{self.name!r} was given every item, and nobody writes"
                    )
            return result

        return self._taking(call, where[2]) if count else 0

    def _taking(self, call: Callable[[], int], lease_at: int, index: object = None) -> int:
        """What it has taken is given back if it is interrupted; the lease is 0 until then."""
        try:
            return self._calls.run(call, "sample", index=index)
        except BaseException:
            if lease := ctypes.c_uint64.from_address(lease_at).value:
                self.give_back(lease)
            raise

    def _is_over(self) -> bool:
        """Whether nobody writes, and nobody has said that this is to be waited for."""
        seat = self._seat
        found = limiter.read(seat.control.runtime[0])
        if found is not None and found.alone != Alone.PASS:
            return False
        if seat.is_alone():
            return not self._calls.sides.has_thread(Side.INSERTS)
        return self._calls.sides.are_left(Side.INSERTS, time.monotonic())

    def available(self, count: int) -> int:
        """Items that `take` of ``count`` could give now; 0 where it waits. At most O(capacity)."""
        self._seat.reap_dead()  # nobody else may do it, and what they hold is to be given
        found = [one for one in Consumers(self._calls).status() if one.name == self.name]
        ended = [held for one in found for held in one.leases if not held.ends_in_s]
        if not found or found[0].position < found[0].floor + found[0].behind:
            standings = self.standings()
            ours = np.array([held.lease for held in ended], np.uint64)  # where they are not back
            lapsed = (standings.states == HELD_HERE) & np.isin(standings.leases, ours)
            there = int((lapsed | (standings.states == TO_GIVE)).sum())
        else:
            there = sum(held.items for held in ended)
        if there >= count or self._is_over() or (there and self.is_stuck(count - there)):
            return there
        return 0

    def is_stuck(self, missing: int) -> bool:
        """Whether so many items cannot be written before the oldest is done, which nobody holds."""
        where = self.which, self.number, missing
        is_possible = missing < self._calls.schema.capacity  # else no batch is ever whole
        call = lambda: int(self._seat.native.is_stuck(*where, LOCK_TIMEOUT_NS))  # noqa: E731
        return is_possible and self._calls.run(call, "is_stuck") > 0

    def claim(
        self,
        index: NDArray[np.int64],
        tickets: NDArray[np.int64],
        sizes: Sequence[int] | NDArray[np.int64] | None = None,
        lease_s: float = math.inf,
    ) -> tuple[NDArray[np.bool_], int]:
        """Takes items that were chosen, under one lease.

        Args:
            index: slots.
            tickets: of the items that they were chosen for.
            sizes: items of each group, one group after the other: it is taken whole, or not at all
                where one of its items is gone, done, or held by somebody alive. None: each item by
                itself.
            lease_s: as for `take`.

        Returns:
            Which groups were taken, and the lease; 0: none was.
        """
        groups = np.ones(len(index), np.int64) if sizes is None else np.asarray(sizes, np.int64)
        index, tickets = _pair(index, tickets)
        if int(groups.sum()) != len(index) or (groups < 0).any():
            raise ValueError(f"claim: groups of {groups.tolist()} are not {len(index)} items")
        kept, lease = np.zeros(len(groups), np.uint8), np.zeros(1, np.uint64)
        self._calls.sides.draws_here()

        def call() -> int:
            return int(
                self._seat.native.claim_groups(
                    *(self.which, self.number, address(index), address(tickets)),
                    *(groups.ctypes.data, len(groups), nanoseconds(lease_s)),
                    *(kept.ctypes.data, lease.ctypes.data, LOCK_TIMEOUT_NS),
                )
            )

        found = self._taking(call, address(lease), index)
        return kept.astype(bool), int(lease[0]) if found else 0

    def drop(self, index: NDArray[np.int64], tickets: NDArray[np.int64]) -> int:
        """Acknowledges items without a delivery, but for those that somebody alive holds.

        Returns how many. For what was given up: groups that cannot be whole, ends of streams.
        """
        index, tickets = _pair(index, tickets)

        def call() -> int:
            where = self.which, self.number, address(index), address(tickets), len(index)
            return int(self._seat.native.drop_items(*where, LOCK_TIMEOUT_NS))

        return self._calls.run(call, "drop", index=index)

    def ack(
        self,
        leases: int | NDArray[np.uint64],
        index: NDArray[np.int64],
        tickets: NDArray[np.int64],
    ) -> Acknowledged:
        """Acknowledges items, each under the lease that it came with; twice is as once."""
        index, tickets = _pair(index, tickets)
        under = np.ascontiguousarray(np.broadcast_to(np.asarray(leases, np.uint64), index.shape))
        return self.ack_at(address(under), address(index), address(tickets), len(index), index)

    def ack_at(
        self, leases: int, index: int, tickets: int, count: int, shown: object = None
    ) -> Acknowledged:
        """`ack`, by the addresses of so many numbers each; ``shown`` in an error."""
        where = self.which, self.number, leases, index, tickets, count, LOCK_TIMEOUT_NS
        applied = self._calls.run(lambda: self._seat.native.acknowledge(*where), "ack", index=shown)
        return Acknowledged(applied, count - applied)

    def give_back(self, lease: int) -> None:
        """What was taken under a lease, and is not acknowledged, is given to others at once."""

        def call() -> int:
            given = self.which, self.number, lease
            return int(self._seat.native.return_lease(*given, LOCK_TIMEOUT_NS))

        self._calls.run(call, "give_back")

    def standings(self) -> Standings:
        """What each slot's item is to it, all of one moment. O(capacity)."""
        capacity = self._calls.schema.capacity
        found = Standings(
            np.empty(capacity, np.uint8),
            np.empty(capacity, np.int64),
            np.empty(capacity, np.uint64),
        )

        def call() -> int:
            where = (one.ctypes.data for one in found)
            return int(
                self._seat.native.standings(self.which, self.number, *where, LOCK_TIMEOUT_NS)
            )

        self._calls.run(call, "standings")
        return found

    def held(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """Slots, tickets and leases of what this handle holds. O(capacity)."""
        found = self.standings()
        here = (found.states == HELD_HERE).nonzero()[0]
        return here, found.tickets[here], found.leases[here]


def _pair(
    index: NDArray[np.int64], tickets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if np.shape(index) != np.shape(tickets):
        raise ValueError(f"{len(index)} indices, {len(tickets)} generations; give as many")
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(tickets, np.int64)
