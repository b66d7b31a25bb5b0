"""The slots of a saved storage, and the form of its items.

In TorchRL's layout, a storage has a length, and its items are in the first slots. In this package,
items can be in any slot, because a slot is empty if its writer died. Items have an age, a writer
and a stream, and the cursor belongs to the storage. A save by this package in TorchRL's layout
therefore also contains a snapshot of the ring without the items (see `snapshots`). The form of the
items is stored under the key of this package in ``storage_metadata.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmbuffer.memory import ItemSnapshot, Ring, Settings
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.saves.checkpointers.record_image import moment_of
from shmbuffer.saves.checkpointers.snapshots import open_buffer, write_ring
from shmbuffer.saves.tickets import Tickets
from shmbuffer.saves.values import FORMAT, OURS, find_ours, reading, write_json
from shmbuffer.torchrl.compat.storage_files import METADATA, metadata_of


class Destinations(NamedTuple):
    """The slots of loaded items in the storage that they are loaded into."""

    slots: Ints
    """New slots of the items, int64 ``[n]``, in the order of the saved slots."""
    cursor: int
    """The slot of the next item."""
    shift: int
    """Number of slots by which the items were moved down, modulo the capacity of the saved ring."""
    tickets: Tickets | None = None
    """The tickets of the items; None if they are unknown, or belong to other slots."""


@dataclass
class SavedStorage:
    """The snapshot of a storage. None represents an unknown value."""

    slots: int
    lanes: tuple[int, ...]
    present: Flags
    cursor: int | None = None
    write_count: int | None = None
    structure: dict[str, Any] | None = None
    moment: ItemSnapshot | None = None

    @classmethod
    def of_moment(
        cls,
        moment: ItemSnapshot,
        lanes: tuple[int, ...] = (),
        structure: dict[str, Any] | None = None,
    ) -> SavedStorage:
        """Creates the record of a snapshot."""
        slots = len(moment.tickets)
        return cls(
            slots,
            lanes,
            moment.tickets >= 0,
            moment.head % slots,
            moment.write_count,
            structure,
            moment,
        )

    @property
    def width(self) -> int:
        """The number of elements per slot."""
        return int(np.prod(self.lanes, dtype=np.int64))

    @property
    def written(self) -> int:
        """The number of elements that were written; if unknown, the number in the storage."""
        if self.write_count is None:
            return int(self.present.sum()) * self.width
        return self.write_count

    @property
    def extent(self) -> int:
        """The number of slots up to the last one that contains an item."""
        held = np.nonzero(self.present)[0]
        return int(held[-1]) + 1 if len(held) else 0

    @property
    def is_full(self) -> bool:
        """True if the ring has wrapped, so that there are items at or after the cursor."""
        return self.cursor is not None and bool(self.present[self.cursor :].any())

    @property
    def shift(self) -> int:
        """The slot after the last written slot. It is in the range from 1 to the capacity."""
        return self.cursor or (self.slots if self.is_full else 0)

    def places(self, capacity: int, where: str, what: str = "slots") -> Destinations:
        """Returns the slots of the items in a storage of ``capacity`` slots, unchanged if possible.

        If the capacity differs and the ring has wrapped, the items are placed by age from slot 0
        on.
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
                f"{where}: has items in {extent} {what}, but the storage has a capacity of "
                f"{capacity}; load it into a larger one. Nothing was changed"
            )
        tickets = None
        if capacity == self.slots and self.moment is not None:
            tickets = Tickets(self.moment.tickets[self.present], self.moment.head)
        return Destinations(slots, cursor % capacity, shift, tickets)

    def write(
        self, folder: Path, ring: Ring, settings: Settings, metadata: dict[str, Any] | None
    ) -> None:
        """Writes the record next to TorchRL's files, which cannot contain it."""
        assert self.moment is not None
        write_ring(folder, ring, self.moment, settings)
        content = metadata_of(metadata, self.extent * self.width)
        content[OURS] = {"format": FORMAT, "structure": self.structure}
        write_json(folder / METADATA, content)

    @classmethod
    def read(cls, folder: Path, found: dict[str, Any]) -> SavedStorage | None:
        """Reads a record of `write`; None if another program was the last to write ``found``."""
        with reading(folder / METADATA):
            ours = find_ours(found, folder / METADATA)
            if ours is None:
                return None
            structure = ours["structure"]
        with open_buffer(folder) as engine:
            ring = engine.ring()
            assert ring is not None  # otherwise `open_save` had raised an error
            return cls.of_moment(moment_of(ring), ring.schema.lanes, structure)
