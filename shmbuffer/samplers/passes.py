"""Passes, which draw each item once, in an order that is chosen when the pass starts.

Other processes may write during a pass, so a pass is an order of element indices instead of items.
When an element is next, the state in its slot word decides:

    COMMITTED          the current item of the slot is drawn
    WRITING, ABORTED   the element is skipped
    EMPTY              if the counter of evictions has changed, the record was evicted, and the
                       element is skipped; otherwise the storage was emptied, and the pass is over

If all slots up to a known number are filled (see `filled_elements`), a pass starts without reading
them, and its order is a `Permutation`. In this case, the cost of a write or a new pass does not
depend on the size of the storage.
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
    """Position of a sampler in its pass. Immutable."""

    order: Ints | Permutation | None = None
    """Elements or first items of trajectories in the order of the pass, or None between passes."""
    at: int = 0
    """Number of drawn elements."""
    whole: int = 0
    """Number of elements at the start of the pass."""
    items: int = 0
    """Number of items in the storage at the start of the pass."""
    ran_out: bool = False
    tickets: Ints | None = None
    """Tickets of the elements, or None if tickets are not compared."""
    evicted: int = 0
    """Number of items that the ring had evicted at the start of the pass."""

    def left(self) -> Ints | None:
        """Returns the elements that remain to be drawn, or None between two passes."""
        return None if self.order is None else self.order[self.at :]

    def count_left(self) -> int:
        """Returns the number of elements that remain to be drawn."""
        if self.order is None:
            return 0 if self.ran_out else self.whole
        return len(self.order) - self.at

    def reaches(self, elements: int) -> bool:
        """True if the order contains an element that is not among the first ``elements``."""
        if isinstance(self.order, Permutation):
            return self.order.count > elements
        return self.order is not None and bool((self.order >= elements).any())


class PassDraw(NamedTuple):
    """Items of a pass."""

    elements: Ints
    tickets: Ints | None
    """Tickets of the items, or None if the storage has no tickets."""
    at: int
    """Position of the pass after these items."""
    filling: bool
    """True if an element was skipped because it is being written."""


def held_next(ring: Ring | None, now: Pass, count: int) -> PassDraw | None:
    """Returns the next ``count`` items of a pass, or None if the storage was emptied."""
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
    """True if fewer than ``count`` items remain in a pass."""
    assert now.order is not None
    if len(now.order) - now.at < count:
        return True
    ahead = held_next(ring, now, count)
    return ahead is not None and len(ahead.elements) < count


def wait_for(ring: Ring | None, elements: Ints | None) -> bool:
    """Waits up to 5 s for writes to these elements. Returns True if all writes are complete."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while ring is not None and elements is not None:
        if not (slots.states(ring.live.words[elements // ring.width]) == SlotState.WRITING).any():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(FILLING_S)
    return True


def wait_for_items(storage: Any, ring: Ring | None, otherwise: str) -> None:
    """Waits while all items are being overwritten. Raises EmptyBufferError if there are none."""
    if ring is None:
        if not len(storage):
            raise EmptyBufferError(otherwise)
    elif not ring.length:
        draw_from(TENSORS, ring, 1, 0, None)


def evictions(ring: Ring | None) -> int:
    """Returns the number of items evicted so far to free bytes for records."""
    if ring is None or ring.records is None:
        return 0
    return int(ring.seat.control.runtime["evicted"][0])


def filled_elements(storage: Any, ring: Ring | None) -> int | None:
    """Returns the number of elements if the used elements are exactly the first ones.

    Each of these elements holds an item or will hold one. Returns None if the slots must be read,
    because they are used in another way or change too fast. The cost does not depend on the number
    of slots.
    """
    if ring is None:
        return len(storage)
    entries = ring.seat.control.entries
    for _ in range(_LOOKS):
        head, length = ring.head, ring.length
        phases = entries["phase"]
        writing = int(entries["count"][phases == Phase.PAYLOAD].sum())
        moves = ((phases != Phase.IDLE) & (phases != Phase.PAYLOAD)).any()
        # A claim moves the head, and a commit adds items. If both are unchanged, neither occurred.
        if not moves and (head, length) == (ring.head, ring.length):
            reached = min(head, ring.capacity)
            return reached * ring.width if length == (reached - writing) * ring.width else None
    return None


def places_of(storage: Any, ring: Ring | None) -> Ints:
    """Returns the elements with a committed or unfinished item, in storage order.

    The cost is linear in the number of items written since the storage was emptied, or in the
    number of slots in use; see `SlotsFile.used`.
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
    found = np.nonzero((states == SlotState.COMMITTED) | (states == SlotState.WRITING))[0]
    return elements_of(found, width)


def described(storage: Any, elements: Ints, tickets: Ints | None) -> tuple[Any, dict[str, Any]]:
    """Returns the result of `Sampler.sample` for these elements."""
    info = {} if tickets is None or not storage.shared else {GENERATION: torch.from_numpy(tickets)}
    return in_storage(storage, torch.from_numpy(elements)), info
