"""Rows of arrays: a batch into the ring, and out of it.

    data ──▶ one call of the C core ──▶ index
     └─ it does not lie as it has to ──▶ `ArrayLeaves.match` ──▶ one call of the C core

The core takes a dict of arrays as they are, with the priorities among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.items.leaves import ArrayLeaves, SchemaLeaves
from shmbuffer.items.mover import Drawn, Mover, write_found
from shmbuffer.items.nodes import LEAF, tree_of
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import path_of
from shmbuffer.memory.format.streams import GivenStreams

_MOST_DIMS = 32  # of a leaf; the core's limit
_NO_CLASS = type(None)  # of what holds dicts: there is none


class ArrayRows(Mover):
    """The rows of a ring."""

    def __init__(
        self,
        ring: Ring,
        leaves: ArrayLeaves,
        key: str | tuple[str, ...] | None,  # the entry of the data that becomes the priorities
        swapped: int,  # the dimension of a batch that becomes the first one
    ) -> None:
        super().__init__(ring)
        self.leaves = leaves
        self.lanes = leaves.lanes
        self._swapped = swapped
        self._priority = priority_of([leaf.path for leaf in leaves.leaves], leaves.optional, key)
        arrays = [np.zeros((2, 3), dtype) for dtype in leaves.dtypes]
        dtypes = [DTYPES[leaf.dtype] for leaf in leaves.leaves]
        numbers = [dtype.array.type() if dtype.in_numpy else None for dtype in dtypes]
        examples = zip(arrays, numbers, repeat(None), strict=False)
        self._form = intake_form(ring, leaves, examples, tensors=False, box=_NO_CLASS, inside="")

    def write_as_it_is(self, data: Any, single: bool, streams: GivenStreams) -> Any:
        """See `Mover.write_as_it_is`."""
        ring, form = self.ring, self._form
        if form is None or ring.tree.initial is not None:
            return None
        seat, priority = ring.seat, self._priority
        core = seat.intakes.get(priority) or seat.intake(priority, **form)
        if core is None:
            return None
        found: Any
        if single:
            found = core.add(data, streams)
            if found is None or found >= 0:
                return found
        else:
            found = core.extend(data, streams)
            if type(found) is bytearray:
                return np.frombuffer(found, np.int64)
            if found is None:
                return None
        ring.refused(found)
        return None

    def write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams
    ) -> tuple[int, int]:
        """See `Mover.write`."""
        found = self.leaves.match(data, single, 0 if single else self._swapped)
        return write_found(self.ring, self.leaves.where, found, priorities, streams)

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Mover.sample`."""
        arrays, addresses = self.leaves.outputs(count)
        index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        weights = None if beta is None else np.empty(count, np.float32)
        self.ring.sample(
            count,
            key,
            addresses,
            address(index),
            address(tickets),
            0 if weights is None else address(weights),
            beta=beta or 0.0,
            prioritized=beta is not None,
        )
        return Drawn(self.leaves.build(arrays, count), index, tickets, weights)

    def read(self, index: Ints, tickets: Ints) -> Any:
        """See `Mover.read`."""
        count = len(index)
        arrays, addresses = self.leaves.outputs(count)
        now = np.empty(count, np.int64)
        self.ring.read(address(index), count, addresses, address(now))
        return self.leaves.build(arrays, count) if np.array_equal(now, tickets) else None


def priority_of(
    paths: Sequence[tuple[str, ...]],  # of the leaves
    optional: Collection[str],  # root keys that a batch may carry beside them
    # entry of the data whose numbers become priorities
    key: str | tuple[str, ...] | None,
) -> int | str | None:
    """The priorities, as the core takes them: number of a leaf, key of another entry, or None."""
    if key is None:
        return None
    path = path_of(key)
    if path in paths:
        return paths.index(path)
    return key if isinstance(key, str) and key in optional else None


def intake_form(
    ring: Ring,
    leaves: SchemaLeaves,
    # for each leaf an array, a number and a tensor of its dtype; None where there is none
    examples: Iterable[tuple[Any, Any, Any]],
    **how: Any,  # whether indices are tensors; what holds dicts, and where
) -> dict[str, Any] | None:
    """What `Seat.intake` takes; None where the core does not write such data as they are."""
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
