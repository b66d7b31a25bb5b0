"""Stream numbers, which identify the environment of a collector that an item comes from.

A writer passes a stream number with each item. The C core combines it with the incarnation of the
writer and stores both in one 64-bit number per slot, the source (`layout.source_of`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.layout import STREAMS

Streams = NDArray[np.uint32]
GivenStreams = int | Streams | None
"""A stream number for all items, an array with one for each item, or None for stream 0."""


def check_streams(streams: Any) -> int | Streams:
    """Checks the stream numbers that a user passed.

    Args:
        streams: One integer for all items of a batch, or a one-dimensional array of integers.

    Returns:
        An integer, or a copy of the array as uint32.

    Raises:
        TypeError: ``streams`` is neither an integer nor an array of integers with one dimension.
        ValueError: A stream number is out of range.
    """
    if type(streams) is int and 0 <= streams < STREAMS:
        return streams
    given = np.asarray(streams)
    if given.dtype.kind in "iu" and given.ndim == 1 and 0 <= np.bitwise_or.reduce(given) < STREAMS:
        # STREAMS is a power of two. The bitwise OR is less than STREAMS only if all numbers are,
        # and it is negative if any number is.
        return given.astype(np.uint32)
    if given.dtype.kind not in "iu" and (given.size or given.dtype.kind != "f"):
        raise TypeError(
            "streams must be an int, or an integer array with the shape [n] of the batch, but has"
            f" the dtype {given.dtype} and the shape {list(given.shape)}. Nothing was written"
        )
    if given.ndim > 1:
        raise TypeError(
            "streams must have one number for each item, with the shape [n], but has the shape "
            f"{list(given.shape)}. Nothing was written. For data with the shape [streams, T, ...],"
            " pass stream_dim=0"
        )
    outside = np.flatnonzero((given < 0) | (given >= STREAMS))
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"stream {given.reshape(-1)[at]} at position {at} is not a number from 0 to "
            f"{STREAMS - 1}. Nothing was written"
        )
    return given.astype(np.uint32) if given.ndim else int(given)


def expand_streams(streams: GivenStreams, count: int) -> Streams | None:
    """Returns an array with the stream number of each of ``count`` items, or None for stream 0.

    Raises:
        ValueError: ``streams`` is an array with another length than ``count``.
    """
    if streams is None or isinstance(streams, int):
        return np.full(count, streams, np.uint32) if streams else None
    if len(streams) != count:
        raise ValueError(
            f"{len(streams)} streams were given for {count} items; pass one number for each item,"
            " or one int for all of them. Nothing was written"
        )
    return streams
