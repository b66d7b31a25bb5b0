"""Writes and reads the items of a ring.

    Mover ─┬─ RingRows      leaves in the ring's own memory, copied by the C core
           └─ RecordRows    records in a ring of bytes

Both classes use the order, slot words, tickets and priorities of the ring. A read copies items, and
uses the slot words to check that no item was overwritten meanwhile. A write is committed completely
or has no effect. Indices, tickets and weights are arrays of the mover's kit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from typing import Any

from shmbuffer._native._core import address
from shmbuffer.items.form.kit import Kit
from shmbuffer.memory import Ring

DrawnElements = tuple[Any, Any, Any]
"""Indices int64 ``[n]``, tickets int64 ``[n]`` and weights float32 ``[n]`` of n drawn elements.

The weights are None if the draw was uniform.
"""

Drawn = tuple[Any, Any, Any, Any]
"""Copied items, which can be passed to `Mover.build`, and the three parts of `DrawnElements`."""


class Mover(ABC):
    """Writes and reads the items of one ring."""

    ring: Ring
    where: str  # name of the buffer in messages
    # Sizes of the storage's dimensions after the first; ``()`` if it has one dimension.
    lanes: tuple[int, ...] = ()
    by_item = False
    """True if `build` returns a list of items instead of a batch."""

    @abstractmethod
    def read(self, index: Any) -> tuple[Any, Any, int]:
        """Copies elements.

        Returns the copies, which can be passed to `build`, the tickets (-1 if there is no item),
        and the number of missing items.
        """

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws, copies and validates elements. Draws uniformly if ``beta`` is None."""

    @abstractmethod
    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """Builds data from the copies that `read` or `sample` returned.

        ``lead`` has the sizes of the leading dimensions of the result.
        """


def draw_from(kit: Kit, ring: Ring, count: int, key: int, beta: float | None) -> DrawnElements:
    """Draws elements, and returns their indices, tickets and weights, but not their leaves."""
    drawn = allocate_elements(kit, count, beta)
    draw_into(ring, None, drawn, key, beta)
    return drawn


def allocate_elements(kit: Kit, count: int, beta: float | None) -> DrawnElements:
    """Allocates the arrays that `draw_into` fills. There are no weights if ``beta`` is None."""
    weights = None if beta is None else kit.empty("float32", count)
    return kit.empty("int64", count), kit.empty("int64", count), weights


def draw_into(
    ring: Ring,
    # Destination of the rows of each leaf. If None, copies no leaves.
    addresses: Sequence[int] | None,
    drawn: DrawnElements,
    key: int,
    beta: float | None,
) -> None:
    """Draws elements with `Ring.sample`, and writes the results to existing arrays."""
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
    """Raises ValueError if the number of items differs from the number of slots."""
    if count != len(slots):
        raise ValueError(
            f"{count} items cannot be written to {len(slots)} slots; pass one index per item"
        )
