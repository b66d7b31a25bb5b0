"""Streams: numbers that say which environment of its collector an item is from.

A writer passes them with its items. The C core combines the incarnation of the writer and its
stream into one word for each slot, the source (`layout.source_of`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.layout import STREAMS

Streams = NDArray[np.uint32]
GivenStreams = int | Streams | None
"""A stream for all items, a stream for each item, or None for stream 0."""


def check_streams(streams: Any) -> int | Streams:
    """Checks streams, and returns one int for all items, or a copy of the stream of each item."""
    if type(streams) is int and 0 <= streams < STREAMS:
        return streams
    given = np.asarray(streams)
    if given.dtype.kind in "iu" and given.ndim == 1 and 0 <= np.bitwise_or.reduce(given) < STREAMS:
        return given.astype(np.uint32)  # a bit that is set in one of them is set in the combination
    if given.dtype.kind not in "iu" and (given.size or given.dtype.kind != "f"):
        raise TypeError(
            "streams must be an int, or one for each item of the batch [n], but has the dtype "
            f"{given.dtype} and the shape {list(given.shape)}. Nothing was written"
        )
    if given.ndim > 1:
        raise TypeError(
            f"streams must have one number for each item, [n], but has the shape "
            f"{list(given.shape)}. Nothing was written. For data [streams, T, ...] pass "
            "stream_dim=0"
        )
    outside = np.flatnonzero((given < 0) | (given >= STREAMS))
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"stream {given.reshape(-1)[at]} at position {at} is not a number from 0 to "
            f"{STREAMS - 1}; nothing was written"
        )
    return given.astype(np.uint32) if given.ndim else int(given)


def expand_streams(streams: GivenStreams, count: int) -> Streams | None:
    """Returns one stream for each of ``count`` items, or None for stream 0; checks their number."""
    if streams is None or isinstance(streams, int):
        return np.full(count, streams, np.uint32) if streams else None
    if len(streams) != count:
        raise ValueError(
            f"{len(streams)} streams were given for {count} items; give one for each item, or one "
            "int for all of them. Nothing was written"
        )
    return streams
