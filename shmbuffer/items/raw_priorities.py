"""Converts and checks the raw priorities that a learner passes to a buffer."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from shmbuffer.memory.format.array_types import Floats

_LARGE_BETA = 2.0  # TorchRL's own examples use 1.1


class PriorityUpdate(NamedTuple):
    """The result of a priority update."""

    applied: int
    """Number of items whose priority was set."""
    stale: int
    """Number of priorities that were dropped because the item had been overwritten."""


def as_raw(priority: Any, count: int) -> Floats:
    """Converts priorities to contiguous float64 ``[count]``.

    A single priority applies to all items.
    """
    if type(priority) is np.ndarray and priority.dtype == np.float64 and priority.shape == (count,):
        return priority if priority.flags.c_contiguous else np.ascontiguousarray(priority)
    return _repeat_single(_flatten(priority), count)


def reduced(priority: Any, count: int, how: str) -> Floats:
    """Converts priorities like `as_raw`, but accepts several priorities per item.

    ``how`` is the name of the reduction to one priority per item, such as "max" or "median".
    """
    raw = _flatten(priority)
    if len(raw) <= 1 or len(raw) == count:
        return _repeat_single(raw, count)
    if not count or len(raw) % count:
        raise RuntimeError(
            f"got {len(raw)} priorities for {count} items; pass one priority per item, or the same "
            "number of priorities for each item"
        )
    rows = raw.reshape(count, -1)
    if how == "median":  # the lower one of two middle values, as in torch.median
        return np.ascontiguousarray(np.sort(rows, axis=1)[:, (rows.shape[1] - 1) // 2])
    return np.ascontiguousarray(getattr(np, how)(rows, axis=1))


def _flatten(priority: Any) -> Floats:
    """Converts priorities of any shape to a flat float64 array."""
    if hasattr(priority, "detach"):  # a tensor
        priority = priority.detach().cpu()
        try:
            priority = priority.numpy()
        except TypeError:  # NumPy lacks the dtype
            priority = priority.double().numpy()
    return np.ascontiguousarray(np.asarray(priority, dtype=np.float64).reshape(-1))


def _repeat_single(raw: Floats, count: int) -> Floats:
    """Repeats a single priority for all items.

    Raises RuntimeError if there are several priorities and their number is not ``count``.
    """
    if len(raw) == count:
        return raw
    if len(raw) == 1:
        return np.full(count, raw[0])
    raise RuntimeError(
        "priority should be a number or an iterable of the same length as index, but there are "
        f"{len(raw)} priorities for {count} items"
    )


def check_raw(raw: Floats) -> None:
    """Raises ValueError if a priority is NaN, infinite or negative."""
    if len(raw) and not 0 <= raw.min() <= raw.max() < np.inf:
        bad = raw[~((raw >= 0) & (raw < np.inf))][0]
        raise ValueError(
            f"priorities must be finite and non-negative, got {bad}; nothing was changed"
        )


def as_beta(value: float) -> float:
    """Converts the exponent of importance weights to a float. Warns if it is greater than 2.

    An exponent of 1 corrects the bias of prioritized sampling completely (Schaul et al. 2016,
    section 3.4).

    Raises:
        ValueError: the exponent is negative or not finite.
        TypeError: the exponent is not a number.
    """
    beta = as_non_negative("beta", value)
    if beta > _LARGE_BETA:
        warnings.warn(
            f"beta={value} is the exponent of the importance weights. A beta of 1 corrects for "
            "the priorities in full; with a larger beta, items of high priority have almost no "
            "weight. Pass a beta from 0 to 1",
            stacklevel=3,
        )
    return beta


def as_non_negative(name: str, value: float) -> float:
    """Converts a value to a float.

    Raises ValueError if the value is negative or not finite, and TypeError if it is not a number.
    """
    message = f"{name} must be a finite number of at least 0, got {name}={value}"
    try:
        fits = 0 <= value < math.inf
    except TypeError:
        raise TypeError(message) from None
    if not fits:
        raise ValueError(message)
    return float(value)
