"""Where the payload lies and who moves it: claim, mover, commit.

`NativeRows` are in the ring's memory and are moved by the C core. `HeldRows` are tensors that this
process holds (the caller's own, or on a GPU): torch moves them between claim and commit. Order,
slot words, tickets and priorities are the ring's in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.replay.leaves import Leaves

Drawn = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Leaves ``[n, *shape]``, element index int64 ``[n]``, tickets int64 ``[n]``, weights float32
``[n]`` or None."""


class Rows(ABC):
    """The payload of a ring."""

    def __init__(self, ring: Ring, leaves: Leaves) -> None:
        self.ring = ring
        self.leaves = leaves

    @abstractmethod
    def write(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> tuple[int, int]:
        """Append a batch, or one item where ``single``. The first ticket, and how many slots.

        Raises:
            SchemaMismatchError: nothing was changed.
            RingOverrunError, LockTimeout: see `Ring.write`.
        """

    @abstractmethod
    def place(self, slots: NDArray[np.int64], data: Any, *, in_place: bool) -> None:
        """Row i of ``data`` goes to ``slots[i]``; slots are unique.

        ``in_place`` keeps priority and write count.
        """

    @abstractmethod
    def read(self, index: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Copies of elements: leaves, tickets (-1 where there is none), and how many are -1."""

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draw, copy and validate. ``beta`` None draws uniformly.

        Raises:
            EmptyBufferError: nothing to draw from.
        """

    @abstractmethod
    def views(self) -> list[torch.Tensor]:
        """The leaves themselves, ``[slots, *lanes, *shape]``, not copied and not validated."""

    @staticmethod
    def _one_each(slots: NDArray[np.int64], count: int) -> None:
        if count != len(slots):
            raise ValueError(f"{count} items cannot be written to {len(slots)} places")
