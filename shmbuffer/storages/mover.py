"""What moves items into a ring and out of it.

    Mover ─┬─ Rows ──────┬─ NativeRows    leaves in the ring's own memory: the C core moves them
           │             └─ HeldRows      tensors that this process holds: torch moves them
           └─ ItemStore ─┬─ ObjectStore   a Python list of this process
                         └─ RecordStore   records in a ring of bytes

Order, slot words, tickets and priorities are the ring's in all of them. What is read is a copy,
compared with the words afterwards; what is written is committed as a whole, or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.priorities import are_priorities, largest_mass
from shmbuffer.storages.indexing import Selection, is_plain, select
from shmbuffer.tensors.form import cpu

ATTEMPTS = 16
"""At reading what other processes keep writing over."""

DrawnElements = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Element indices int64 ``[n]``; tickets int64 ``[n]``; weights float32 ``[n]`` or None."""

RowSample = tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What was drawn, and `DrawnElements`."""


class Mover(ABC):
    """Moves the items of one ring."""

    ring: Ring  # where their order, words, tickets and priorities are
    # sizes of the dimensions behind the first; ``()`` where there is one
    lanes: tuple[int, ...] = ()
    where: str  # the buffer's name in messages

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

    @abstractmethod
    def read(self, index: torch.Tensor) -> tuple[Any, torch.Tensor, int]:
        """Copies of elements, for `build`; tickets, -1 without an item; how many are -1."""

    def read_chosen(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """`read`, for `build`; None where an item is another one by now."""
        found, now, _ = self.read(index)
        return found if torch.equal(now, tickets.reshape(-1)) else None

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> RowSample:
        """Draw, copy and validate, for `build`. ``beta`` None draws uniformly."""

    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """The data, from what `read` or `sample` gave, and its leading shape."""
        raise NotImplementedError(type(self).__name__)

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
        """What an index means."""
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


def require_one_each(slots: Sized, count: int) -> None:
    """ValueError where there are more or fewer items than places."""
    if count != len(slots):
        raise ValueError(f"{count} items cannot be written to {len(slots)} places")


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


def draw_from(ring: Ring, count: int, key: int, beta: float | None) -> DrawnElements:
    """Draw elements, not copied."""
    index = cpu.empty(count, dtype=torch.int64)
    weights = None if beta is None else cpu.empty(count, dtype=torch.float32)
    drawn = index, torch.empty_like(index), weights
    draw_into(ring, None, drawn, key, beta)
    return drawn


def draw_into(
    ring: Ring,
    addresses: Sequence[int] | None,  # of the leaves' rows; None: elements are drawn, not copied
    drawn: DrawnElements,
    key: int,
    beta: float | None,
) -> None:
    """`Ring.sample` into memory that is there."""
    index, tickets, weights = drawn
    ring.sample(
        index.numel(),
        key,
        addresses,
        index.data_ptr(),
        tickets.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        beta=beta or 0.0,
        prioritized=beta is not None,
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
