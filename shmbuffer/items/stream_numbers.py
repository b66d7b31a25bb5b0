"""Converts data that have a stream dimension and a time dimension to items in time order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shmbuffer.memory.format.streams import Streams


def require_rows(streams: int | Streams, ndim: int) -> None:
    """Raises ValueError if stream numbers are given per item, but a slot contains several items."""
    if ndim > 1 and not isinstance(streams, int):
        raise ValueError(
            f"streams: with ndim={ndim} each lane of a slot is already a separate stream; pass one "
            "int for the whole batch, or store rows with ndim=1. Nothing was written"
        )


def steps_and_streams(
    leads: Iterable[tuple[int, ...]], dim: int, ndim: int
) -> tuple[tuple[int, int], Streams]:
    """Returns ``(steps, streams)`` and the stream number of each item in time order.

    ``leads`` has the first two sizes of each leaf, which must be equal in all leaves.
    """
    if dim not in (0, 1) or ndim > 1:
        raise ValueError(
            f"stream_dim={dim!r} is not supported by a storage with ndim={ndim}; it must be 0 for "
            "data [streams, T, ...] or 1 for [T, streams, ...], and needs a storage with ndim=1. "
            "Nothing was written"
        )
    found = sorted(set(leads))
    if len(found) != 1 or len(found[0]) != 2:
        raise ValueError(
            f"stream_dim={dim}: all entries must begin with the same two dimensions, streams and "
            f"time; found {list(map(list, found))}. Nothing was written"
        )
    first, second = found[0]
    lead = (first, second) if dim else (second, first)
    return lead, np.tile(np.arange(lead[1], dtype=np.uint32), lead[0])


def in_time_order(data: Any, dim: int, ndim: int) -> tuple[Any, Streams, tuple[int, int]]:
    """Sorts data ``[streams, T, ...]`` (``dim=0``) or ``[T, streams, ...]`` (``dim=1``) by time.

    Returns the items ``[T * streams, ...]``, the stream number of each item, and ``(T, streams)``.
    """
    leads: list[tuple[int, ...]] = []
    map_leaves(data, lambda leaf: leads.append(tuple(np.shape(leaf)[:2])))
    lead, streams = steps_and_streams(leads, dim, ndim)

    def ordered(leaf: Any) -> Any:
        if isinstance(leaf, list):  # stays a list, so that it is converted to the buffer's dtype
            return [item for row in (leaf if dim else zip(*leaf, strict=True)) for item in row]
        leaf = leaf if hasattr(leaf, "swapaxes") else np.asarray(leaf)
        rows = leaf if dim else leaf.swapaxes(0, 1)
        return rows.reshape(lead[0] * lead[1], *leaf.shape[2:])

    return map_leaves(data, ordered), streams, lead


def map_leaves(data: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to every leaf of nested dicts and tuples. A list counts as a leaf."""
    if isinstance(data, Mapping):
        return {key: map_leaves(value, change) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [map_leaves(part, change) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return change(data)
