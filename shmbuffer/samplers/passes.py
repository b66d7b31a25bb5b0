"""Passes over a storage. A pass draws each item once, in an order that is chosen when it starts.

Other processes can write during a pass, so the order consists of element indices instead of items.
When the next element is drawn, the state in its slot word decides:

    COMMITTED          the current item in the slot is drawn
    WRITING, ABORTED   the element is skipped
    EMPTY              if the counter of evictions has changed, the record was evicted, and the
                       element is skipped; otherwise the storage was emptied, and the pass is over

If exactly the first slots of the storage are used (see `filled_elements`), a pass starts without
reading them, and its order is a `Permutation`. In this case, the cost of a write or of a new pass
does not depend on the size of the storage.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.indices import elements_of
from shmbuffer.items.keys import GENERATION
from shmbuffer.items.mover import draw_from
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.waiting import FILLING_S
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.layout import Phase, SlotState
from shmbuffer.memory.system.deadline import WRITE_TIMEOUT_S
from shmbuffer.samplers.permutation import Permutation
from shmbuffer.samplers.sampler import in_storage
from shmbuffer.tensors.form.tensor_kit import TENSORS

_LOOKS = 8  # maximum number of attempts to read counters that keep changing


class Pass(NamedTuple):
    """The position of a sampler in a pass. Immutable."""

    order: Ints | Permutation | None = None
    """Elements, or first elements of trajectories, in the order in which they are drawn.

    None between two passes.
    """
    at: int = 0
    """Number of elements that were drawn or skipped."""
    whole: int = 0
    """Number of elements in the pass."""
    items: int = 0
    """Number of items in the storage at the start of the pass."""
    ran_out: bool = False
    """True if the last draw ended a pass."""
    tickets: Ints | None = None
    """Tickets of the elements in ``order``, or None if tickets are not compared."""
    evicted: int = 0
    """Number of items that the ring had evicted at the start of the pass."""

    def left(self) -> Ints | None:
        """Returns the elements that have not been drawn yet, or None between two passes."""
        return None if self.order is None else self.order[self.at :]

    def count_left(self) -> int:
        """Returns the number of elements that have not been drawn yet."""
        if self.order is None:
            return 0 if self.ran_out else self.whole
        return len(self.order) - self.at

    def reaches(self, elements: int) -> bool:
        """True if the order contains an element with a number of at least ``elements``."""
        if isinstance(self.order, Permutation):
            return self.order.count > elements
        return self.order is not None and bool((self.order >= elements).any())


class PassDraw(NamedTuple):
    """Items that were drawn in a pass."""

    elements: Ints
    """Elements of the items."""
    tickets: Ints | None
    """Tickets of the items, or None if the storage has no tickets."""
    at: int
    """Value of `Pass.at` after this draw."""
    filling: bool
    """True if an element was skipped because a writer is writing its slot."""


def draw_next(ring: Ring | None, now: Pass, count: int) -> PassDraw | None:
    """Draws the next items of a pass, without changing the pass.

    Args:
        ring: ring of the storage, or None for a storage without a ring.
        now: position in the pass.
        count: number of items. If fewer items remain, all of them are drawn.

    Returns:
        The items, or None if the storage was emptied.
    """
    order, at = now.order, now.at
    assert order is not None
    elements = order[at : at + count]
    at += len(elements)
    if ring is None:
        return PassDraw(elements, None, at, False)
    filling = False
    words = ring.live.words[elements // ring.width]
    while not (held := slots.committed(words)).all():
        states = slots.states(words)
        if (states == SlotState.EMPTY).any() and evictions(ring) == now.evicted:
            return None
        filling = filling or bool((states == SlotState.WRITING).any())
        more = order[at : at + count - int(held.sum())]
        at += len(more)
        elements = np.concatenate([elements[held], more])
        words = np.concatenate([words[held], ring.live.words[more // ring.width]])
    return PassDraw(elements, slots.tickets(words), at, filling)


def is_over(ring: Ring | None, now: Pass, count: int) -> bool:
    """True if fewer than ``count`` items remain to be drawn in a pass."""
    assert now.order is not None
    if len(now.order) - now.at < count:
        return True
    ahead = draw_next(ring, now, count)
    return ahead is not None and len(ahead.elements) < count


def wait_for(ring: Ring | None, elements: Ints | None) -> bool:
    """Waits up to 5 s until no writer is writing the given elements.

    Returns False if an element is still being written after this time.
    """
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while ring is not None and elements is not None:
        if not (slots.states(ring.live.words[elements // ring.width]) == SlotState.WRITING).any():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(FILLING_S)
    return True


def wait_for_items(storage: Any, ring: Ring | None, otherwise: str) -> None:
    """Waits until a storage has an item, if its slots are being written.

    Args:
        storage: the storage.
        ring: ring of the storage, or None for a storage without a ring.
        otherwise: message of the EmptyBufferError that is raised if the storage is empty.
    """
    if ring is None:
        if not len(storage):
            raise EmptyBufferError(otherwise)
    elif not ring.length:
        draw_from(TENSORS, ring, 1, 0, None)


def evictions(ring: Ring | None) -> int:
    """Returns the total number of items that were evicted to free space for records."""
    if ring is None or ring.records is None:
        return 0
    return int(ring.seat.control.runtime["evicted"][0])


def filled_elements(storage: Any, ring: Ring | None) -> int | None:
    """Returns the number of used elements, if the used elements are the first of the storage.

    A used element contains an item, or is being written. Returns None if other elements are used,
    or if the counters change too fast, so that the slots must be read. The cost does not depend on
    the number of slots.
    """
    if ring is None:
        return len(storage)
    entries = ring.seat.control.entries
    for _ in range(_LOOKS):
        head, length = ring.head, ring.length
        phases = entries["phase"]
        writing = int(entries["count"][phases == Phase.PAYLOAD].sum())
        moves = ((phases != Phase.IDLE) & (phases != Phase.PAYLOAD)).any()
        # A claim moves the head, and a commit changes the length. Equal values mean no change.
        if not moves and (head, length) == (ring.head, ring.length):
            reached = min(head, ring.capacity)
            return reached * ring.width if length == (reached - writing) * ring.width else None
    return None


def places_of(storage: Any, ring: Ring | None) -> Ints:
    """Returns the elements that contain an item or are being written, in storage order.

    The cost is linear in the number of items that were written since the storage was emptied, or in
    the number of slots in use; see `SlotsFile.used`.
    """
    if ring is None:
        return np.arange(len(storage), dtype=np.int64)
    length, lap = ring.length, ring.head % ring.capacity
    if length <= lap * ring.width:
        states = slots.states(ring.live.words[:lap])
        held = int(np.count_nonzero(states == SlotState.COMMITTED))
        if held * ring.width == length == ring.length:
            return _places_in(states, ring.width)
    return _places_in(slots.states(ring.live.words[: ring.live.used()]), ring.width)


def _places_in(states: Bytes, width: int) -> Ints:
    """Returns the elements of the slots that are COMMITTED or WRITING.

    Args:
        states: state of each slot.
        width: number of elements per slot.
    """
    found = np.nonzero((states == SlotState.COMMITTED) | (states == SlotState.WRITING))[0]
    return elements_of(found, width)


def described(storage: Any, elements: Ints, tickets: Ints | None) -> tuple[Any, dict[str, Any]]:
    """Returns the index and info that `Sampler.sample` returns for drawn elements.

    Args:
        storage: the storage.
        elements: the elements, int64 ``[n]``.
        tickets: tickets of the items, int64 ``[n]``, or None if the storage has none.
    """
    info = {} if tickets is None or not storage.shared else {GENERATION: torch.from_numpy(tickets)}
    return in_storage(storage, torch.from_numpy(elements)), info
