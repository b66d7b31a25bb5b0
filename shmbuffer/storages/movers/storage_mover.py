"""Base class for movers, which write and read the items of a storage by any index.

    StorageMover ─┬─ Rows ──────┬─ NativeRows   RingRows: leaves in the ring's own memory
                  │             └─ HeldRows     tensors of this process, which torch copies
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
"""Number of attempts if items are overwritten while they are being read or changed."""


class StorageMover(Mover):
    """Writes and reads the items of one ring for a storage. Indices and tickets are tensors."""

    # -- writing -------------------------------------------------------------------------------

    def put(self, slots: Ints, data: Any, *, in_place: bool) -> Ints:
        """Writes row i of ``data`` to ``slots[i]``. Returns the distinct slots.

        If a slot occurs several times, the last row is written. With ``in_place``, existing items
        keep their priorities.
        """
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
        """Writes row i of ``data`` to ``slots[i]``. No slot occurs twice.

        With ``in_place`` the items keep their priorities, and the write is not counted.
        """

    @abstractmethod
    def select_rows(self, data: Any, which: NDArray[Any]) -> Any:
        """Returns the rows of ``data`` that ``which`` selects, in the form that `place` accepts."""

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items."""
        self.ring.empty(keep_write_count=keep_write_count)

    # -- reading -------------------------------------------------------------------------------

    def read_chosen(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """Copies the chosen items for `build`. Returns None if one of them was replaced."""
        found, now, _ = self.read(index)
        return found if torch.equal(now, tickets.reshape(-1)) else None

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """Reads items by index, and returns them in the form in which they were written.

        With ``as_views``, returns views if the index allows it, otherwise validated copies.
        """
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
        """Builds the selected items. If there is a mask ``held``, builds only the items in it."""

    def viewed(self, selection: Selection) -> Any:
        """Returns unvalidated views of the selected items, if the mover supports views."""
        raise NotImplementedError(type(self).__name__)


def drawn_slots(ring: Ring, index: Any) -> Ints | None:
    """Returns the slots of an index that needs no conversion, such as the index of a sample.

    Returns None for any other index.
    """
    if not is_plain(index) or not index.numel():
        return None
    slots: Ints = index.numpy()
    # Negative numbers are greater than the capacity when they are read as unsigned numbers.
    inside = slots.view(np.uint64).max() < ring.capacity
    return slots if inside else None


def last_of_each(slots: Ints) -> Ints:
    """Returns the last position of each distinct slot, in ascending order."""
    _, first = np.unique(slots[::-1], return_index=True)
    return np.sort(len(slots) - 1 - first)


def require_priorities(ring: Ring, priorities: Floats) -> None:
    """Raises ValueError for a priority that the ring would reject at commit."""
    fits = are_priorities(priorities, ring.tree.alpha, ring.tree.eps, ring.elements)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(
            f"priority {priorities[at]} at position {at} is not a number from 0 to "
            f"{largest_mass(ring.elements):.0e} (also after ** alpha); nothing was changed"
        )


@contextmanager
def whole_or_empty(ring: Ring, where: str) -> Iterator[None]:
    """Lifts the rate limit for writes while a load fills the ring.

    If the block raises an error, the ring is emptied.
    """
    try:
        with ring.admission.uncounted():
            yield
    except BaseException as error:
        ring.empty()
        error.add_note(f"{where}: the load was interrupted, so the buffer is empty; load again")
        raise


def to_device(data: Any, device: torch.device | None) -> Any:
    """Moves all leaves with a method ``to`` in data of any structure to ``device``."""
    return by_leaf(data, lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)


def by_leaf(data: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to each leaf in nested dicts, lists and tuples.

    Returns the results in the same structure. A container with a method ``to``, such as a
    TensorDict, counts as a leaf, because it can move its own parts.
    """
    if hasattr(data, "to") or not isinstance(data, (dict, tuple, list)):
        return change(data)
    if isinstance(data, dict):
        made = copy(data)  # keeps the class
        for key, value in data.items():
            made[key] = by_leaf(value, change)
        return made
    parts = [by_leaf(value, change) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
