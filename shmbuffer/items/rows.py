"""Writes and reads rows whose leaves are in the ring's own memory.

The C core copies each batch in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from shmbuffer._native._core import address
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.form.nodes import LEAF, tree_of
from shmbuffer.items.mover import Drawn, Mover, allocate_elements, draw_into, require_one_each
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.leaf import path_of
from shmbuffer.memory.format.streams import GivenStreams, expand_streams

_MOST_DIMS = 32  # largest number of dimensions of a leaf that the core supports


class RingRows(Mover):
    """Writes and reads the rows of a ring."""

    def __init__(self, ring: Ring, leaves: Leaves) -> None:
        self.ring = ring
        self.leaves = leaves
        self.lanes = leaves.lanes
        self.where = leaves.where
        self.build = leaves.build  # type: ignore[method-assign] # saves a call

    def write(
        self,
        data: Any,
        single: bool,
        priorities: Floats | None,
        streams: GivenStreams = None,
        swapped: int = 0,  # dimension of the data that is exchanged with the first one
    ) -> tuple[int, int]:
        """Appends a batch, or one item if ``single`` is True.

        Returns the first ticket and the number of slots.
        """
        addresses, owners, count = self.leaves.match(data, single, swapped)
        ring = self.ring
        if not count:
            return ring.head, 0
        if priorities is not None and priorities.size != count * ring.width:
            raise ValueError(
                f"{self.where}: got {priorities.size} priorities for {count * ring.width} items; "
                "nothing was changed"
            )
        priority_address = None if priorities is None else address(priorities)
        ticket = ring.write(
            addresses, count, priority_address, streams=expand_streams(streams, count)
        )
        del owners  # they own the memory at the addresses
        return ticket, count

    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Writes row i of ``data`` to ``slots[i]``.

        With ``in_place`` the items keep their priorities, and the write is not counted.
        """
        addresses, owners, count = self.leaves.match(data)
        require_one_each(slots, count)
        if count:
            self.ring.place(slots, addresses, in_place=in_place)
        del owners

    def read(self, index: Any) -> tuple[list[Any], Any, int]:
        """Copies elements.

        Returns the copies, the tickets (-1 if there is no item), and the number of missing items.
        """
        count = index.shape[0]
        arrays, addresses = self.leaves.outputs((count,))
        tickets = self.leaves.kit.empty("int64", count)
        missing = self.ring.read(address(index), count, addresses, address(tickets))
        return arrays, tickets, missing

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws, copies and validates elements. Draws uniformly if ``beta`` is None."""
        arrays, addresses = self.leaves.outputs((count,))
        drawn = allocate_elements(self.leaves.kit, count, beta)
        draw_into(self.ring, addresses, drawn, key, beta)
        return arrays, *drawn

    def build(self, found: list[Any], lead: tuple[int, ...]) -> Any:
        """Builds items from their leaves. ``lead`` has the sizes of their leading dimensions."""
        return self.leaves.build(found, lead)


def priority_of(
    paths: Sequence[tuple[str, ...]],  # paths of the leaves
    optional: Collection[str],  # allowed root keys that are not leaves
    # Key of the entry that contains the priorities.
    key: str | tuple[str, ...] | None,
) -> int | str | None:
    """Tells the C core which entry of a batch contains the priorities.

    Returns the number of a leaf, or the key of a root entry that is not a leaf. Returns None if
    the core cannot read the priorities.
    """
    if key is None:
        return None
    path = path_of(key)
    if path in paths:
        return paths.index(path)
    return key if isinstance(key, str) and key in optional else None


def intake_form(
    ring: Ring,
    leaves: Leaves,
    # For each leaf an array, a number and a tensor of its dtype, each of which may be None.
    examples: Iterable[tuple[Any, Any, Any]],
    **how: Any,  # further arguments
) -> dict[str, Any] | None:
    """Returns the arguments for `Seat.intake`, or None if the core cannot write batches itself."""
    tree = None if leaves.node is LEAF else tree_of(leaves.node)
    shapes = [tuple(leaf.shape) for leaf in leaves.leaves]
    if (
        tree == ()
        or leaves.lanes
        or ring.width != 1
        or max(map(len, shapes), default=0) > _MOST_DIMS
    ):
        return None
    forms = tuple((shape, *example) for shape, example in zip(shapes, examples, strict=True))
    return {"tree": tree, "forms": forms, **how}
