"""Writes and reads the items of a ring.

    Mover ─┬─ RingRows      leaves in the ring's own memory, copied by the C core
           └─ RecordRows    records in a ring of bytes

Both use the order, slot words, tickets and priorities of the ring. A read copies items and
validates the copy with the slot words. A write is committed completely or not at all. Indices,
tickets and weights are arrays of the mover's kit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from typing import Any

from shmbuffer._native._core import address
from shmbuffer.items.form.kit import Kit
from shmbuffer.memory import Ring

DrawnElements = tuple[Any, Any, Any]
"""Element indices int64 ``[n]``; tickets int64 ``[n]``; weights float32 ``[n]`` or None."""

Drawn = tuple[Any, Any, Any, Any]
"""Items as `Mover.build` takes them, and `DrawnElements`."""


class Mover(ABC):
    """Writes and reads the items of one ring."""

    ring: Ring  # with order, slot words, tickets and priorities
    where: str  # name of the buffer in messages
    # Sizes of the dimensions after the first; ``()`` if there is one dimension.
    lanes: tuple[int, ...] = ()
    by_item = False
    """True if a batch is a list of items."""

    @abstractmethod
    def read(self, index: Any) -> tuple[Any, Any, int]:
        """Returns copies of elements for `build`, tickets (-1: no item), and the number of -1."""

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws, copies and validates elements; uniformly if ``beta`` is None."""

    @abstractmethod
    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """Builds data from a result of `read` or `sample` with the dimensions ``lead``."""


def draw_from(kit: Kit, ring: Ring, count: int, key: int, beta: float | None) -> DrawnElements:
    """Draws elements without copying their leaves."""
    drawn = elements_for(kit, count, beta)
    draw_into(ring, None, drawn, key, beta)
    return drawn


def elements_for(kit: Kit, count: int, beta: float | None) -> DrawnElements:
    """Returns new arrays for `draw_into`."""
    weights = None if beta is None else kit.empty("float32", count)
    return kit.empty("int64", count), kit.empty("int64", count), weights


def draw_into(
    ring: Ring,
    addresses: Sequence[int] | None,  # addresses of the leaves' rows; None copies no leaves
    drawn: DrawnElements,
    key: int,
    beta: float | None,
) -> None:
    """Draws elements like `Ring.sample` into existing memory."""
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
    """Raises ValueError if the numbers of items and places differ."""
    if count != len(slots):
        raise ValueError(f"{count} items cannot be written to {len(slots)} slots")
