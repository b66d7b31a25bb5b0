"""The movers of storages: items by any index, and in any place.

    StorageMover ─┬─ Rows ──────┬─ NativeRows   RingRows: leaves in the ring's own memory
                  │             └─ HeldRows     tensors that this process holds: torch moves them
                  └─ ItemStore ─┬─ ObjectStore  a Python list of this process
                                └─ RecordStore  RecordRows: records in a ring of bytes

`RingRows` and `RecordRows` are those that the NumPy client has, too: see `items.mover`.
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
"""Retries of a read whose rows are overwritten meanwhile."""


class StorageMover(Mover):
    """Moves the items of one ring for a storage. Indices and tickets are tensors."""

    # -- writing -------------------------------------------------------------------------------

    def put(self, slots: Ints, data: Any, *, in_place: bool) -> Ints:
        """Write row i of ``data`` to ``slots[i]``. Returns the slots, each once."""
        if len(slots) > 1:
            last = last_of_each(slots)
            if len(last) < len(slots):
                slots, data = slots[last], self.some(data, last)
        present = self.ring.live.holds(slots)
        if not in_place or present.all():
            self.place(slots, data, in_place=in_place)
            return slots
        for which, keeps in ((np.flatnonzero(~present), False), (np.flatnonzero(present), True)):
            if len(which):
                self.place(slots[which], self.some(data, which), in_place=keeps)
        return slots

    @abstractmethod
    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Row i of ``data`` goes to ``slots[i]``; ``in_place`` keeps priority and write count."""

    @abstractmethod
    def some(self, data: Any, which: NDArray[Any]) -> Any:
        """Some rows of what `place` takes."""

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item."""
        self.ring.empty(keep_write_count=keep_write_count)

    # -- reading -------------------------------------------------------------------------------

    def read_chosen(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """`read`, for `build`; None where an item is another one by now."""
        found, now, _ = self.read(index)
        return found if torch.equal(now, tickets.reshape(-1)) else None

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """Items by index, in the form in which they were written."""
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
            if selection.skips:  # written over or emptied since we looked
                held = (tickets >= 0).view(selection.lead[0], -1).all(1)
                return self.shaped(found, selection.lead, held)
        raise IndexError(
            f"items at {index!r} were overwritten during each of {ATTEMPTS} reads; read again"
        )

    def select(self, index: Any, dim_extend: int = 0) -> Selection:
        """The elements that an index selects."""
        return select(index, self.ring, self.lanes, dim_extend)

    @abstractmethod
    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """`build` of what was selected; of its first dimension only what was ``held``."""

    def viewed(self, selection: Selection) -> Any:
        """The items themselves, not copied and not validated; where there is something to view."""
        raise NotImplementedError(type(self).__name__)


def drawn_slots(ring: Ring, index: Any) -> Ints | None:
    """An index that may be read as it is, what a sampler chose as a rule; None of any other."""
    if not is_plain(index) or not index.numel():
        return None
    slots: Ints = index.numpy()
    inside = slots.view(np.uint64).max() < ring.capacity  # negative ones are large
    return slots if inside else None


def last_of_each(slots: Ints) -> Ints:
    """Positions of slots, each once: of one that is named twice, the last."""
    _, first = np.unique(slots[::-1], return_index=True)
    return np.sort(len(slots) - 1 - first)


def require_priorities(ring: Ring, priorities: Floats) -> None:
    """ValueError where one of them is no priority, as the ring itself says it at commit."""
    fits = are_priorities(priorities, ring.tree.alpha, ring.tree.eps, ring.elements)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(
            f"priority {priorities[at]} at position {at} is not a number from 0 to "
            f"{largest_mass(ring.elements):.0e} "
            "(also after ** alpha); nothing was changed"
        )


@contextmanager
def whole_or_empty(ring: Ring, where: str) -> Iterator[None]:
    """Fills the ring, whatever limits writes; where that raises, empties it and says so."""
    try:
        with ring.admission.uncounted():
            yield
    except BaseException as error:
        ring.empty()
        error.add_note(f"{where}: the load was interrupted, and the buffer is empty; load again")
        raise


def to_device(data: Any, device: torch.device | None) -> Any:
    """``data`` of any form on ``device``; what cannot be moved as it is."""
    return by_leaf(data, lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)


def by_leaf(data: Any, change: Callable[[Any], Any]) -> Any:
    """``data`` of any form, made of what ``change`` makes of each leaf.

    What goes to a device by itself is a leaf, if it is a dict or a tuple: it knows what stays.
    """
    if hasattr(data, "to") or not isinstance(data, (dict, tuple, list)):
        return change(data)
    if isinstance(data, dict):
        made = copy(data)  # of its class
        for key, value in data.items():
            made[key] = by_leaf(value, change)
        return made
    parts = [by_leaf(value, change) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
