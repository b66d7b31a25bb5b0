"""What we remember of a storage beside TorchRL's files: its form, and which item is in which slot.

TorchRL's layout has a length: items are in the first slots. Ours may be anywhere (a slot whose
writer died holds none), they have an age, and a cursor that belongs to the storage. The numbers are
under our key in ``storage_metadata.json``; the slots are in a file of their own, as runs:

    shmbuffer.items.npy   int64 [runs, 4]: first slot, how many, ticket of the first, source

A source is who wrote an item: a slice of a trajectory never goes from one to another. Only
whether two are the same means something; 0 is not known, and the same as no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmbuffer.errors import IncompatibleVersionError, SchemaMismatchError
from shmbuffer.replay.compat.storages import METADATA, metadata_of
from shmbuffer.replay.values import OURS, read_array, reading, write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import ItemSnapshot, Ring
    from shmbuffer.replay.form.leaves import Leaves

TENSORS, LIST = "tensors", "a list of objects"
"""Kinds of storages."""

_ITEMS = "shmbuffer.items.npy"


class Places(NamedTuple):
    """Where the items of a storage go in another one."""

    slots: NDArray[np.int64]
    """int64 ``[n]``, in the order of the slots that they had."""
    cursor: int
    """Slot of the next item."""
    shift: int
    """Slots by which they were moved down, around the end of the saved ring."""


@dataclass
class Record:
    """A storage at one moment.

    Attributes:
        slots: capacity.
        lanes: sizes of the dimensions after the first.
        present: bool ``[slots]``: where an item is.
        cursor: slot of the next item; None where that is not known.
        write_count: elements written so far; None where that is not known.
        structure: the form of the data, as the schema has it; None where that is not known.
        tickets: int64 ``[slots]``, -1 where there is no item; None where that is not known.
        sources: int64 ``[slots]``; None where that is not known.
    """

    slots: int
    lanes: tuple[int, ...]
    present: NDArray[np.bool_]
    cursor: int | None = None
    write_count: int | None = None
    structure: dict[str, Any] | None = None
    tickets: NDArray[np.int64] | None = None
    sources: NDArray[np.int64] | None = None

    @classmethod
    def of_moment(cls, moment: ItemSnapshot, leaves: Leaves | None = None) -> Record:
        """What there is to remember of a moment; of a list, which has no leaves, too."""
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

    def places(self, capacity: int, where: str, what: str = "slots") -> Places:
        """Where the items go in a storage of ``capacity`` slots.

        They keep their slots. Where the capacity is another one and the ring had gone round, they
        are put in the order of their age, from slot 0 on.
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
        return Places(slots, cursor % capacity, shift)

    def write(
        self,
        folder: Path,
        *,
        metadata: dict[str, Any] | None = None,
        kind: str = TENSORS,
    ) -> None:
        """Write TorchRL's ``storage_metadata.json`` with our key, and the file of the slots."""
        content = metadata_of(metadata, self.extent * self.width)
        content[OURS] = {
            "format": 1,
            "kind": kind,
            "slots": self.slots,
            "lanes": list(self.lanes),
            "cursor": self.cursor,
            "write_count": self.write_count,
            "structure": self.structure,
        }
        if self.tickets is not None and self.sources is not None:
            runs = runs_of(self.tickets, self.sources)
            np.save(folder / _ITEMS, runs, allow_pickle=False)
        write_json(folder / METADATA, content)

    @classmethod
    def read(cls, folder: Path, found: dict[str, Any], *, kind: str = TENSORS) -> Record | None:
        """What we have remembered; None where another program wrote ``found`` last."""
        ours = found.get(OURS)
        if ours is None:
            return None
        with reading(folder / METADATA):
            if ours["format"] != 1:
                raise IncompatibleVersionError(
                    f"{folder}: was saved in format {ours['format']!r} by another version of "
                    "shmbuffer, and this one knows format 1; load it with that one"
                )
            slots, lanes = int(ours["slots"]), tuple(int(size) for size in ours["lanes"])
            with reading(folder / _ITEMS):
                tickets, sources = slots_of(read_array(folder / _ITEMS), slots)
            cursor, count = int(ours["cursor"]), int(ours["write_count"])
            if not 0 <= cursor < slots or not 0 <= count < 2**62:
                raise ValueError(f"cursor {cursor}, write count {count} of {slots} slots")
            structure = ours["structure"]
            if ours["kind"] != kind:
                raise SchemaMismatchError(
                    f"{folder}: a storage of {ours['kind']} was saved there, and this one holds "
                    f"{kind}; load it into a storage of its own kind"
                )
        return cls(slots, lanes, tickets >= 0, cursor, count, structure, tickets, sources)


def write_beside(folder: Path, ring: Ring, *, metadata: dict[str, Any] | None = None) -> None:
    """Write TorchRL's ``storage_metadata.json`` for the files of a ring that goes on living.

    It remembers all else itself.
    """
    held = ring.live.committed()
    write_json(folder / METADATA, metadata_of(metadata, int(held[-1]) + 1 if len(held) else 0))


def runs_of(tickets: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slots with consecutive tickets of one source, as one row each; see the module."""
    slots = np.nonzero(tickets >= 0)[0]
    if not len(slots):
        return np.empty((0, 4), np.int64)
    mine, whose = tickets[slots], sources[slots]
    broken = (np.diff(slots) != 1) | (np.diff(mine) != 1) | (np.diff(whose) != 0)
    first = np.nonzero(np.r_[True, broken])[0]
    counts = np.diff(np.r_[first, len(slots)])
    return np.column_stack([slots[first], counts, mine[first], whose[first]]).astype(np.int64)


def slots_of(runs: NDArray[np.int64], slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tickets and sources of what `runs_of` made, int64 ``[slots]``; -1 where there is no item."""
    if runs.ndim != 2 or runs.shape[1] != 4 or runs.dtype != np.int64:
        raise ValueError(f"the slots are {runs.dtype}{list(runs.shape)}, not int64[runs, 4]")
    tickets, sources = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
    for first, count, ticket, source in runs.tolist():
        if min(first, count - 1, ticket, source) < 0 or first + count > slots:
            raise ValueError(f"slots {first} to {first + count} of {slots}")
        tickets[first : first + count] = np.arange(ticket, ticket + count)
        sources[first : first + count] = source
    return tickets, sources
