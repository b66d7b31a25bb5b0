"""Items of any form in slots of a ring: objects of one process, or records that many share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.replay.checkpointers.restoring import sources_in_state
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.form.structure import leaves_of
from shmbuffer.replay.storages.indexing import Selection
from shmbuffer.replay.storages.mover import Mover

_ALIKE = (bool, int, float, complex, str, bytes, type(None))  # one for all items

Edit = Callable[[int, Any], Any]
"""Called with a position among what was selected, and a copy of the item there; gives what it
becomes."""


class ItemStore(Mover):
    """Moves items one by one; what it moves is encoded already. ``name`` is for messages."""

    name: str

    @abstractmethod
    def write(
        self, items: Any, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Append items, at least one. The place of the first, and how many."""

    @abstractmethod
    def write_at(self, cursor: Any, items: Any, *, in_place: bool) -> Ints:
        """Write at the places that ``cursor`` names. The slots, each once; see `Mover.put`."""

    @abstractmethod
    def change(self, index: Any, edit: Edit) -> None:
        """Put something in the place of items, which keep their priorities."""

    @abstractmethod
    def copy_out(self) -> tuple[list[Any], ItemSnapshot]:
        """Every item as it is kept, in storage order, and the moment that they are of."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], ItemSnapshot]:
        """The items as a state has them, and the moment that they are of."""

    def state_dict(self) -> dict[str, Any]:
        """See `ListStorage.state_dict`."""
        items, moment = self._state()
        capacity, slots = len(moment.tickets), held_slots(moment)
        return {
            **items,
            **sources_in_state(moment.sources[slots]),
            "_index": torch.from_numpy(slots),
            "_cursor": moment.head % capacity,
            "_capacity": capacity,
        }

    def select(self, index: Any, dim_extend: int = 0) -> Selection:
        """See `Mover.select`; in one dimension, without views."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        selection = None if isinstance(index, tuple) else super().select(index)
        if selection is None or len(selection.lead) > 1:
            raise RuntimeError(f"a {self.name} has one dimension, got {index!r}")
        return selection._replace(view=None)

    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """See `Mover.shaped`."""
        return self.build(found if held is None else self.some(found, held.numpy()), lead)


def held_slots(moment: ItemSnapshot) -> Ints:
    """Slots that held an item."""
    return np.flatnonzero(moment.tickets >= 0)


def edited(item: Any, changes: Mapping[KeyPath, Any], row: int | None) -> Any:
    """The item, whose entries have been changed."""
    if not is_collection(item):
        raise TypeError(
            f"an item that is a {type(item).__name__} has no entries that can be changed where "
            "they are; put another item in its place with rb[index] = item"
        )
    for path, value in changes.items():
        item.set_(path, value if row is None else row_of(value, row))
    return item


def changes_of(patch: Any) -> dict[KeyPath, Any]:
    """The entries of a TensorDict or dict of them, nested ones by their whole path."""
    if not is_collection(patch) and not isinstance(patch, Mapping):
        raise TypeError(f"a patch is a TensorDict or a dict of entries, got {type(patch).__name__}")
    return leaves_of(patch)


def row_of(value: Any, row: int) -> Any:
    """The part of a value that belongs to one of several items."""
    if isinstance(value, _ALIKE) or (isinstance(value, torch.Tensor) and not value.dim()):
        return value
    return value[row]
