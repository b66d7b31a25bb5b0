"""The items of a ring as rows in time order, and the rows at which trajectories end.

    a full ring of five slots, written up to slot 1: the oldest item is in slot 2
      slot               0   1   2   3   4
      observation        d   e   a   b   c
      ("next", ...)      e   f   b   b'  d       the episode ended in slot 3 (done)
      row                3   4   0   1   2
    stored observations: each of the two trajectories has one more than it has rows
      observation        a   b   b'  c   d   e   f
      step of a row      0   1       3   4   5

If the storage has lanes (``ndim > 1``), the rows of lane 0 come first, followed by those of lane 1.

Invariants:
  1. The observation of a row is stored at the step of the row, and the next observation at the
     following step.
  2. A trajectory ends at the end of its episode, at the newest item, and at a *cut*. A cut is a row
     that the next row does not continue, because several collectors write alternately or an item
     spans several steps. The done flags and the position of the ring do not indicate cuts.
  3. Until the ring has wrapped, the rows after the newest item contain no items. They count as
     rows, because TorchRL saves the whole capacity, but they are neither read nor written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.tensors.form import cpu

Bytes = NDArray[np.void]
"""An array ``[rows]`` in which each value contains all bytes of one row."""

CHUNK_BYTES = 1 << 24
"""Maximum number of bytes that a copy uses in addition to source and target."""


class Episodes:
    """Rows of a ring in time order, and the rows at which trajectories end.

    Args:
        shape: shape of the ring, with slots first.
        shift: slot after the one that was written last.
        is_full: True if the ring has wrapped.

    Raises:
        ValueError: the ring has no elements.
    """

    def __init__(self, shape: Sequence[int], shift: int, is_full: bool) -> None:
        self.shape = tuple(int(size) for size in shape)
        if not self.shape or not math.prod(self.shape):
            raise ValueError(
                f"a batch of shape {list(self.shape)} has no items; pass a batch with time in its "
                "first dimension"
            )
        self.slots = self.shape[0]
        self.lanes = math.prod(self.shape[1:])
        self.shift = int(shift) % self.slots or self.slots
        self.is_full = bool(is_full)
        time = cpu.arange(self.slots)
        first = self.shift if self.is_full else 0
        slots = (time + first) % self.slots
        self.elements = (slots * self.lanes + cpu.arange(self.lanes)[:, None]).reshape(-1)
        """Element index of each row (slot * lanes + lane), int64 ``[rows]``."""
        last = self.slots - 1 if self.is_full else self.shift - 1
        self.holds = (time <= last).repeat(self.lanes)
        """True for each row that contains an item, bool ``[rows]``."""
        self.ends = (time == last).repeat(self.lanes)
        """True for each row that ends a trajectory, bool ``[rows]``. `end` adds more rows."""

    @property
    def rows(self) -> int:
        """Number of rows, which is the number of slots times the number of lanes."""
        return self.slots * self.lanes

    def end(self, where: torch.Tensor) -> None:
        """Marks the rows for which ``where``, bool ``[rows]``, is True as ends of trajectories."""
        self.ends = self.ends | where
        self.__dict__.pop("steps", None)

    @cached_property
    def steps(self) -> torch.Tensor:
        """Position of each row's observation in the stored observations, int64 ``[rows]``."""
        return cpu.arange(self.rows) + self.ends.cumsum(0) - self.ends.long()

    @property
    def kept(self) -> int:
        """Number of stored observations: one per row, and one more per end."""
        return self.rows + int(self.ends.sum())

    @property
    def trajectories(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Number of rows of each trajectory, and True for each trajectory that has an end.

        If the ring has not wrapped, the rows after the newest item form a trajectory without an
        end.
        """
        last = self.ends.clone()
        last.view(self.lanes, self.slots)[:, -1] = True
        at = last.nonzero()[:, 0]
        return torch.diff(at, prepend=cpu.tensor([-1])), self.ends[at]

    def cuts(self, root: Bytes, after: Bytes) -> torch.Tensor:
        """Returns True for each row at a cut, bool ``[rows]``.

        These are the rows that do not end a trajectory, but whose next observation (``after``)
        differs from the observation of the next row (``root``).
        """
        found = cpu.zeros(self.rows, dtype=torch.bool)
        candidates = (self.holds & ~self.ends).nonzero()[:, 0]
        for rows in torch.split(candidates, max(1, CHUNK_BYTES // root.itemsize)):
            here, there = self.elements[rows].numpy(), self.elements[rows + 1].numpy()
            found[rows] = torch.from_numpy(after[here] != root[there])
        return found


def as_bytes(tensor: torch.Tensor, rows: int) -> Bytes:
    """Converts a tensor to an array with one value per row.

    The array shares the memory of the tensor if that is contiguous and on the CPU. NumPy copies and
    compares such values four to forty times as fast as torch copies rows of bytes.
    """
    tensor = tensor.detach().as_subclass(torch.Tensor).cpu().contiguous()
    if not tensor.numel():
        return np.zeros(rows, "V1")  # a placeholder, because there is no data to copy
    flat = tensor.view(rows, -1).view(torch.uint8).numpy()
    return flat.view(f"V{flat.shape[1]}")[:, 0]


def flags_of(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns True for each row in which a flag is set, bool ``[rows]``.

    Any nonzero byte counts as True, because the memory of a ring may contain other values than 0
    and 1.
    """
    found = as_bytes(tensor, rows)
    return torch.from_numpy(found != np.zeros(1, found.dtype))


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates the components of a nested tensor to rows ``[rows, *shape]``.

    The result shares the memory of a contiguous nested tensor. A tensor that is not nested is
    returned unchanged.
    """
    if not tensor.is_nested:
        return tensor
    parts = tensor.unbind(0)
    if not tensor.is_contiguous():
        return torch.cat([part.as_subclass(torch.Tensor) for part in parts])
    item = parts[0].shape[1:]
    rows = sum(part.shape[0] for part in parts)
    flat = cpu.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat[: rows * item.numel()].view(rows, *item)


def transfer(target: Bytes, to: torch.Tensor, source: Bytes, at: torch.Tensor) -> None:
    """Copies row ``at[i]`` of ``source`` to row ``to[i]`` of ``target``."""
    size = max(1, CHUNK_BYTES // source.itemsize)
    for here, there in zip(torch.split(to, size), torch.split(at, size), strict=True):
        target[here.numpy()] = source[there.numpy()]
