"""The byte ring: records of any size, one behind the other, in a ring of bytes.

    position    tail ────────────────────── head ────────────── tail + max_bytes
                │ the oldest record in use  │ the next record starts here

    file        the byte at a position is number position mod max_bytes; the file is mapped twice in
                a row, so that no record is cut at its end

    record      ticket u64 | position u64 | bytes u64 | body (see `record_format`)
    slot        word, checksum, source, priority, as of every ring; and an extent: position, bytes

A claim takes slots and bytes together, under the mutex: the tail moves on from header to header,
and an item that still lies there is evicted (its slot is EMPTY then). Bytes are taken in the order
of tickets and given back in the same order, so an item never goes before an older one.

Always true
  1. The record of every item lies between tail and head, and head - tail is at most max_bytes.
  2. From the tail on, headers lead to the head: each record starts where the one before ends, at a
     multiple of 8. A record is the item of its slot if ticket and position are those of the slot;
     else it is no longer needed.
  3. A word stops saying COMMITTED before a byte of its record changes, so what is true of every
     slot is true here: a copy is kept if the word was the same before and after.
If the writer dies: before the head has moved nothing but evictions is left of its claim, which were
to come in any case; later its records are behind words that are rolled back, or forward.
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

#: Of a copy: how often what has been written since is copied without the mutex, and how many bytes
#: are left for it.
_COPY_ROUNDS = 8
_COPY_LOCKED_BYTES = 2**20
_COPY_PIECE_BYTES = 2**24


class Records:
    """The records of a ring: `Ring.records`, if its schema has ``record_bytes``."""

    def __init__(
        self, calls: Calls, tree: PriorityTree, live: SlotsFile, records_map: _core.Map
    ) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._tree = tree
        self._live = live
        self._map = records_map
        self._capacity = calls.schema.capacity
        self.max_bytes = calls.schema.record_bytes  # of the byte ring
        # of each slot, ``layout.EXTENT``, live; of slots without an item without meaning
        self.extents = live.extents
        self._usual_bytes = 256.0  # of a record, as far as we know

    # Queries.

    @property
    def used(self) -> int:
        """Bytes from the oldest record that is in use to the head."""
        native = self._seat.native
        return int(native.byte_head - native.byte_tail)

    @property
    def content(self) -> memoryview:
        """The bytes of the ring, twice in a row, live."""
        return memoryview(self._map)

    def live(self) -> int:
        """Bytes of the records of all items with headers. O(capacity)."""
        return live_bytes(self._live)

    # The hot calls.

    def write(
        self,
        batch: RecordBatch,
        priorities: Floats | None = None,
        *,
        streams: Streams | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> int:
        """Writes a batch at the head, over the oldest records; returns the first ticket."""
        count, head, capacity = len(batch), int(self._seat.native.head), self._capacity
        if count == 0:
            return head
        if priorities is None and self._tree.initial is not None:
            taken = (head + np.arange(min(count, capacity))) % capacity
            priorities = self._tree.of_new(taken, count)
        given = address_of_priorities(priorities, count)
        arguments = *addresses_of(batch), given, address(streams)
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
        """Writes record i to slot ``where[i]``; returns which were written, bool[n]."""
        count = len(batch)
        if count != len(where):
            raise ValueError(f"{count} records cannot be written to {len(where)} slots")
        if priorities is None and not in_place:
            priorities = self._tree.of_new(where, count)
        order = np.argsort(where, kind="stable")
        kept = np.ones(count, np.bool_)
        if count == 0:
            return kept
        ordered = np.ascontiguousarray(where[order], np.int64)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a slot is named twice; each of them takes one record")
        rows = RecordBatch(batch.data, batch.starts[order], batch.sizes[order])
        raw = None if priorities is None else np.ascontiguousarray(priorities[order])
        expected = None if tickets is None else np.ascontiguousarray(tickets[order], np.int64)
        taken = np.ones(count, np.bool_)
        given = address_of_priorities(raw, count)
        addresses = (address(ordered), *addresses_of(rows), given, in_place)
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
        kept[order] = taken
        return kept

    def sample(self, count: int, key: int, *, beta: float | None) -> RecordSample:
        """Draws records and copies them out, each validated. See `Ring.sample`."""
        index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        weights = None if beta is None else np.empty(count, np.float32)
        how = (
            address(index),
            address(tickets),
            address(weights),
            0.0 if beta is None else beta,
            beta is not None,
        )
        batch = self._copied(
            count,
            lambda arena: self._seat.native.sample_records(
                count, key, *arena, *how, LOCK_TIMEOUT_NS
            ),
            "sample",
        )
        return RecordSample(batch, index, tickets, weights)

    def read(self, index: Ints) -> RecordSample:
        """Copies records by slot, each validated; where there is no item the size is 0."""
        index = np.ascontiguousarray(index, np.int64)
        count, tickets = len(index), np.empty(len(index), np.int64)
        at, whose = address(index), address(tickets)
        batch = self._copied(
            count,
            lambda arena: self._seat.native.read_records(at, count, *arena, whose, LOCK_TIMEOUT_NS),
            "read",
            index,
        )
        return RecordSample(batch, index, tickets, None)

    def copy_out(self, descriptor: int, where: str) -> ItemSnapshot:
        """Copies a snapshot of all records to a file of the size of the byte ring, as they lie.

        Committed records do not change, so they are copied without a lock; the mutex is held for
        the last megabyte, and a scan of the slots.
        """
        self._seat.reap_dead()  # behind a dead writer's claim all would be left for the mutex
        copied, safe, _ = self._span()
        with Progress("copy", safe - copied) as progress:
            for _ in range(_COPY_ROUNDS):
                self._copy(descriptor, copied, safe, where, progress)
                copied = safe
                tail, safe, head = self._span()
                copied = max(copied, tail)  # what went meanwhile is nobody's
                if head - copied <= _COPY_LOCKED_BYTES:
                    break
        capacity = self._capacity
        tickets, sources = np.full(capacity, -1, np.int64), np.zeros(capacity, np.uint64)
        raw, extents = np.zeros(capacity), np.zeros(capacity, layout.EXTENT)
        room = 2 * _COPY_LOCKED_BYTES
        while True:
            rest = np.empty(room, np.uint8)
            answer = self._seat.native.records_moment(
                copied,
                address(rest),
                room,
                address(tickets),
                address(extents),
                address(sources),
                address(raw),
                LOCK_TIMEOUT_NS,
            )
            if not isinstance(answer, int):
                break
            if answer == -_core.NO_ROOM:  # a writer that stands still: the rest waits for nobody
                room = min(self.max_bytes, 2 * int(self._seat.native.needed))
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
        """Tail; where nobody writes below; head."""
        found: tuple[int, int, int] = self._calls.answer(
            lambda: self._seat.native.span(LOCK_TIMEOUT_NS), "copy_out"
        )
        return found

    def _copy(self, descriptor: int, start: int, stop: int, where: str, progress: Progress) -> None:
        content = self.content
        for at in range(start, stop, _COPY_PIECE_BYTES):
            size = min(_COPY_PIECE_BYTES, stop - at)  # no more than is mapped: from the tail on
            first = at % self.max_bytes
            self._pwrite(descriptor, content[first : first + size], at, where)
            progress.advance(size)

    def _pwrite(self, descriptor: int, content: memoryview, at: int, where: str) -> None:
        """Writes bytes of the ring from a position on, around the end of the file."""
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

    def _copied(
        self,
        count: int,
        call: Callable[[tuple[int, ...]], int],
        what: str,
        index: Ints | None = None,
    ) -> RecordBatch:
        """Records in fresh memory, which is made larger until they fit."""
        starts, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
        positions = np.empty(count, np.uint64)
        room = int(count * self._usual_bytes * 1.25) + layout.PAGE
        places = (address(starts), address(sizes), address(positions))
        while True:
            data = np.empty(room, np.uint8)
            arena = (address(data), room, *places)

            def attempt(arena: tuple[int, ...] = arena) -> int:
                result = call(arena)
                return _NO_ROOM if result == -_core.NO_ROOM else result

            used = self._calls.run(attempt, what, WRITE_TIMEOUT_S, None, index)
            if used != _NO_ROOM:
                break
            room = max(2 * room, int(self._seat.native.needed * 1.25))
        if count:
            self._usual_bytes = 0.9 * self._usual_bytes + 0.1 * used / count
            self._usual_bytes = max(self._usual_bytes, 0.5 * used / count)
        return RecordBatch(data[:used], starts, sizes)


#: An answer that is no status and no number of bytes.
_NO_ROOM = 2**62
