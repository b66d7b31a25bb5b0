"""Checks numbers of items, and converts item indices.

In a storage with ``ndim=1``, an index is the number of an element. In a storage with lanes, it can
also be the coordinates of an element: its slot, and its position in each dimension of lanes.
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
    """Converts the index of a sample or a write to element numbers, contiguous int64 ``[n]``."""
    if not lanes or isinstance(index, int):
        numbers = _as_integers(array_of(index)).reshape(-1)
        return numbers if numbers.flags.c_contiguous else np.ascontiguousarray(numbers)
    if isinstance(index, tuple):
        parts = [_as_integers(array_of(part)) for part in index]
    else:
        numbers = _as_integers(array_of(index))
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


def _as_integers(found: NDArray[Any]) -> Ints:
    """Converts integers, or floats without a fraction, to int64.

    Raises IndexError for a boolean mask, for fractions and for other objects.
    """
    kind = found.dtype.kind
    if kind not in "iu" and not (kind == "f" and np.array_equal(found, np.trunc(found))):
        raise IndexError(
            f"item indices must be integers, got {found}; for a boolean mask, pass mask.nonzero(). "
            "Nothing was changed"
        )
    return found.astype(np.int64, copy=False)


def as_int(name: str, value: Any) -> int:
    """Converts a number of items to an int. Raises TypeError if it is not an integer."""
    try:
        return int(operator.index(value))
    except TypeError:
        found = f"{value!r:.60} of type {type(value).__qualname__}"
        raise TypeError(f"{name} must be a number of items (an int), got {found}") from None


def are_written(elements: Ints, lanes: tuple[int, ...]) -> Flags:
    """Returns a mask ``[n]`` of the items that were written.

    A top-k writer returns the index -1 for each item that it did not write.
    """
    nowhere = ravel(tuple(np.array([-1]) for _ in range(len(lanes) + 1)), lanes)
    return np.not_equal(elements, nowhere)


def elements_of(slots: Ints, width: int) -> Ints:
    """Returns the numbers of all elements in n slots, int64 ``[n * width]``."""
    if width == 1:
        return slots
    elements: Ints = (slots[:, None] * width + np.arange(width)).ravel()
    return elements


def unravel(index: Any, lanes: tuple[int, ...]) -> tuple[Any, ...]:
    """Converts element numbers ``[n]`` to coordinates ``(slot, lane, ...)``, int64 ``[n]`` each."""
    coordinates = []
    for size in reversed(lanes):
        coordinates.append(index % size)
        index = index // size
    return (index, *reversed(coordinates))


def resolve_batch_size(
    requested: Any,  # argument of ``sample``; if None, selects the handle's batch size
    default: int | None,  # batch size of the handle
    setter: str,  # function that sets the handle's batch size, for the message
    frames: int,  # number of stack frames between the caller and the user's code
    least: int = 0,
) -> int:
    """Returns the batch size of a sample. Warns if it is 0 or differs from the handle's."""
    if requested is None:
        if default is None:
            raise RuntimeError(
                f"no batch size was specified; pass batch_size to sample() or to {setter}"
            )
        return default
    count: int = requested if type(requested) is int else as_int("batch_size", requested)
    if default is not None and count != default:
        warnings.warn(
            f"sample(batch_size={count}) differs from the buffer's batch_size={default}; using "
            f"{count}",
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
