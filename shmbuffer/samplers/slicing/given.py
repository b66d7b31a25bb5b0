"""Trajectories given by the user: a flag or an id for each item, independent of the stored ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.slicing.single_entries import any_of
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor


class Given:
    """Given ends, bool ``[items]``, or ids, integers ``[items]``; both may be None."""

    def __init__(self, ends: torch.Tensor | None, ids: torch.Tensor | None) -> None:
        self._ends, self._ids = ends, ids

    def __bool__(self) -> bool:
        """Whether anything was given."""
        return self._ends is not None or self._ids is not None

    def trajectories(
        self, there: Ints, capacity: int, width: int, head: int | None
    ) -> Trajectories:
        """Of slots ``there``; the ring's head ends a trajectory. A full storage is a circle."""
        table = Trajectories(capacity, width)
        table.head = head
        slots = int(there[-1]) + 1 if len(there) else 0
        is_full = len(there) == capacity
        cut = self._cut_behind(slots, capacity, width)
        if not is_full:
            cut = cut[:slots]
        if head is not None and 0 < head % capacity <= len(cut):
            cut[head % capacity - 1] = True
        for lane in range(width):
            order = there
            if is_full:  # begin behind the last end
                ends = np.flatnonzero(cut[:, lane])
                order = np.roll(there, -int(ends[-1]) - 1) if len(ends) else there
            begins = np.ones(len(order), np.bool_)
            begins[1:] = cut[order[:-1], lane] | ((order[1:] - order[:-1]) % capacity != 1)
            nothing = np.zeros(len(order), np.int64)
            steps = np.arange(len(order)) + np.cumsum(begins)  # a missing step cuts
            table.insert(order * width + lane, nothing.view(np.uint64), nothing, steps)
        return table

    def _cut_behind(self, slots: int, capacity: int, width: int) -> Flags:
        """Whether a trajectory ends with an item, ``[slots, lanes]``."""
        if self._ends is not None:
            return any_of(_checked("ends", self._ends, slots, capacity, width)).copy()
        assert self._ids is not None
        ids = _checked("trajectories", self._ids, slots, capacity, width)
        return any_of(ids != np.roll(ids, -1, 0))


def _checked(name: str, given: torch.Tensor, slots: int, capacity: int, width: int) -> NDArray[Any]:
    """One number an item, ``[slots, width, 1]``."""
    values = as_numbers(as_tensor(given)).reshape(-1)
    count, rest = divmod(len(values), width)
    if rest or not slots <= count <= capacity:
        raise ValueError(
            f"{name} has {len(values)} entries for a storage with {slots * width} items and "
            f"room for {capacity * width}; give one for each item, in the order of the "
            "storage"
        )
    return values.reshape(count, width, 1)
