"""Operations on the byte ring, which stores records of any size one after the other.

    position    tail ────────────────────── head ────────────── tail + max_bytes
                │ the oldest record in use  │ the next record starts here

    file        a position is at offset position mod max_bytes; the file is mapped twice in
                succession, so that each record is contiguous in memory

    record      ticket u64 | position u64 | bytes u64 | body (see `record_format`)
    slot        word, checksum, source and priority, as in every ring, and an extent: the position
                and the number of bytes of its record

A claim reserves slots and bytes together, under the mutex. To free bytes, it moves the tail from
header to header and evicts the items that the tail passes (their slots become EMPTY). Bytes are
reserved and freed in the order of tickets, so an item is never evicted before an older one.

Always true
  1. The record of each item is between the tail and the head, and head - tail never exceeds
     max_bytes.
  2. A reader can go from header to header, from the tail to the head: each record starts where the
     previous one ends, rounded up to a multiple of 8. A record belongs to the item of its slot if
     its ticket and position match those of the slot. Otherwise the record is obsolete.
  3. The word of a slot is changed from COMMITTED before any byte of its record changes. A copy of a
     record is therefore valid under the same condition as a copy of a row: the word was the same
     before and after the copy.
If the writer dies before the head has moved: its claim has only evicted items, which the next claim
would have evicted as well. If it dies later: its slot words are rolled back or forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.streams import Streams
from shmbuffer.memory.mapped.extents import live_bytes
from shmbuffer.memory.mapped.record_batch import RecordBatch, RecordSample, addresses_of
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.ring.claims import address_of_priorities
from shmbuffer.memory.ring.item_snapshot import ItemSnapshot
from shmbuffer.memory.ring.tree import PriorityTree
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, WRITE_TIMEOUT_S
from shmbuffer.memory.system.progress import Progress

# The maximum number of rounds that copy new bytes without the mutex. Then the number of bytes that
# can remain for the last round, under the mutex, and the number of bytes per write to the file.
_COPY_ROUNDS = 8
_COPY_LOCKED_BYTES = 2**20
_COPY_PIECE_BYTES = 2**24


class Records:
    """Operations on the records of a ring: `Ring.records` if the schema has ``record_bytes``."""

    def __init__(
        self, calls: Calls, tree: PriorityTree, live: SlotsFile, records_map: _core.Map
    ) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._tree = tree
        self._live = live
        self._map = records_map
        self._capacity = calls.schema.capacity
        self.max_bytes = calls.schema.record_bytes  # size of the byte ring
        # `layout.EXTENT` of each slot, in shared memory; not valid for a slot without an item
        self.extents = live.extents
        self._usual_bytes = 256.0  # moving average of the size of sampled records in bytes

    # Queries.

    @property
    def used(self) -> int:
        """Number of bytes between the tail and the head."""
        native = self._seat.native
        return int(native.byte_head - native.byte_tail)

    @property
    def content(self) -> memoryview:
        """View of the bytes of the ring in shared memory, which are mapped twice in succession."""
        return memoryview(self._map)

    def live(self) -> int:
        """Returns the total size of all items' records in bytes, with headers. O(capacity)."""
        return live_bytes(self._live)

    # Performance-critical calls.

    def write(
        self,
        batch: RecordBatch,
        priorities: Floats | None = None,
        *,
        streams: Streams | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> int:
        """Writes a batch of records at the head. The oldest records are evicted to make space.

        Args:
            batch: The records.
            priorities: Raw priorities, float64[n]. None means the default priority.
            streams: Stream number of each record, uint32[n]. None means stream 0.
            timeout: Seconds to wait for slots or bytes that a living writer is filling. None means
                no limit.

        Returns:
            The ticket of the first record.
        """
        count, head, capacity = len(batch), int(self._seat.native.head), self._capacity
        if count == 0:
            return head
        if priorities is None and self._tree.initial is not None:
            taken = (head + np.arange(min(count, capacity))) % capacity
            priorities = self._tree.choose_priorities(taken, count)
        raw_address = address_of_priorities(priorities, count)
        arguments = *addresses_of(batch), raw_address, address(streams)
        return self._calls.run(
            lambda: int(self._seat.native.write_records(*arguments, LOCK_TIMEOUT_NS)),
            "write",
            timeout,
            priorities,
        )

    def place(
        self,
        where: Ints,
        batch: RecordBatch,
        priorities: Floats | None = None,
        *,
        in_place: bool,
        tickets: Ints | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> Flags:
        """Writes record i to slot ``where[i]``, whatever the slot contains.

        Args:
            where: Slots, int64[n], without duplicates.
            batch: The records.
            priorities: Raw priorities, float64[n]. None means the default priority, or with
                ``in_place`` the current priority.
            in_place: If True, existing items keep their raw priorities, and `Ring.write_count` does
                not change.
            tickets: Expected tickets, int64[n]. A record is written only if its slot still has this
                ticket. If None, writes all records.
            timeout: See `write`.

        Returns:
            A mask of the records that were written, bool[n].
        """
        count = len(batch)
        if count != len(where):
            raise ValueError(f"{count} records cannot be written to {len(where)} slots")
        if priorities is None and not in_place:
            priorities = self._tree.choose_priorities(where, count)
        order = np.argsort(where, kind="stable")
        written = np.ones(count, np.bool_)
        if count == 0:
            return written
        ordered = np.ascontiguousarray(where[order], np.int64)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("slots must be unique, but a slot was passed twice; pass it once")
        rows = batch.rows(order)
        raw = None if priorities is None else np.ascontiguousarray(priorities[order])
        expected = None if tickets is None else np.ascontiguousarray(tickets[order], np.int64)
        taken = np.ones(count, np.bool_)
        raw_address = address_of_priorities(raw, count)
        addresses = (address(ordered), *addresses_of(rows), raw_address, in_place)
        self._calls.run(
            lambda: int(
                self._seat.native.place_records(
                    *addresses, address(expected), address(taken), LOCK_TIMEOUT_NS
                )
            ),
            "place",
            timeout,
            raw,
            ordered,
        )
        written[order] = taken
        return written

    def sample(self, count: int, key: int, *, beta: float | None) -> RecordSample:
        """Samples ``count`` records, and returns validated copies of them.

        ``key`` and ``beta`` are described in `Ring.sample`. If ``beta`` is None, records are
        sampled uniformly and without importance weights.
        """
        index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        weights = None if beta is None else np.empty(count, np.float32)
        arguments = (
            address(index),
            address(tickets),
            address(weights),
            0.0 if beta is None else beta,
            beta is not None,
        )
        batch = self._copy_records(
            count,
            lambda arena: self._seat.native.sample_records(
                count, key, *arena, *arguments, LOCK_TIMEOUT_NS
            ),
            "sample",
        )
        return RecordSample(batch, index, tickets, weights)

    def read(self, index: Ints) -> RecordSample:
        """Returns validated copies of the records in these slots, int64[n].

        If a slot contains no item, the size of its record is 0 and its ticket is -1.
        """
        index = np.ascontiguousarray(index, np.int64)
        count, tickets = len(index), np.empty(len(index), np.int64)
        slots_address, tickets_address = address(index), address(tickets)
        batch = self._copy_records(
            count,
            lambda arena: self._seat.native.read_records(
                slots_address, count, *arena, tickets_address, LOCK_TIMEOUT_NS
            ),
            "read",
            index,
        )
        return RecordSample(batch, index, tickets, None)

    def copy_out(self, descriptor: int, where: str) -> ItemSnapshot:
        """Copies a consistent snapshot of all records to a file.

        Committed records do not change, so most of them are copied without a lock. The mutex is
        held for the last megabyte and for a scan of the slots.

        Args:
            descriptor: Descriptor of the file, which has the size of the byte ring. Records are
                written at the same offsets as in the ring.
            where: Path of the file, for messages.
        """
        # Without this call, records after the claim of a dead writer could only be copied under the
        # mutex.
        self._seat.reap_dead()
        copied, safe, _ = self._span()
        with Progress("copy", safe - copied) as progress:
            for _ in range(_COPY_ROUNDS):
                self._copy(descriptor, copied, safe, where, progress)
                copied = safe
                tail, safe, head = self._span()
                # Records that were evicted during the copy are not part of the snapshot.
                copied = max(copied, tail)
                if head - copied <= _COPY_LOCKED_BYTES:
                    break
        capacity = self._capacity
        tickets, sources = np.full(capacity, -1, np.int64), np.zeros(capacity, np.uint64)
        raw, extents = np.zeros(capacity), np.zeros(capacity, layout.EXTENT)
        size = 2 * _COPY_LOCKED_BYTES
        while True:
            rest = np.empty(size, np.uint8)
            answer = self._seat.native.finish_records_snapshot(
                copied,
                address(rest),
                size,
                address(tickets),
                address(extents),
                address(sources),
                address(raw),
                LOCK_TIMEOUT_NS,
            )
            if not isinstance(answer, int):
                break
            # A writer is suspended while it holds a claim, so more bytes than usual have to be
            # copied under the mutex.
            if answer == -_core.NO_ROOM:
                size = min(self.max_bytes, 2 * int(self._seat.native.needed))
            else:
                self._calls.again(answer, lambda: 0, "copy_out")
        head, write_count, greatest, tail, byte_head = answer
        start = max(copied, tail)
        self._pwrite(descriptor, rest[: byte_head - start].data, start, where)
        raw[tickets < 0] = np.nan
        extents[tickets < 0] = np.zeros((), layout.EXTENT)
        known = greatest if greatest >= 0 else None
        counts = head, write_count, known
        return ItemSnapshot(tickets, sources, raw, *counts, extents, tail, byte_head)

    def _span(self) -> tuple[int, int, int]:
        """Returns the tail, the position of the first byte that a client is writing, and the head.

        If no client is writing, the second position is the head.
        """
        found: tuple[int, int, int] = self._calls.answer(
            lambda: self._seat.native.read_span(LOCK_TIMEOUT_NS), "copy_out"
        )
        return found

    def _copy(self, descriptor: int, start: int, stop: int, where: str, progress: Progress) -> None:
        """Copies the bytes between two positions of the byte ring to a file."""
        content = self.content
        for at in range(start, stop, _COPY_PIECE_BYTES):
            size = min(_COPY_PIECE_BYTES, stop - at)
            first = at % self.max_bytes
            self._pwrite(descriptor, content[first : first + size], at, where)
            progress.advance(size)

    def _pwrite(self, descriptor: int, content: memoryview, at: int, where: str) -> None:
        """Writes bytes of the ring to a file at a position, wrapping around at its end."""
        while len(content):
            offset = at % self.max_bytes
            try:
                written = os.pwrite(descriptor, content[: self.max_bytes - offset], offset)
                _core.reached("file.written")
            except OSError as error:
                free = filesystem.free_bytes(descriptor)
                raise filesystem.space_error(
                    where, offset + len(content), free, why=error.errno or 0
                ) from error
            content, at = content[written:], at + written

    def _copy_records(
        self,
        count: int,
        call: Callable[[tuple[int, ...]], int],
        what: str,
        index: Ints | None = None,
    ) -> RecordBatch:
        """Copies records to new memory, which is enlarged until they fit.

        Args:
            count: Number of records.
            call: Native call that copies the records. Its argument is the memory: the address and
                size of the bytes, and the addresses of starts, sizes and positions.
            what: Name of the operation, for messages.
            index: Slots of the records, for messages. None for a sample.
        """
        starts, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
        positions = np.empty(count, np.uint64)
        size = int(count * self._usual_bytes * 1.25) + layout.PAGE
        places = (address(starts), address(sizes), address(positions))
        while True:
            data = np.empty(size, np.uint8)
            arena = (address(data), size, *places)

            def attempt(arena: tuple[int, ...] = arena) -> int:
                result = call(arena)
                return _TOO_SMALL if result == -_core.NO_ROOM else result

            used = self._calls.run(attempt, what, WRITE_TIMEOUT_S, None, index)
            if used != _TOO_SMALL:
                break
            size = max(2 * size, int(self._seat.native.needed * 1.25))
        if count:
            self._usual_bytes = 0.9 * self._usual_bytes + 0.1 * used / count
            self._usual_bytes = max(self._usual_bytes, 0.5 * used / count)
        return RecordBatch(data[:used], starts, sizes)


# Result of a copy for which the memory was too small. It differs from every status and every number
# of bytes.
_TOO_SMALL = 2**62
