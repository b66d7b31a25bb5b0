"""Raw priorities as the learner gives them: what is taken, what is refused, what comes of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PriorityUpdate(NamedTuple):
    """What became of a priority update."""

    applied: int
    """Items whose priority was set."""
    stale: int
    """Items that had been written over since they were sampled; theirs was dropped."""


def as_raw(priority: Any, count: int) -> NDArray[np.float64]:
    """Priorities as float64 ``[count]``, contiguous; a single one stands for all."""
    if type(priority) is np.ndarray and priority.dtype == np.float64 and priority.shape == (count,):
        return priority if priority.flags.c_contiguous else np.ascontiguousarray(priority)
    if hasattr(priority, "detach"):  # a tensor
        priority = priority.detach().cpu()
        try:
            priority = priority.numpy()
        except TypeError:  # of a dtype that NumPy has not
            priority = priority.double().numpy()
    raw = np.asarray(priority, dtype=np.float64).reshape(-1)
    if len(raw) == count:
        return raw if raw.flags.c_contiguous else np.ascontiguousarray(raw)
    if len(raw) == 1:
        return np.full(count, raw[0])
    raise RuntimeError(
        "priority should be a number or an iterable of the same length as index: there are "
        f"{len(raw)} priorities for {count} items"
    )


def check_raw(raw: NDArray[np.float64]) -> None:
    """ValueError where a priority is NaN, infinite or negative."""
    if len(raw) and not 0 <= raw.min() <= raw.max() < np.inf:
        bad = raw[~((raw >= 0) & (raw < np.inf))][0]
        raise ValueError(f"priorities are finite and not negative, got {bad}; nothing was changed")


def from_zero(name: str, value: float) -> float:
    """``value`` as a float."""
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} must be a finite number, greater or equal to 0, got {name}={value}"
        )
    return float(value)


def one_each(several: NDArray[np.float64], count: int, how: str) -> NDArray[np.float64]:
    """Priorities, ``count`` times several, as float64 ``[count]``."""
    if not count or several.size % count:
        raise RuntimeError(f"{several.size} priorities cannot be divided among {count} items")
    rows = several.reshape(count, -1)
    if how == "median":  # of an even number the lower one, as torch.median has it
        return np.ascontiguousarray(np.sort(rows, axis=1)[:, (rows.shape[1] - 1) // 2])
    return np.ascontiguousarray(getattr(np, how)(rows, axis=1))
