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
from shmbuffer.saves.checkpointers.restoring import sources_in_state
from shmbuffer.storages.indexing import Selection, is_one
from shmbuffer.storages.mover import StorageMover
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.form.structure import leaves_of

_ALIKE = (bool, int, float, complex, str, bytes, type(None))  # one for all items, as of no dims

Changes = Mapping[KeyPath, Any]
"""The new entries: of one item, or each ``[n, ...]``."""
Edit = Callable[[int, Any], Any]
"""Called with a position among what was selected, and a copy of the item there; gives what it
becomes."""


class ItemStore(StorageMover):
    """Moves items one by one; what it moves is encoded already. ``name`` is for messages."""

    name: str

    @abstractmethod
    def write(
        self, items: Any, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Append items, at least one. The place of the first, and how many."""

    @abstractmethod
    def write_at(self, cursor: Any, items: Any, *, in_place: bool) -> Ints:
        """Write at the places that ``cursor`` names, as `put` does. The slots, each once."""

    @abstractmethod
    def change(self, index: Any, changes: Changes) -> None:
        """Change entries of items, which keep their priorities."""

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
        """See `StorageMover.select`; in one dimension, without views."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        selection = None if isinstance(index, tuple) else super().select(index)
        if selection is None or len(selection.lead) > 1:
            raise RuntimeError(f"a {self.name} has one dimension, got {index!r}")
        return selection._replace(view=None)

    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """See `StorageMover.shaped`."""
        return self.build(found if held is None else self.some(found, held.numpy()), lead)


def held_slots(moment: ItemSnapshot) -> Ints:
    """Slots that held an item."""
    return np.flatnonzero(moment.tickets >= 0)


def edits(changes: Changes, index: Any, count: int) -> Edit:
    """A function that applies the changes to the ``count`` items of ``index``."""
    single = is_one(index)
    for path, value in () if single else changes.items():
        if not _is_alike(value) and len(value) != count:
            raise ValueError(
                f"entry {'.'.join(path)!r} has {len(value)} values for {count} items; give each "
                "its own, or one number; nothing was changed"
            )

    def edit(row: int, item: Any) -> Any:
        if not is_collection(item):
            raise TypeError(
                f"an item that is a {type(item).__name__} has no entries that can be changed where "
                "they are; put another item in its place with rb[index] = item"
            )
        for path, value in changes.items():
            with cpu.within():  # a number becomes a tensor
                item.set_(path, value if single or _is_alike(value) else value[row])
        return item

    return edit


def changes_of(patch: Any) -> dict[KeyPath, Any]:
    """The entries of a TensorDict or dict of them, nested ones by their whole path."""
    if not is_collection(patch) and not isinstance(patch, Mapping):
        raise TypeError(f"a patch is a TensorDict or a dict of entries, got {type(patch).__name__}")
    return leaves_of(patch)


def _is_alike(value: Any) -> bool:
    """True if a value is the same for all items."""
    return isinstance(value, _ALIKE) or getattr(value, "ndim", None) == 0
