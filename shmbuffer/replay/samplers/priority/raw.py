"""Raw priorities as the learner gives them: what is taken, and what is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from shmbuffer.replay.samplers.arrays import Floats


def as_raw(priority: Any, count: int) -> Floats:
    """Priorities as float64 ``[count]``, contiguous; a single one stands for all."""
    if type(priority) is np.ndarray and priority.dtype == np.float64 and priority.shape == (count,):
        return priority if priority.flags.c_contiguous else np.ascontiguousarray(priority)
    if isinstance(priority, torch.Tensor):
        if not priority.is_cpu or priority.requires_grad:
            priority = priority.detach().cpu()
        if priority.dtype is torch.bfloat16:  # numpy has no such dtype
            priority = priority.double()
        priority = priority.numpy()
    raw = np.asarray(priority, dtype=np.float64).reshape(-1)
    if len(raw) == count:
        return raw if raw.flags.c_contiguous else np.ascontiguousarray(raw)
    if len(raw) == 1:
        return np.full(count, raw[0])
    raise RuntimeError(
        "priority should be a number or an iterable of the same length as index: there are "
        f"{len(raw)} priorities for {count} items"
    )


def check_raw(raw: Floats) -> None:
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
