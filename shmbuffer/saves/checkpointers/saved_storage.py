"""The slots of a saved storage, and the structure of its items.

In TorchRL's layout, a storage has a length, and its items are in the first slots. In this package,
items can be in any slots, because a slot stays empty if its writer dies. Items also have an age, a
writer and a stream, and the cursor belongs to the storage. A save by this package in TorchRL's
layout therefore also contains a snapshot of the ring without the items (see `snapshots`). The
structure of the items is stored under the key of this package in ``storage_metadata.json``.
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
    """The slots of the items in the storage into which they are loaded."""

    slots: Ints
    """New slots of the items, int64 ``[n]``, in the order of the saved slots."""
    cursor: int
    """The slot of the next write."""
    shift: int
    """The number that was subtracted from the slots, modulo the capacity of the saved ring."""
    tickets: Tickets | None = None
    """The tickets of the items; None if they are unknown, or the capacity is different."""


@dataclass
class SavedStorage:
    """The record of a saved storage: which slots contain items, and the counters of the ring.

    Attributes:
        slots: The capacity in slots.
        lanes: The other dimensions of the storage.
        present: Mask of the slots that contain items.
        cursor: The slot of the next write; None if unknown.
        write_count: The number of elements that were written; None if unknown.
        structure: The structure of an item as JSON; None if unknown.
        moment: The snapshot in the save; None for a save by TorchRL.
    """

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
        """Creates the record from a snapshot."""
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
        """The number of elements that were written, or the number of stored elements if unknown."""
        if self.write_count is None:
            return int(self.present.sum()) * self.width
        return self.write_count

    @property
    def extent(self) -> int:
        """The number of slots up to the last slot that contains an item."""
        slots = np.nonzero(self.present)[0]
        return int(slots[-1]) + 1 if len(slots) else 0

    @property
    def is_full(self) -> bool:
        """True if the ring has wrapped around, so that there are items at or after the cursor."""
        return self.cursor is not None and bool(self.present[self.cursor :].any())

    @property
    def shift(self) -> int:
        """The slot after the newest item, from 1 to the capacity; 0 if unknown or empty."""
        return self.cursor or (self.slots if self.is_full else 0)

    def places(self, capacity: int, where: str, what: str = "slots") -> Destinations:
        """Returns the slots for the items in a storage with ``capacity`` slots.

        The slots are unchanged if possible. If the capacity differs and the ring has wrapped
        around, the items are ordered by age, and the oldest gets slot 0.

        Args:
            capacity: The capacity of the storage into which the items are loaded.
            where: The path of the save, for messages.
            what: The name of slots in messages.

        Raises:
            ValueError: The items need more slots than the storage has.
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
                f"{capacity}; load the save into a larger storage. Nothing was changed"
            )
        tickets = None
        if capacity == self.slots and self.moment is not None:
            tickets = Tickets(self.moment.tickets[self.present], self.moment.head)
        return Destinations(slots, cursor % capacity, shift, tickets)

    def write(
        self, folder: Path, ring: Ring, settings: Settings, metadata: dict[str, Any] | None
    ) -> None:
        """Writes the record and TorchRL's metadata into the directory of a save.

        Args:
            folder: The directory of the save.
            ring: The ring that was saved.
            settings: The settings of the buffer.
            metadata: TorchRL's metadata for a PyTree; None if the items are TensorDicts.
        """
        assert self.moment is not None
        write_ring(folder, ring, self.moment, settings)
        content = metadata_of(metadata, self.extent * self.width)
        content[OURS] = {"format": FORMAT, "structure": self.structure}
        write_json(folder / METADATA, content)

    @classmethod
    def read(cls, folder: Path, found: dict[str, Any]) -> SavedStorage | None:
        """Reads a record that `write` wrote.

        ``found`` is the content of TorchRL's metadata file. Returns None if TorchRL itself was the
        last to write this file.
        """
        with reading(folder / METADATA):
            ours = find_ours(found, folder / METADATA)
            if ours is None:
                return None
            structure = ours["structure"]
        with open_buffer(folder) as engine:
            ring = engine.ring()
            assert ring is not None  # otherwise `open_save` had raised an error
            return cls.of_moment(moment_of(ring), ring.schema.lanes, structure)
