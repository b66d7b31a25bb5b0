"""Operations on the ring of a buffer: makes one native call for each and handles its status.

     write:   claim ── fill ── commit      (the mutex is held for claim and commit, not for fill)
     sample:  draw ── copy ── check, and draw again if an item has changed
     update:  priorities, by element and ticket

A slot is one index of the first storage dimension and has ``width`` elements (1 unless the storage
has several dimensions). Lane ``lane`` of a slot is element slot * width + lane. Tickets are int64.

Payload, index, tickets and weights are passed by address. The payload has one address for each
leaf, in the order of ``schema.leaves``. The caller must check dtypes and shapes, and keep the
memory alive and contiguous.
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
    """Gives one handle access to the ring of a buffer.

    Args:
        seat: The seat of the handle, whose definition is mapped.

    Attributes:
        seat: The seat of the handle.
        schema, capacity: The schema of an item, and the number of slots.
        width, elements: The number of elements per slot, and capacity * width.
        live: Live views of the words, sources, raw priorities and masses of all slots.
        tree: The priority tree, with the exponents.
        claims: The methods for writes in separate steps.
        records: The byte ring if items are records; None if items are rows of leaves.
        admission: The limits of writes and samples.
        reservations: The reservations of space for later items.
        consumers: The consumers, which each receive every item once.
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

    # Each property is one load, without a lock.

    @property
    def length(self) -> int:
        """The number of elements that contain an item."""
        return int(self.seat.native.length)

    @property
    def head(self) -> int:
        """The next ticket."""
        return int(self.seat.native.head)

    @property
    def cursor(self) -> int:
        """The first element of the next write."""
        return int(self.seat.native.head) % self.capacity * self.width

    @property
    def write_count(self) -> int:
        """The number of elements that all clients have written so far."""
        return int(self.seat.native.write_count)

    def leaf(self, i: int) -> memoryview:
        """Returns a live view of the bytes of leaf ``i``, which keeps its map alive."""
        return memoryview(self._leaf_maps[i])

    # The hot calls.

    def write(
        self,
        addresses: Sequence[int],
        count: int,
        priorities: Floats | int | None = None,
        *,
        streams: Streams | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> int:
        """Writes ``count`` slots at the head of the ring: claim, fill, commit.

        Args:
            addresses: The address of ``[count, *lanes, *shape]`` in C order for each leaf.
            count: The number of slots. If it exceeds the capacity, only the last slots are kept.
            priorities: Raw priorities, float64, ``count * width``, as an array or an address. The
                default is the largest priority ever set, or 1 before the first.
            streams: uint32 ``[count]``, the stream of each slot; None for stream 0.
            timeout: Seconds to wait for a slot that a living writer is filling; None: no limit.

        Returns:
            The first ticket: item k, lane l is element ``(ticket + k) % capacity * width + l``.

        Raises:
            RingOverrunError: A living writer did not finish in time; nothing was written.
            ValueError: A priority is NaN, infinite, negative or too large; nothing was written.
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
        """Handles the status of a failed fast call, before the caller repeats it more slowly.

        A timeout of the lock raises LockTimeout at once, because the fast call has already waited.
        """
        if status == -_core.LOCK_TIMEOUT:
            raise_for_status(self.seat, -status, what)

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed; checks this once per second.

        All calls that read or write items do this check, except for `read`. Cost: 0.1 µs.
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
        """Writes row i of the payload to slot ``where[i]``.

        The head of the ring does not change. If a slot is given twice, the last row is kept.

        Args:
            where: int64, slots.
            addresses: The address of ``[len(where), *lanes, *shape]`` for each leaf.
            priorities: Raw priorities, float64, ``len(where) * width``.
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
        """Samples ``count`` elements and copies them out, each validated.

        Args:
            count: The number of elements.
            key: 64 random bits; the same key on the same buffer samples the same elements.
            out: The address of ``[count, *shape]`` for each leaf; None for no payload.
            index: The address of int64[count], for the elements.
            tickets: The address of int64[count].
            weights: The address of float32[count], or 0, for (mass / smallest mass) ** -beta
                (Schaul et al. 2016, section 3.4, normalised by the largest weight in the buffer).
            beta: The importance-sampling exponent.
            prioritized: If True, sample with probability proportional to mass, otherwise uniformly
                over committed items. If all masses are zero, sampling is uniform.

        Returns:
            The number of rows that were sampled again because they were overwritten during the
            copy.

        If no item is committed because the whole ring is being written, the call waits up to 5 s.

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
        """Copies elements by index, each validated.

        Args:
            index: The address of int64[count].
            count: The number of elements.
            out: The address of ``[count, *shape]`` for each leaf.
            tickets: The address of int64[count]; -1 if the slot contains no item.

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
        """Sets raw priorities; if an element is given twice, its last priority is kept.

        Args:
            index: int64[n], elements.
            priorities: float64[n], raw priorities.
            tickets: int64[n], the tickets of the items. If a slot has a different ticket now, its
                element is not changed.

        Returns:
            The number of applied priorities, and the number whose item was overwritten or removed.

        Raises:
            ValueError: A priority is NaN, infinite, negative or too large; nothing was changed.
            IndexError: An element does not exist; nothing was changed.
            LockTimeout: A living process holds the mutex. The mutex is taken for 128 priorities at
                a time, so the first ones may have been set.
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
                " as many of each"
            )
        at = address(index), address(tickets), address(priorities), count
        applied = self._calls.run(
            lambda: self.seat.native.update(*at, LOCK_TIMEOUT_NS), "update", None, priorities, index
        )
        return applied, count - applied

    def update_arrays(
        self, index: Any, priorities: Any, tickets: Any = None
    ) -> tuple[int, int] | None:
        """Sets raw priorities like `update`, from arrays or tensors that the C core reads directly.

        Returns:
            The result of `update`. None if the arguments are unsuitable, an index is out of range,
            or the core has rejected the call; `update` then raises the error.
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
        """Returns the runtime page and the registry, for `counters.split_snapshot`."""
        return bytes(
            self._calls.answer(lambda: self.seat.native.snapshot(LOCK_TIMEOUT_NS), "snapshot")
        )

    def restore(self, ticket: int, write_count: int, max_priority: float | None) -> None:
        """Sets the next ticket, the write count and the largest priority.

        Used for a buffer whose items were loaded. The items do not change.

        Args:
            ticket: The next ticket. If it was already used, the next ticket of its slot is used.
            write_count: The number of elements written.
            max_priority: The largest raw priority ever set; None if none was set yet.
        """
        greatest = -1.0 if max_priority is None else float(max_priority)
        self._calls.ask("restore", ticket, write_count, greatest)

    def copy_out(self, out: Sequence[int]) -> ItemSnapshot:
        """Copies all items of one point in time, while other clients continue to write.

        Args:
            out: The address of ``[capacity, *lanes, *shape]`` for each leaf. The rows of slots
                without an item are not changed, or contain arbitrary bytes.

        Cost: all bytes are copied once, and bytes that are written during the copy are copied
        again. The mutex is held for a scan of the words and raw priorities, and for the slots that
        were written during the last round. The scan takes a few milliseconds per million elements.
        """
        return copy_rows(self._calls, tuple(out), self.length)

    def limit(self, wanted: RateLimiter | Quota | None) -> None:
        """Sets the limits of writes and samples; see `Engine.set_limiter`."""
        numbers = NO_LIMIT if wanted is None else wanted.to_numbers()
        self._calls.ask("set_limits", *numbers)
