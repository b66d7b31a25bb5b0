"""A pass: each item once, in an order that is decided when the pass begins.

Others may write meanwhile, so a pass is an order of places, not of items. When a place is next, its
slot word decides:

    COMMITTED          the item that is there now is drawn
    WRITING, ABORTED   the place is left out
    EMPTY              the storage was emptied: the pass is over; or its record was evicted, which
                       the counter of evictions tells: the place is left out

A pass begins without a look at the slots if they are known to be filled from the first one on, see
`filled_elements`. A `Permutation` is their order then. So neither a write nor the next pass costs
more in a large storage than in a small one.
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
from shmbuffer.tensors.form.kit import TENSORS

_LOOKS = 8  # at counters that change meanwhile


class Pass(NamedTuple):
    """The position of a sampler; immutable."""

    order: Ints | Permutation | None = None
    """Elements in the order of the pass, or the first items of trajectories; None: between two."""
    at: int = 0
    """How many of them were drawn."""
    whole: int = 0
    """How many the pass began with."""
    items: int = 0
    """Items of the storage then."""
    ran_out: bool = False
    tickets: Ints | None = None
    """Tickets of the elements; None: not compared."""
    evicted: int = 0
    """Items that the ring had evicted when the pass began."""

    def left(self) -> Ints | None:
        """The elements that are still to be drawn; None between two passes."""
        return None if self.order is None else self.order[self.at :]

    def count_left(self) -> int:
        """The number of elements that are still to be drawn."""
        if self.order is None:
            return 0 if self.ran_out else self.whole
        return len(self.order) - self.at

    def reaches(self, elements: int) -> bool:
        """True if the order has other elements than the first so many."""
        if isinstance(self.order, Permutation):
            return self.order.count > elements
        return self.order is not None and bool((self.order >= elements).any())


class PassDraw(NamedTuple):
    """Items of a pass."""

    elements: Ints
    tickets: Ints | None
    """None if the storage has none."""
    at: int
    """Position of the pass after them."""
    filling: bool
    """Whether a place was left out because it is being written."""


def held_next(ring: Ring | None, now: Pass, count: int) -> PassDraw | None:
    """The next ``count`` items of a pass, fewer at its end; None if the storage was emptied."""
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
    """True if fewer than ``count`` items are left of a pass."""
    assert now.order is not None
    if len(now.order) - now.at < count:
        return True
    ahead = held_next(ring, now, count)
    return ahead is not None and len(ahead.elements) < count


def wait_for(ring: Ring | None, elements: Ints | None) -> bool:
    """Wait up to 5 s while one of these places is being written. Whether all of them are done."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while ring is not None and elements is not None:
        if not (slots.states(ring.live.words[elements // ring.width]) == SlotState.WRITING).any():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(FILLING_S)
    return True


def wait_for_items(storage: Any, ring: Ring | None, otherwise: str) -> None:
    """Wait for an item, if others are overwriting all of them right now; EmptyBufferError."""
    if ring is None:
        if not len(storage):
            raise EmptyBufferError(otherwise)
    elif not ring.length:
        draw_from(TENSORS, ring, 1, 0, None)


def evictions(ring: Ring | None) -> int:
    """Items that were evicted so far, because the bytes of their records were needed."""
    if ring is None or ring.records is None:
        return 0
    return int(ring.seat.control.runtime["evicted"][0])


def filled_elements(storage: Any, ring: Ring | None) -> int | None:
    """Number of elements if all from the first one on have an item, or are being written.

    None: the slots have to be looked at, because they are in use in another way or change too fast.
    The cost does not depend on their number.
    """
    if ring is None:
        return len(storage)
    entries = ring.seat.control.entries
    for _ in range(_LOOKS):
        head, length = ring.head, ring.length
        phases = entries["phase"]
        writing = int(entries["count"][phases == Phase.PAYLOAD].sum())
        moves = ((phases != Phase.IDLE) & (phases != Phase.PAYLOAD)).any()
        # A claim moves the head and a commit adds items: if both are the same, there was neither.
        if not moves and (head, length) == (ring.head, ring.length):
            reached = min(head, ring.capacity)
            return reached * ring.width if length == (reached - writing) * ring.width else None
    return None


def places_of(storage: Any, ring: Ring | None) -> Ints:
    """Elements with an item, committed or being written, in storage order.

    The cost is that of the items if they were written since the storage was emptied, else that of
    the slots in use; see `SlotsFile.used`.
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
    """The answer of a sampler that has chosen these elements."""
    info = {} if tickets is None or not storage.shared else {GENERATION: torch.from_numpy(tickets)}
    return in_storage(storage, torch.from_numpy(elements)), info
