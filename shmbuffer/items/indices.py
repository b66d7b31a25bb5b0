"""Checks numbers of items, and converts the indices of samples and writes.

An index is an element number, or its coordinates if the storage has lanes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Flags, Ints


def ravel(
    index: Any,  # an int, ``[n]``, or with lanes ``[n, ndim]`` or a tuple of coordinates
    lanes: tuple[int, ...],  # sizes of the dimensions after the first
    array_of: Callable[[Any], NDArray[Any]] = np.asarray,
) -> Ints:
    """Returns contiguous int64 element indices ``[n]`` for the index of a sample or a write."""
    if not lanes or isinstance(index, int):
        numbers = _whole(array_of(index)).reshape(-1)
        return numbers if numbers.flags.c_contiguous else np.ascontiguousarray(numbers)
    if isinstance(index, tuple):
        parts = [_whole(array_of(part)) for part in index]
    else:
        numbers = _whole(array_of(index))
        parts = list(np.moveaxis(numbers, -1, 0)) if numbers.ndim else []
    if len(parts) != len(lanes) + 1:
        raise IndexError(
            f"an index of this storage must have {len(lanes) + 1} coordinates in its last "
            f"dimension, as in a sample, but this one has {len(parts)}"
        )
    flat = parts[0]
    for size, coordinate in zip(lanes, parts[1:], strict=True):
        flat = flat * size + coordinate
    return np.ascontiguousarray(flat.reshape(-1))


def _whole(found: NDArray[Any]) -> Ints:
    """Converts whole numbers to int64; IndexError for a mask, fractions or other objects."""
    kind = found.dtype.kind
    if kind not in "iu" and not (kind == "f" and np.array_equal(found, np.trunc(found))):
        raise IndexError(
            f"item indices must be integers, got {found}; for a boolean mask, pass mask.nonzero(). "
            "Nothing was changed"
        )
    return found.astype(np.int64, copy=False)


def as_int(name: str, value: Any) -> int:
    """Converts a number of items to an int, from an int or an object with ``__index__``."""
    try:
        return int(operator.index(value))
    except TypeError:
        found = f"{value!r:.60} of type {type(value).__qualname__}"
        raise TypeError(f"{name} must be a number of items (an int), got {found}") from None


def are_written(elements: Ints, lanes: tuple[int, ...]) -> Flags:
    """True for each element that was written; top-k writers return -1 for the others."""
    nowhere = ravel(tuple(np.array([-1]) for _ in range(len(lanes) + 1)), lanes)
    return np.not_equal(elements, nowhere)


def elements_of(slots: Ints, width: int) -> Ints:
    """Returns the elements of slots, int64 ``[n * width]``."""
    if width == 1:
        return slots
    elements: Ints = (slots[:, None] * width + np.arange(width)).ravel()
    return elements


def unravel(index: Any, lanes: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns coordinates ``(slot, lane, ...)``, int64 ``[n]`` each, of element indices ``[n]``."""
    coordinates = []
    for size in reversed(lanes):
        coordinates.append(index % size)
        index = index // size
    return (index, *reversed(coordinates))


def asked_size(
    asked: Any,  # argument of ``sample``; None: the handle's batch size
    own: int | None,  # batch size of the handle
    whose: str,  # other place to set it, for the message
    frames: int,  # frames between the caller and the user's line
    least: int = 0,
) -> int:
    """Returns the batch size of a sample; warns if it is 0 or differs from the handle's."""
    if asked is None:
        if own is None:
            raise RuntimeError(
                f"no batch size was specified; pass batch_size to sample() or to {whose}"
            )
        return own
    count: int = asked if type(asked) is int else as_int("batch_size", asked)
    if own is not None and count != own:
        warnings.warn(
            f"sample(batch_size={count}) differs from the buffer's batch_size={own}; using {count}",
            stacklevel=frames + 1,
        )
    elif count == 0 >= least:
        warnings.warn(
            "sample(batch_size=0) returns an empty batch; pass a number of items of at least 1",
            stacklevel=frames + 1,
        )
    if count < least:
        raise ValueError(f"batch_size must be at least {least}, got {count}")
    return count
