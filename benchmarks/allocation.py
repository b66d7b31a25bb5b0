"""The allocation of a sample: new tensors and a TensorDict of them, without data.

A sample of shmbuffer cannot be faster than this and the bound together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.library import TENSORDICT, Operation
from benchmarks.local import Call, Local

NAME = "allocation"


class Allocation(Local):
    """Allocates samples."""

    name = NAME
    distributions = ("torch", "tensordict")

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`; returns the shape and the dtype of each entry."""
        entries = {
            name: (shape, getattr(torch, dtype))
            for name, (dtype, shape) in self._kind.leaves.items()
        }
        return {**entries, "index": ((), torch.int64)}

    def fill(self, buffer: Any, capacity: int) -> None:
        """Implements `Local.fill`; there is no buffer."""

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        if (operation.call, operation.form) != ("sample", TENSORDICT):
            return None
        entries, count = self._buffer, operation.count

        def allocate() -> TensorDict:
            return TensorDict(
                {
                    k: torch.empty((count, *shape), dtype=dtype)
                    for k, (shape, dtype) in entries.items()
                },
                [count],
            )

        return allocate, [()]
