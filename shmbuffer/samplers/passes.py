"""A pass: each item once, in an order that is decided when the pass begins.

Others may write meanwhile, so a pass is a list of places, not of items. When the turn of a place
comes, its slot word decides:

    COMMITTED          the item that is there now is drawn
    WRITING, ABORTED   the place is left out
    EMPTY              the storage was emptied: the pass is over
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
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.system.deadline import WRITE_TIMEOUT_S
from shmbuffer.samplers.sampler import NOTHING_THERE, in_storage
from shmbuffer.tensors.form.kit import TENSORS


class Pass(NamedTuple):
    """The position of a sampler; immutable."""

    order: Ints | None = None
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

    def left(self) -> Ints | None:
        """The elements that are still to be drawn; None between two passes."""
        return None if self.order is None else self.order[self.at :]


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
        if (states == SlotState.EMPTY).any():
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


def wait_for(ring: Ring | None, elements: Ints) -> bool:
    """Wait up to 5 s while one of these places is being written. Whether all of them are done."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while ring is not None:
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


def places_of(storage: Any, ring: Ring | None) -> Ints:
    """Elements with an item, committed or being written, in storage order.

    The cost is that of the slots in use; see `SlotsFile.used`.
    """
    wait_for_items(storage, ring, NOTHING_THERE)
    if ring is None:
        return np.arange(len(storage), dtype=np.int64)
    states = slots.states(ring.live.words[: ring.live.used()])
    found = np.nonzero((states == SlotState.COMMITTED) | (states == SlotState.WRITING))[0]
    return elements_of(found, ring.width)


def described(storage: Any, elements: Ints, tickets: Ints | None) -> tuple[Any, dict[str, Any]]:
    """The answer of a sampler that has chosen these elements."""
    info = {} if tickets is None or not storage.shared else {GENERATION: torch.from_numpy(tickets)}
    return in_storage(storage, torch.from_numpy(elements)), info
