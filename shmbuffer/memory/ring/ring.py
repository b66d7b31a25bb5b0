"""The calls that move items: one native call each, and what to do where it says that it could not.

     write:   claim ── fill ── commit      (the mutex is held for claim and commit, not for fill)
     sample:  draw ── copy ── look again, draw again what changed
     update:  priorities, by element and ticket

Elements and slots: a slot is one index of the first storage dimension and holds ``width`` elements
(1 unless the storage has several dimensions); element = slot * width + lane. Tickets are int64.

Payload comes and goes by address, in the order of ``schema.leaves``, and so do index, tickets and
weights: the caller keeps memory alive and contiguous, and has compared dtypes and shapes.
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
    """The ring of one buffer, as one handle sees it.

    Args:
        seat: of the handle; its definition is mapped.

    Attributes:
        seat: of the handle.
        schema, capacity: what an item is made of; slots.
        width, elements: of a slot; capacity * width.
        live: words, sources, raw priorities and masses of all slots, as they are now.
        tree: priorities and their exponents.
        claims: the split form of a write.
        records: the byte ring, where items are records; None where they are rows of leaves.
        admission: what limits writes and samples, and the waiting for it.
        reservations: room for items to come.
        consumers: who is given each item once.
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

    # One load each; no lock.

    @property
    def length(self) -> int:
        """Elements that hold an item."""
        return int(self.seat.native.length)

    @property
    def head(self) -> int:
        """The next ticket."""
        return int(self.seat.native.head)

    @property
    def cursor(self) -> int:
        """The element that the next write starts at."""
        return int(self.seat.native.head) % self.capacity * self.width

    @property
    def write_count(self) -> int:
        """Elements written so far, by everybody."""
        return int(self.seat.native.write_count)

    def leaf(self, i: int) -> memoryview:
        """The bytes of leaf ``i`` for all elements, live; the map stays while the view does."""
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
            addresses: of ``[count, *lanes, *shape]``, C order, one a leaf.
            count: slots. Of more than the capacity the last ones stay.
            priorities: raw, float64, ``count * width``, as an array or an address; without, the
                largest ever given, at least 1.
            streams: uint32 ``[count]``, of each slot; None: stream 0.
            timeout: seconds to wait for a slot that a living writer is filling; None: for ever.

        Returns:
            The ticket of the first: item k, lane l is element ``(ticket + k) % capacity * width +
                l``.

        Raises:
            RingOverrunError: a living writer did not finish in time; nothing was written.
            ValueError: a priority is NaN, infinite, negative or too large; nothing was written.
            BufferClosedError, LockTimeout, BufferNeedsRestart: as they say; nothing was written.
        """
        if count == 0:
            return self.head
        if priorities is None and self.tree.initial is not None:
            taken = (self.head + np.arange(min(count, self.capacity))) % self.capacity
            priorities = self.tree.of_new(taken, count * self.width)
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
            self.seat.native.give_up(LOCK_TIMEOUT_NS)
            raise

    def refused(self, status: int, what: str = "write") -> None:
        """Handles the status of a fast call, before the call is repeated in a slower way.

        Raises LockTimeout: that it has waited for once is enough.
        """
        if status == -_core.LOCK_TIMEOUT:
            raise_for_status(self.seat, -status, what)

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed; looks once a second.

        Calls that move items do so by themselves, but for `read`. Cost: 0.1 µs.
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
        """Writes named slots: row i of the payload goes to slot ``where[i]``.

        The position of the ring stays. A slot that is named twice holds the last row.

        Args:
            where: int64, slots.
            addresses: of ``[len(where), *lanes, *shape]``, one a leaf.
            priorities: raw, float64, ``len(where) * width``.
            in_place: an item that is there keeps its raw priority, and `write_count` stays.
            timeout: as for `write`.

        Raises:
            IndexError: no such slot; and as `write`.
        """
        if len(where) == 0:
            return
        where = np.ascontiguousarray(where, np.int64)
        if priorities is None and not in_place:
            priorities = self.tree.of_new(where, len(where) * self.width)
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
        """Draws ``count`` elements and copies them out, each validated.

        Args:
            count: elements.
            key: 64 bits; the same key on the same buffer draws the same elements.
            out: addresses of ``[count, *shape]``, one a leaf; None: no payload.
            index: address of int64[count]: elements.
            tickets: address of int64[count].
            weights: address of float32[count], or 0: (mass / smallest mass) ** -beta (Schaul et al.
                2016, section 3.4, normalised by the largest weight in the buffer).
            beta: importance-sampling exponent.
            prioritized: by mass; else uniformly over what is committed. Masses that are all zero:
                uniformly.

        Returns:
            Rows that had to be drawn again because they were overwritten while being copied.

        Waits while nothing is committed because the whole ring is being written, up to 5 s.

        Raises:
            EmptyBufferError: nothing is committed.
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
            index: address of int64[count].
            count: elements.
            out: addresses of ``[count, *shape]``, one a leaf.
            tickets: address of int64[count]; -1 where the slot holds no item.

        Returns:
            How many hold none.

        Raises:
            IndexError: no such element.
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
        """Sets raw priorities; an element named twice keeps the last.

        Args:
            index: int64[n], elements.
            priorities: float64[n], raw.
            tickets: int64[n]; an element whose slot has been written since is left as it is.

        Returns:
            How many were applied, and how many were stale or hold no item.

        Raises:
            ValueError: a priority is NaN, infinite, negative or too large; nothing was changed.
            IndexError: no such element; nothing was changed.
            LockTimeout: a living process holds the mutex. It is taken for 128 priorities at a time,
                so that the first of more may have been set.
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
                f"update: {count} indices, {len(priorities)} priorities{given}; give as many"
            )
        at = address(index), address(tickets), address(priorities), count
        applied = self._calls.run(
            lambda: self.seat.native.update(*at, LOCK_TIMEOUT_NS), "update", None, priorities, index
        )
        return applied, count - applied

    def update_given(
        self, index: Any, priorities: Any, tickets: Any = None
    ) -> tuple[int, int] | None:
        """`update` with arrays or tensors that the core reads where they are.

        Returns:
            None: they are others, an index is out of range, or the core has refused: `update` says
            why.
        """
        found = self.seat.native.update_given(index, priorities, tickets, LOCK_TIMEOUT_NS)
        if type(found) is int:
            self.refused(found, "update")
            return None
        return found  # type: ignore[no-any-return]

    def empty(self, *, keep_write_count: bool = False) -> None:
        """Forgets every item, and the largest priority. O(capacity).

        Slots that a writer is filling stay its own.
        """
        self._calls.ask("empty", keep_write_count)

    def snapshot(self) -> bytes:
        """Runtime page and registry, of one moment; see `counters.of_snapshot`."""
        return bytes(
            self._calls.answer(lambda: self.seat.native.snapshot(LOCK_TIMEOUT_NS), "snapshot")
        )

    def restore(self, ticket: int, write_count: int, max_priority: float | None) -> None:
        """Sets where the next item goes, what was counted, and the largest priority seen.

        For a buffer whose items were loaded. The items stay as they are.

        Args:
            ticket: the next one; of one that is past, the next of its slot.
            write_count: elements.
            max_priority: raw; None: none was given yet.
        """
        greatest = -1.0 if max_priority is None else float(max_priority)
        self._calls.ask("restore", ticket, write_count, greatest)

    def copy_out(self, out: Sequence[int]) -> ItemSnapshot:
        """Copies every item, all of one moment, while others go on writing.

        Args:
            out: addresses of ``[capacity, *lanes, *shape]``, one a leaf. Slots without an item are
                left as they are, or hold bytes without meaning.

        Cost: the bytes once, and what is written meanwhile. The mutex is held for a scan of the
            words and raw priorities, some milliseconds for a million elements, and for what was
            written during the last round.
        """
        return copy_rows(self._calls, tuple(out), self.length)

    def limit(self, wanted: RateLimiter | Quota | None) -> None:
        """Sets what limits writes and samples; see `Engine.set_limiter`."""
        numbers = NO_LIMIT if wanted is None else wanted.to_numbers()
        self._calls.ask("limit", *numbers)
