"""Arranges items of one kind in columns: for each leaf, the address and size in every item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.items.records.forms import Kind, Walk, describe
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format import volumes


@dataclass(frozen=True, eq=False)
class Shapes:
    """The kind and the sizes of n items. Batches of the same shapes share one object."""

    kind: Kind
    batch_dims: Ints
    dims: tuple[Ints, ...]
    sizes: Ints
    rows: Ints  # row numbers from 0 to n - 1, int64 ``[n, 1]``


@dataclass(frozen=True, eq=False)
class Columns:
    """The leaves of n items of one kind. Raises TypeError if a leaf has no memory."""

    kind: Kind
    batch_dims: Ints  # int64 ``[n, kind.batch_dims]``
    dims: tuple[Ints, ...]  # int64 ``[n, rank]`` for each leaf
    addresses: Ints  # int64 ``[n, leaves]``: addresses of the leaves' bytes
    sizes: Ints  # int64 ``[n, leaves]``: sizes of the leaves in bytes
    # Owners of the memory at the addresses.
    keeps: list[Any] = field(repr=False)
    # For each leaf, a list of its values in all items; None if the items were rows of a batch.
    leaves: list[list[Any]] | None = field(default=None, repr=False)
    # Set if the sizes are cached. Values that are derived from them can then be cached as well.
    shapes: Shapes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.addresses.all():
            return
        nowhere = ((self.addresses == 0) & (self.sizes > 0)).any(axis=0)
        for at in np.flatnonzero(nowhere).tolist():
            raise TypeError(
                f"the leaf {self.kind.paths[at]!r} has no memory, because it is a placeholder for "
                "a tensor; clone it into a real tensor before writing it"
            )

    def __len__(self) -> int:
        return len(self.addresses)


def of_items(items: Sequence[Any]) -> list[tuple[Ints, Columns]]:
    """Groups items by kind. Returns the positions and the columns of each group.

    Cost: `forms.describe` for each item, and 0.3 µs per leaf.
    """
    groups: dict[tuple[Any, ...], list[Walk]] = {}
    places: dict[tuple[Any, ...], list[int]] = {}
    for at, item in enumerate(items):
        one = describe(item)
        key = one.kind.key
        if key in groups:
            groups[key].append(one)
            places[key].append(at)
        else:
            groups[key], places[key] = [one], [at]
    return [(np.array(places[key], np.int64), of_described(group)) for key, group in groups.items()]


def of_described(group: list[Walk]) -> Columns:
    """Arranges one or more items of one kind in columns. ``group`` has the walk of each item."""
    kind, count = group[0].kind, len(group)
    batch_dims = _table([one.batch_dims for one in group], count)
    numbers = _table([one.dims for one in group], count)
    sizes = np.empty((count, len(kind.chunks)), np.int64)
    dims, start = [], 0
    for at, chunk in enumerate(kind.chunks):
        dims.append(numbers[:, start : start + chunk.rank])
        sizes[:, at] = volumes(chunk, dims[at])
        start += chunk.rank
    addresses = np.zeros((count, len(kind.chunks)), np.int64)
    leaves = [list(column) for column in zip(*[one.leaves for one in group], strict=True)]
    keeps: list[Any] = [leaves]
    for at, column in enumerate(leaves):
        if type(column[0]) is bytes:
            addresses[:, at] = joined(column, sizes[:, at], keeps)
        else:
            addresses[:, at] = np.fromiter(map(address, column), np.int64, count)
    return Columns(kind, batch_dims, tuple(dims), addresses, sizes, keeps, leaves)


def _table(rows: list[list[int]], count: int) -> Ints:
    width = len(rows[0])
    return np.fromiter(chain.from_iterable(rows), np.int64, count * width).reshape(count, width)


def joined(values: list[bytes], sizes: Ints, keeps: list[Any]) -> Ints:
    """Joins values in one block of memory, and returns the address of each value.

    The block is added to ``keeps``, which keeps it alive.
    """
    whole = np.frombuffer(b"".join(values), np.uint8)
    keeps.append(whole)
    starts: Ints = address(whole) + np.cumsum(sizes) - sizes
    return starts
