"""Base class for movers for items of any structure, which are local objects or shared records."""

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
from shmbuffer.storages.movers.storage_mover import StorageMover
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensor_structure import leaves_of

_ALIKE = (bool, int, float, complex, str, bytes, type(None))  # a value that all items get

Changes = Mapping[KeyPath, Any]
"""New values of entries by path: a value for all items, or one value per item ``[n, ...]``."""
Edit = Callable[[int, Any], Any]
"""A function that changes an item. It takes the item's position in the selection and a copy of the
item, and returns the new item."""


class ItemStore(StorageMover):
    """Writes and reads encoded items. ``name`` is the name of the storage in messages."""

    name: str

    @abstractmethod
    def write(
        self, items: Any, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Appends one or more items. Returns the first position and the number of items."""

    @abstractmethod
    def write_at(self, cursor: Any, items: Any, *, in_place: bool) -> Ints:
        """Writes items to the slots that ``cursor`` selects. Returns the distinct slots."""

    @abstractmethod
    def change(self, index: Any, changes: Changes) -> None:
        """Changes entries of the items at ``index``. The items keep their priorities."""

    @abstractmethod
    def copy_out(self) -> tuple[list[Any], ItemSnapshot]:
        """Returns all items in their stored form and storage order, with a snapshot of the ring."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], ItemSnapshot]:
        """Returns the items as entries of a `state_dict`, with a snapshot of the ring."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the items or records, their slots, the cursor and the capacity."""
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
        """Returns the elements that a one-dimensional index selects, without a view.

        Raises RuntimeError if the index has several dimensions.
        """
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        selection = None if isinstance(index, tuple) else super().select(index)
        if selection is None or len(selection.lead) > 1:
            raise RuntimeError(
                f"a {self.name} has one dimension, so its index must be one-dimensional, got "
                f"{index!r}"
            )
        return selection._replace(view=None)

    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """Builds the selected items. If there is a mask ``held``, builds only the items in it."""
        return self.build(found if held is None else self.select_rows(found, held.numpy()), lead)


def held_slots(moment: ItemSnapshot) -> Ints:
    """Returns the slots that contained an item when the snapshot was taken."""
    return np.flatnonzero(moment.tickets >= 0)


def edits(changes: Changes, index: Any, count: int) -> Edit:
    """Returns a function that applies changes to the ``count`` items that ``index`` selects.

    Raises ValueError if the number of values differs from the number of items.
    """
    single = is_one(index)
    for path, value in () if single else changes.items():
        if not _is_alike(value) and len(value) != count:
            raise ValueError(
                f"entry {'.'.join(path)!r} has {len(value)} values for {count} items; pass one "
                "value per item, or a single number; nothing was changed"
            )

    def edit(row: int, item: Any) -> Any:
        if not is_collection(item):
            raise TypeError(
                f"an item that is a {type(item).__name__} has no entries that can be changed in "
                "place; replace the item with rb[index] = item"
            )
        for path, value in changes.items():
            with cpu.as_default():  # `set_` converts a number to a tensor
                item.set_(path, value if single or _is_alike(value) else value[row])
        return item

    return edit


def changes_of(patch: Any) -> dict[KeyPath, Any]:
    """Returns the entries of a TensorDict, or of a dict of entries, by path."""
    if not is_collection(patch) and not isinstance(patch, Mapping):
        raise TypeError(
            f"a patch must be a TensorDict or a dict of entries, got {type(patch).__name__}"
        )
    return leaves_of(patch)


def _is_alike(value: Any) -> bool:
    """True if a value applies to all items, because it is a number or another scalar."""
    return isinstance(value, _ALIKE) or getattr(value, "ndim", None) == 0
