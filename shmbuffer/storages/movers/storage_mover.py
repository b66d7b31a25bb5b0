"""Movers, which copy the items of a storage in and out by any index.

    StorageMover ─┬─ Rows ──────┬─ NativeRows   RingRows: leaves in the ring's own memory
                  │             └─ HeldRows     tensors that this process holds: torch moves them
                  └─ ItemStore ─┬─ ObjectStore  a Python list of this process
                                └─ RecordStore  RecordRows: records in a ring of bytes

The NumPy client also uses `RingRows` and `RecordRows`; see `items.mover`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.items.mover import Mover
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.priorities import are_priorities, largest_mass
from shmbuffer.storages.indexing import Selection, is_plain, select

ATTEMPTS = 16
"""Number of retries if rows are overwritten while they are being read."""


class StorageMover(Mover):
    """Moves the items of one ring for a storage. Indices and tickets are tensors."""

    # -- writing -------------------------------------------------------------------------------

    def put(self, slots: Ints, data: Any, *, in_place: bool) -> Ints:
        """Writes row i of ``data`` to ``slots[i]``. Returns the slots without duplicates."""
        if len(slots) > 1:
            last = last_of_each(slots)
            if len(last) < len(slots):
                slots, data = slots[last], self.select_rows(data, last)
        present = self.ring.live.holds(slots)
        if not in_place or present.all():
            self.place(slots, data, in_place=in_place)
            return slots
        for which, keeps in ((np.flatnonzero(~present), False), (np.flatnonzero(present), True)):
            if len(which):
                self.place(slots[which], self.select_rows(data, which), in_place=keeps)
        return slots

    @abstractmethod
    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Writes row i of ``data`` to ``slots[i]``. ``in_place`` keeps priorities and counts."""

    @abstractmethod
    def select_rows(self, data: Any, which: NDArray[Any]) -> Any:
        """Selects rows of ``data`` in the form that `place` accepts."""

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items."""
        self.ring.empty(keep_write_count=keep_write_count)

    # -- reading -------------------------------------------------------------------------------

    def read_chosen(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """Reads the chosen items for `build`, or returns None if one of them was replaced."""
        found, now, _ = self.read(index)
        return found if torch.equal(now, tickets.reshape(-1)) else None

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """Returns items by index, in the form in which they were written."""
        if not (dim_extend or self.lanes) and drawn_slots(self.ring, index) is not None:
            found, _, missing = self.read(index)
            if not missing:
                return self.build(found, (len(index),))
        for _ in range(ATTEMPTS):
            selection = self.select(index, dim_extend)
            if as_views and selection.view is not None:
                return self.viewed(selection)
            found, tickets, missing = self.read(torch.from_numpy(selection.elements))
            if not missing:
                return self.shaped(found, selection.lead)
            if selection.skips:  # items were overwritten or emptied since the selection
                held = (tickets >= 0).view(selection.lead[0], -1).all(1)
                return self.shaped(found, selection.lead, held)
        raise IndexError(
            f"items at {index!r} were overwritten during each of {ATTEMPTS} reads; read again"
        )

    def select(self, index: Any, dim_extend: int = 0) -> Selection:
        """Returns the elements that an index selects."""
        return select(index, self.ring, self.lanes, dim_extend)

    @abstractmethod
    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """Builds selected items, or with ``held``, only those of slots that hold an item."""

    def viewed(self, selection: Selection) -> Any:
        """Returns views of the items without copy or validation, if the mover supports views."""
        raise NotImplementedError(type(self).__name__)


def drawn_slots(ring: Ring, index: Any) -> Ints | None:
    """Returns an index that can be read unchanged, such as a sampler's, or None for others."""
    if not is_plain(index) or not index.numel():
        return None
    slots: Ints = index.numpy()
    # As unsigned numbers, negative ones exceed the capacity.
    inside = slots.view(np.uint64).max() < ring.capacity
    return slots if inside else None


def last_of_each(slots: Ints) -> Ints:
    """Returns the position of each distinct slot, the last one if a slot occurs twice."""
    _, first = np.unique(slots[::-1], return_index=True)
    return np.sort(len(slots) - 1 - first)


def require_priorities(ring: Ring, priorities: Floats) -> None:
    """Raises ValueError for an invalid priority, like the ring itself at commit."""
    fits = are_priorities(priorities, ring.tree.alpha, ring.tree.eps, ring.elements)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(
            f"priority {priorities[at]} at position {at} is not a number from 0 to "
            f"{largest_mass(ring.elements):.0e} (also after ** alpha); nothing was changed"
        )


@contextmanager
def whole_or_empty(ring: Ring, where: str) -> Iterator[None]:
    """Lifts the limits on writes while the ring is filled. Empties the ring if the block raises."""
    try:
        with ring.admission.uncounted():
            yield
    except BaseException as error:
        ring.empty()
        error.add_note(f"{where}: the load was interrupted, so the buffer is empty; load again")
        raise


def to_device(data: Any, device: torch.device | None) -> Any:
    """Moves ``data`` of any structure to ``device``, except leaves that cannot be moved."""
    return by_leaf(data, lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)


def by_leaf(data: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to each leaf of ``data``, and returns the same structure.

    A dict or tuple that has a method ``to`` is a leaf, because it moves its own parts.
    """
    if hasattr(data, "to") or not isinstance(data, (dict, tuple, list)):
        return change(data)
    if isinstance(data, dict):
        made = copy(data)  # of the same class
        for key, value in data.items():
            made[key] = by_leaf(value, change)
        return made
    parts = [by_leaf(value, change) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
