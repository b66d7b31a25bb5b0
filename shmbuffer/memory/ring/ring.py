"""Operations on the ring of a buffer. Each operation is a native call whose status is checked here.

     write:   claim ── fill ── commit      (claim and commit take the mutex, fill does not)
     sample:  draw ── copy ── validate; an item that has changed is replaced by another draw
     update:  priorities, by element and ticket

A slot is an index of the first storage dimension. It has ``width`` elements: 1, or the product of
the other storage dimensions. Lane ``lane`` of a slot is the element slot * width + lane. Tickets
are int64.

The payload, indices, tickets and weights are passed as addresses. The payload has one address for
each leaf, in the order of ``schema.leaves``. The caller must check dtypes and shapes. The memory
must be contiguous and must stay alive during the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.admission import Admission
from shmbuffer.memory.flow.consumers import Consumers
from shmbuffer.memory.flow.reservations import Reservations
from shmbuffer.memory.flow.status import raise_for_status, require_linked
from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.limiter import NO_LIMIT, Quota, RateLimiter
from shmbuffer.memory.format.streams import Streams
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.ring.claims import Claims, address_of_priorities
from shmbuffer.memory.ring.item_snapshot import ItemSnapshot, copy_rows
from shmbuffer.memory.ring.records import Records
from shmbuffer.memory.ring.totals import HasTotals
from shmbuffer.memory.ring.tree import PriorityTree
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, WRITE_TIMEOUT_S


class Ring(HasTotals):
    """The ring of a buffer, as one handle uses it.

    Args:
        seat: The seat of the handle. The files of the buffer must be mapped.

    Attributes:
        seat: The seat of the handle.
        schema: The schema of the buffer.
        capacity: Number of slots.
        width: Number of elements per slot.
        elements: Number of elements, ``capacity * width``.
        live: Views of the words, sources, raw priorities and masses of all slots in shared memory.
        tree: The priorities, with their exponents.
        claims: Writes in separate steps.
        records: The byte ring if items are records, otherwise None.
        admission: The limits for writes and samples.
        reservations: Reservations of space for later items.
        consumers: The consumers. Each consumer receives every item once.
    """

    def __init__(self, seat: Seat) -> None:
        assert seat.mapped is not None
        schema, slots, leaves, _ = seat.mapped
        self.seat, self.schema = seat, schema
        self.capacity, self.width = schema.capacity, schema.width
        self.elements = schema.elements
        self.live = SlotsFile(slots, schema, lambda: int(seat.native.head))
        self._calls = Calls(seat, schema, self.live)
        self.tree = PriorityTree(self._calls, self.live)
        self.claims = Claims(self._calls, self.tree)
        self.admission = Admission(self._calls)
        self.reservations = Reservations(self._calls, seat)
        self.consumers = Consumers(self._calls)
        self.records: Records | None = None
        self._leaf_maps = leaves
        if schema.record_bytes:
            self.records = Records(self._calls, self.tree, self.live, leaves[0])
            self._leaf_maps = []

    def __repr__(self) -> str:
        leaves = ", ".join(leaf.name for leaf in self.schema.leaves) or "records or objects"
        return f"Ring({self.seat.where!r}, capacity={self.capacity}, {leaves})"

    # The properties read one value, without a lock.

    @property
    def length(self) -> int:
        """Number of elements that contain an item."""
        return int(self.seat.native.length)

    @property
    def head(self) -> int:
        """The next ticket."""
        return int(self.seat.native.head)

    @property
    def cursor(self) -> int:
        """The first element that the next write at the head uses."""
        return int(self.seat.native.head) % self.capacity * self.width

    @property
    def write_count(self) -> int:
        """Number of elements that all clients together have written so far."""
        return int(self.seat.native.write_count)

    def leaf(self, i: int) -> memoryview:
        """Returns a view of leaf ``i``'s bytes in shared memory, which keeps the map alive."""
        return memoryview(self._leaf_maps[i])

    # Performance-critical calls.

    def write(
        self,
        addresses: Sequence[int],
        count: int,
        priorities: Floats | int | None = None,
        *,
        streams: Streams | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> int:
        """Writes ``count`` slots at the head of the ring: claim, fill and commit.

        Args:
            addresses: For each leaf, the address of an array ``[count, *lanes, *shape]`` in C
                order.
            count: Number of slots. If it exceeds the capacity, only the last slots are kept.
            priorities: Raw priorities, float64 ``[count * width]``, as an array or an address. None
                means the largest priority that was ever set, but at least 1.
            streams: Stream number of each slot, uint32 ``[count]``. None means stream 0.
            timeout: Seconds to wait for a slot that a living writer is filling. None means no
                limit.

        Returns:
            The ticket of the first slot. Lane l of item k is the element
            ``(ticket + k) % capacity * width + l``.

        Raises:
            RingOverrunError: A living writer did not finish in time. Nothing was written.
            ValueError: A priority is NaN, infinite, negative or too large. Nothing was written.
            BufferClosedError, LockTimeout, BufferNeedsRestart: Nothing was written.
        """
        if count == 0:
            return self.head
        if priorities is None and self.tree.initial is not None:
            taken = (self.head + np.arange(min(count, self.capacity))) % self.capacity
            priorities = self.tree.choose_priorities(taken, count * self.width)
        given = address_of_priorities(priorities, count * self.width)
        batch = tuple(addresses), count, given, address(streams), LOCK_TIMEOUT_NS
        try:
            result = int(self.seat.native.write(*batch))
            if result >= 0:
                return result
            return self._calls.again(
                result, lambda: int(self.seat.native.write(*batch)), "write", timeout, priorities
            )
        except BaseException:
            self.seat.native.stop_waiting(LOCK_TIMEOUT_NS)
            raise

    def raise_if_timed_out(self, status: int, what: str = "write") -> None:
        """Raises LockTimeout if the status of a fast native call is a timeout of the mutex.

        After any other failure, the caller repeats the call in a slower way, which raises the
        error. This would be a second wait after a timeout.

        Args:
            status: The status that the native call returned.
            what: Name of the operation, for the message.
        """
        if status == -_core.LOCK_TIMEOUT:
            raise_for_status(self.seat, -status, what)

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed. Checks it once per second.

        All calls that read or write items include this check, except `read`. Costs 0.1 µs.
        """
        require_linked(self.seat)

    def place(
        self,
        where: Ints,
        addresses: Sequence[int],
        priorities: Floats | int | None = None,
        *,
        in_place: bool,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> None:
        """Writes row i of the payload to slot ``where[i]``, whatever the slot contains.

        The next write at the head uses the same slot as before. If ``where`` contains a slot twice,
        the last row is kept.

        Args:
            where: Slots, int64[n].
            addresses: For each leaf, the address of an array ``[n, *lanes, *shape]``.
            priorities: Raw priorities, float64 ``[n * width]``, as an array or an address.
            in_place: If True, existing items keep their raw priorities, and `write_count` does not
                change.
            timeout: See `write`.

        Raises:
            IndexError: A slot does not exist.
            RingOverrunError, ValueError: See `write`.
        """
        if len(where) == 0:
            return
        where = np.ascontiguousarray(where, np.int64)
        if priorities is None and not in_place:
            priorities = self.tree.choose_priorities(where, len(where) * self.width)
        given = address_of_priorities(priorities, len(where) * self.width)
        at, addresses = where.ctypes.data, tuple(addresses)
        self._calls.run(
            lambda: self.seat.native.place(
                at, len(where), addresses, given, in_place, LOCK_TIMEOUT_NS
            ),
            "place",
            timeout,
            priorities,
            where,
        )

    def sample(
        self,
        count: int,
        key: int,
        out: Sequence[int] | None,
        index: int,
        tickets: int,
        weights: int = 0,
        *,
        beta: float = 0.0,
        prioritized: bool,
    ) -> int:
        """Samples ``count`` elements, and copies validated rows of them.

        If there are no committed items because writers are filling the whole ring, the call waits
        up to 5 s.

        Args:
            count: Number of elements.
            key: 64 random bits. With the same key and the same content of the buffer, the same
                elements are sampled.
            out: For each leaf, the address of an output array ``[count, *shape]``. If None, copies
                no payload.
            index: Address of an output array int64[count] for the elements.
            tickets: Address of an output array int64[count] for their tickets.
            weights: Address of an output array float32[count] for the importance weights, or 0. A
                weight is ``(mass / smallest mass) ** -beta`` (Schaul et al. 2016, section 3.4,
                normalized by the largest weight in the buffer).
            beta: Exponent of the importance weights.
            prioritized: If True, elements are sampled with probability proportional to their mass.
                If False, or if all masses are zero, they are sampled uniformly.

        Returns:
            The number of rows that were sampled again because they were overwritten during the
            copy.

        Raises:
            EmptyBufferError: No item is committed.
        """
        rows = None if out is None else tuple(out)
        given = count, key, rows, index, tickets, weights, beta, prioritized, LOCK_TIMEOUT_NS
        result = int(self.seat.native.sample(*given))
        if result >= 0:
            return result
        return self._calls.again(result, lambda: int(self.seat.native.sample(*given)), "sample")

    def read(self, index: int, count: int, out: Sequence[int], tickets: int) -> int:
        """Copies validated rows of the given elements.

        Args:
            index: Address of the elements, int64[count].
            count: Number of elements.
            out: For each leaf, the address of an output array ``[count, *shape]``.
            tickets: Address of an output array int64[count] for the tickets. A ticket is -1 if the
                slot contains no item.

        Returns:
            The number of elements without an item.

        Raises:
            IndexError: An element does not exist.
        """
        if count == 0:
            return 0
        out = tuple(out)
        return self._calls.run(
            lambda: self.seat.native.read(index, count, out, tickets, LOCK_TIMEOUT_NS), "read"
        )

    def update(
        self, index: Ints, priorities: Floats, tickets: Ints | None = None
    ) -> tuple[int, int]:
        """Sets raw priorities. If ``index`` contains an element twice, its last priority is kept.

        Args:
            index: Elements, int64[n].
            priorities: Raw priorities, float64[n].
            tickets: Tickets of the items, int64[n]. A priority is dropped if its slot now has
                another ticket. If None, sets the priorities of the current items.

        Returns:
            The number of priorities that were set, and the number that were dropped because their
            items were overwritten or removed.

        Raises:
            ValueError: A priority is NaN, infinite, negative or too large. Nothing was changed.
            IndexError: An element does not exist. Nothing was changed.
            LockTimeout: A living process held the mutex for too long. The mutex is taken for 128
                priorities at a time, so the first priorities may have been set.
        """
        count = len(index)
        if count == 0:
            return 0, 0
        index = np.ascontiguousarray(index, np.int64)
        priorities = np.ascontiguousarray(priorities, np.float64)
        tickets = None if tickets is None else np.ascontiguousarray(tickets, np.int64)
        if len(priorities) != count or (tickets is not None and len(tickets) != count):
            given = "" if tickets is None else f", {len(tickets)} generations"
            raise ValueError(
                f"update: {count} indices and {len(priorities)} priorities{given} were given; pass"
                " the same number of each"
            )
        at = address(index), address(tickets), address(priorities), count
        applied = self._calls.run(
            lambda: self.seat.native.update(*at, LOCK_TIMEOUT_NS), "update", None, priorities, index
        )
        return applied, count - applied

    def update_arrays(
        self, index: Any, priorities: Any, tickets: Any = None
    ) -> tuple[int, int] | None:
        """Sets raw priorities like `update`, but passes arrays or tensors to the C core unchanged.

        Returns:
            The result of `update`. None if the core cannot read an argument directly, an index is
            out of range, or the core has rejected the call. Call `update` in these cases.
        """
        found = self.seat.native.update_arrays(index, priorities, tickets, LOCK_TIMEOUT_NS)
        if type(found) is int:
            self.raise_if_timed_out(found, "update")
            return None
        return found  # type: ignore[no-any-return]

    def empty(self, *, keep_write_count: bool = False) -> None:
        """Removes all items and resets the largest priority. O(capacity).

        Slots that a writer is filling are not changed.
        """
        self._calls.ask("empty", keep_write_count)

    def snapshot(self) -> bytes:
        """Returns a consistent copy of the runtime page and the registry.

        `counters.split_snapshot` parses the copy.
        """
        return bytes(
            self._calls.answer(lambda: self.seat.native.snapshot(LOCK_TIMEOUT_NS), "snapshot")
        )

    def restore(self, ticket: int, write_count: int, max_priority: float | None) -> None:
        """Sets the next ticket, the write count and the largest priority after a load.

        The items do not change.

        Args:
            ticket: The next ticket. If it was already used, a later ticket of the same slot is set.
            write_count: Number of elements that were written.
            max_priority: The largest raw priority that was ever set, or None.
        """
        greatest = -1.0 if max_priority is None else float(max_priority)
        self._calls.ask("restore", ticket, write_count, greatest)

    def copy_out(self, out: Sequence[int]) -> ItemSnapshot:
        """Copies a consistent snapshot of all items, while other clients continue to write.

        Cost: All bytes are copied once. Bytes that are written during the copy are copied again.
        The mutex is held while the words and raw priorities are scanned, and while the slots of the
        last round are copied. The scan takes a few milliseconds per million elements.

        Args:
            out: For each leaf, the address of an output array ``[capacity, *lanes, *shape]``. The
                rows of slots without an item contain arbitrary bytes afterwards.
        """
        return copy_rows(self._calls, tuple(out), self.length)

    def limit(self, wanted: RateLimiter | Quota | None) -> None:
        """Sets or removes the limits for writes and samples (`Engine.set_limiter`)."""
        numbers = NO_LIMIT if wanted is None else wanted.to_numbers()
        self._calls.ask("set_limits", *numbers)
