"""What we remember of a storage beside TorchRL's files: its form, and which item is in which slot.

TorchRL's layout has a length: items are in the first slots. Ours may be anywhere (a slot whose
writer died holds none), they have an age, and a cursor that belongs to the storage. The numbers are
under our key in ``storage_metadata.json``. The slots are in a file of their own, as runs, and so
are the streams, if one of them is not 0. ``docs/format/saves.md`` has the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.leaves import Leaves
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.saves.tickets import Tickets
from shmbuffer.saves.values import (
    FORMAT,
    OURS,
    find_ours,
    read_array,
    reading,
    write_array,
    write_json,
)
from shmbuffer.torchrl.compat.storages import METADATA, metadata_of

TENSORS, LIST = "tensors", "a list of objects"
"""Kinds of storages."""

_TICKETS = 2**61  # so many have room in slot words, with years to spare
_ITEMS, _STREAMS = "shmbuffer.items.npy", "shmbuffer.streams.npy"


class Destinations(NamedTuple):
    """Where the items of a storage go in another one."""

    slots: Ints
    """int64 ``[n]``, in the order of the slots that they had."""
    cursor: int
    """Slot of the next item."""
    shift: int
    """Slots by which they were moved down, around the end of the saved ring."""
    tickets: Tickets | None = None
    """Those that they had; None where they are not known, or belong to other slots."""


@dataclass
class SavedStorage:
    """A storage at one moment; what is None is not known."""

    slots: int
    lanes: tuple[int, ...]
    present: Flags
    cursor: int | None = None
    write_count: int | None = None
    structure: dict[str, Any] | None = None
    tickets: Ints | None = None
    sources: NDArray[np.uint64] | None = None
    head: int | None = None

    @classmethod
    def of_moment(cls, moment: ItemSnapshot, leaves: Leaves | None = None) -> SavedStorage:
        """What a save keeps of a moment; also of a list, which has no leaves."""
        slots = len(moment.tickets)
        return cls(
            slots,
            () if leaves is None else leaves.lanes,
            moment.tickets >= 0,
            moment.head % slots,
            moment.write_count,
            None if leaves is None else leaves.node.to_json(),
            moment.tickets,
            moment.sources,
            moment.head,
        )

    @property
    def width(self) -> int:
        """Elements of a slot."""
        return int(np.prod(self.lanes, dtype=np.int64))

    @property
    def written(self) -> int:
        """Elements written so far; where that is not known, those that are there."""
        if self.write_count is None:
            return int(self.present.sum()) * self.width
        return self.write_count

    @property
    def extent(self) -> int:
        """Slots up to the last one that holds an item."""
        held = np.nonzero(self.present)[0]
        return int(held[-1]) + 1 if len(held) else 0

    @property
    def is_full(self) -> bool:
        """Whether the ring has gone round: there are items at the cursor or beyond it."""
        return self.cursor is not None and bool(self.present[self.cursor :].any())

    @property
    def shift(self) -> int:
        """The slot after the last one that was written, counted from 1 where that is slot 0."""
        return self.cursor or (self.slots if self.is_full else 0)

    def places(self, capacity: int, where: str, what: str = "slots") -> Destinations:
        """Where the items go in a storage of ``capacity`` slots: into the slots that they had.

        Where the capacity differs and the ring had gone round: by their age, from slot 0 on.
        """
        slots, shift = np.nonzero(self.present)[0], 0
        cursor = self.extent % self.slots if self.cursor is None else self.cursor
        if capacity != self.slots and self.is_full:
            shift = cursor
            slots = (slots - shift) % self.slots
            cursor = int(slots.max()) + 1
        extent = int(slots.max()) + 1 if len(slots) else 0
        if extent > capacity:
            raise ValueError(
                f"{where}: has items in {extent} {what}, and the storage has room for {capacity}; "
                "load it into a larger one. Nothing was changed"
            )
        tickets = None
        if capacity == self.slots and self.tickets is not None and self.head is not None:
            tickets = Tickets(self.tickets[self.present], self.head)
        return Destinations(slots, cursor % capacity, shift, tickets)

    def write(
        self, folder: Path, *, metadata: dict[str, Any] | None = None, kind: str = TENSORS
    ) -> None:
        """Write TorchRL's ``storage_metadata.json`` with our key, and the file of the slots."""
        content = metadata_of(metadata, self.extent * self.width)
        streams = self._streams()
        content[OURS] = {
            "format": FORMAT,
            "kind": kind,
            "slots": self.slots,
            "lanes": list(self.lanes),
            "cursor": self.cursor,
            "head": self.head,
            "write_count": self.write_count,
            "structure": self.structure,
            "streams": streams is not None,
        }
        if self.tickets is not None and self.sources is not None:
            used = slice(self.extent)
            writers = layout.writer_of(self.sources[used]).astype(np.int64)
            write_array(folder / _ITEMS, runs_of(self.tickets[used], writers))
        if streams is not None:
            write_array(folder / _STREAMS, streams)
        write_json(folder / METADATA, content)

    @classmethod
    def read(
        cls, folder: Path, found: dict[str, Any], *, kind: str = TENSORS
    ) -> SavedStorage | None:
        """What we have remembered; None where another program wrote ``found`` last."""
        with reading(folder / METADATA):
            ours = find_ours(found, folder / METADATA)
            if ours is None:
                return None
            slots, lanes = int(ours["slots"]), tuple(int(size) for size in ours["lanes"])
            with reading(folder / _ITEMS):
                tickets, writers = slots_of(read_array(folder / _ITEMS), slots)
                if (most := int(writers.max(initial=0))) >= layout.WRITERS:
                    raise ValueError(f"writer {most} of {layout.WRITERS}")
            streams = np.zeros(slots, np.uint64)
            if ours["streams"]:
                with reading(folder / _STREAMS):
                    held = tickets >= 0
                    streams[held] = _of_items(read_array(folder / _STREAMS), int(held.sum()))
            cursor, count = int(ours["cursor"]), int(ours["write_count"])
            if not 0 <= cursor < slots or not 0 <= count < 2**62:
                raise ValueError(f"cursor {cursor}, write count {count} of {slots} slots")
            head = _head(ours["head"], cursor, tickets)
            structure = ours["structure"]
            if ours["kind"] != kind:
                raise SchemaMismatchError(
                    f"{folder}: a storage of {ours['kind']} was saved there, and this one holds "
                    f"{kind}; load it into a storage of its own kind"
                )
        saved = cls(slots, lanes, tickets >= 0, cursor, count, structure, tickets, None, head)
        saved.sources = layout.source_of(writers.astype(np.uint64), streams)
        return saved

    def _streams(self) -> NDArray[Any] | None:
        """Of each item, as narrow as they can be; None: all are in stream 0."""
        if self.tickets is None or self.sources is None:
            return None
        streams = layout.stream_of(self.sources[self.present])
        most = int(streams.max()) if len(streams) else 0
        return streams.astype(np.min_scalar_type(most)) if most else None


def write_beside(folder: Path, ring: Ring, *, metadata: dict[str, Any] | None = None) -> None:
    """Write ``storage_metadata.json`` for the files of a ring that is in use."""
    held = ring.live.committed()
    write_json(folder / METADATA, metadata_of(metadata, int(held[-1]) + 1 if len(held) else 0))


def _of_items(streams: NDArray[Any], items: int) -> NDArray[np.uint64]:
    """The streams of a file; ValueError where they are none."""
    if streams.dtype.kind != "u" or streams.shape != (items,):
        raise ValueError(f"{items} streams are {streams.dtype}{list(streams.shape)}")
    if len(streams) and int(streams.max()) >= layout.STREAMS:
        raise ValueError(f"stream {streams.max()} of {layout.STREAMS}")
    return streams.astype(np.uint64)


def _head(head: Any, cursor: int, tickets: Ints) -> int:
    """The next ticket of a save; ValueError if it is impossible."""
    held = np.flatnonzero(tickets >= 0)
    least = int(tickets.max()) + 1 if len(held) else 0
    if not least <= int(head) < _TICKETS or int(head) % len(tickets) != cursor:
        raise ValueError(f"the next ticket is {head}, of slot {cursor} and above {least - 1}")
    if (tickets[held] % len(tickets) != held).any():
        raise ValueError("a ticket belongs to another slot")
    return int(head)


def runs_of(tickets: Ints, writers: Ints) -> Ints:
    """Slots with consecutive tickets of one writer, as one row each; see the module."""
    slots = np.nonzero(tickets >= 0)[0]
    if not len(slots):
        return np.empty((0, 4), np.int64)
    mine, whose = tickets[slots], writers[slots]
    broken = (np.diff(slots) != 1) | (np.diff(mine) != 1) | (np.diff(whose) != 0)
    first = np.nonzero(np.r_[True, broken])[0]
    counts = np.diff(np.r_[first, len(slots)])
    return np.column_stack([slots[first], counts, mine[first], whose[first]]).astype(np.int64)


def slots_of(runs: Ints, slots: int) -> tuple[Ints, Ints]:
    """Tickets and writers of what `runs_of` made, int64 ``[slots]``; -1 where there is no item."""
    if runs.ndim != 2 or runs.shape[1] != 4 or runs.dtype != np.int64:
        raise ValueError(f"the slots are {runs.dtype}{list(runs.shape)}, not int64[runs, 4]")
    tickets, writers = np.full(slots, -1, np.int64), np.zeros(slots, np.int64)
    first, counts, ticket, writer = runs.T
    wrong = (runs < 0).any(1) | (counts < 1) | (counts > slots) | (first > slots - counts)
    for at in np.flatnonzero(wrong)[:1]:
        raise ValueError(f"slots {first[at]} to {first[at] + counts[at]} of {slots}")
    if (total := int(counts.sum())) > slots:
        raise ValueError(f"{total} items in {slots} slots")
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    where = np.repeat(first, counts) + within
    tickets[where] = np.repeat(ticket, counts) + within
    writers[where] = np.repeat(writer, counts)
    return tickets, writers
