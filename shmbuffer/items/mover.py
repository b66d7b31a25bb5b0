"""Movers: they write the items of a ring and read them.

    Mover ─┬─ RingRows      leaves in the ring's own memory: the C core moves them
           └─ RecordRows    records in a ring of bytes

Order, slot words, tickets and priorities are the ring's in both. What is read is a copy, compared
with the words afterwards; what is written is committed as a whole, or not at all. Indices, tickets
and weights are arrays of the mover's kit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from typing import Any

from shmbuffer._native._core import address
from shmbuffer.items.kit import Kit
from shmbuffer.memory import Ring

DrawnElements = tuple[Any, Any, Any]
"""Element indices int64 ``[n]``; tickets int64 ``[n]``; weights float32 ``[n]`` or None."""

Drawn = tuple[Any, Any, Any, Any]
"""Items as `Mover.build` takes them, and `DrawnElements`."""


class Mover(ABC):
    """Moves the items of one ring."""

    ring: Ring  # has their order, words, tickets and priorities
    where: str  # the buffer's name in messages
    # sizes of the dimensions behind the first; ``()`` where there is one
    lanes: tuple[int, ...] = ()
    by_item = False
    """True if a batch is a list of items."""

    @abstractmethod
    def read(self, index: Any) -> tuple[Any, Any, int]:
        """Copies of elements, for `build`; tickets, -1 without an item; how many are -1."""

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draw, copy and validate. ``beta`` None draws uniformly."""

    @abstractmethod
    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """The data, from what `read` or `sample` gave, and its leading shape."""


def draw_from(kit: Kit, ring: Ring, count: int, key: int, beta: float | None) -> DrawnElements:
    """Draw elements, not copied."""
    drawn = elements_for(kit, count, beta)
    draw_into(ring, None, drawn, key, beta)
    return drawn


def elements_for(kit: Kit, count: int, beta: float | None) -> DrawnElements:
    """New arrays for `draw_into`."""
    weights = None if beta is None else kit.empty("float32", count)
    return kit.empty("int64", count), kit.empty("int64", count), weights


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
        index.shape[0],
        key,
        addresses,
        address(index),
        address(tickets),
        address(weights),
        beta=beta or 0.0,
        prioritized=beta is not None,
    )


def require_one_each(slots: Sized, count: int) -> None:
    """ValueError where there are more or fewer items than places."""
    if count != len(slots):
        raise ValueError(f"{count} items cannot be written to {len(slots)} places")
