"""Where in a list a write goes: no gaps, and not beyond the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shmbuffer.replay.storages.placing import is_int


def places_of(cursor: Any, count: int, length: int, max_size: int) -> list[int]:
    """The places of a write.

    Args:
        cursor: int, slice, range, list, array or tensor of ints (negative from the end) or of
            booleans. A slice without an end, or with one that counts from the end, ends with the
            list.
        count: how many items are to be written.
        length: how many there are.
        max_size: how many there may be.

    Returns:
        ``count`` places, from 0.

    Raises:
        RuntimeError: one of them is behind the first free one, or beyond ``max_size``.
        IndexError: it is before the first, or no index of one dimension.
        ValueError: they are not ``count``.
    """
    named = [int(cursor)] if is_int(cursor) else _named(cursor, length)
    if len(named) != count:
        raise ValueError(f"{count} items cannot be written to {len(named)} places")
    places = []
    end = length
    for name in named:
        place = name + end if name < 0 else name
        if place < 0:
            raise IndexError(f"{name} is out of range for {end} items")
        if place >= max_size:
            raise RuntimeError(f"there is no place {name} in a list of max_size {max_size}")
        if place > end:
            raise RuntimeError(
                f"an item at {name} would leave a gap: there are {end} items, and the next one "
                f"goes to {end}"
            )
        end = max(end, place + 1)
        places.append(place)
    return places


def _named(cursor: Any, length: int) -> Sequence[int]:
    if isinstance(cursor, slice):
        stop = cursor.stop
        return range(length if stop is None or stop < 0 else max(length, stop))[cursor]
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.detach().cpu().numpy()
    found = np.asarray(list(cursor) if isinstance(cursor, range) else cursor)
    if found.dtype == np.bool_:
        found = np.nonzero(found)[0]
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise IndexError(f"{cursor!r} names no places of a list: one dimension of ints does")
    numbers: list[int] = found.astype(np.int64).tolist()
    return numbers
