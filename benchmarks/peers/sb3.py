"""stable-baselines3: one process, no priorities.

Five of the six fields are stored, because the buffer has no user-defined fields. Samples are
tensors on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import (  # type: ignore[import-not-found, unused-ignore]
    ReplayBuffer,
)

from benchmarks import film
from benchmarks.items import Arrays
from benchmarks.library import ARRAYS, Operation
from benchmarks.local import Call, Local
from benchmarks.served import serve


class StableBaselines3(Local):
    """The library's ``ReplayBuffer``."""

    name = "sb3"
    distributions = ("stable-baselines3", "torch", "numpy")

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`."""
        if prioritized:
            return None
        dtype, shape = self._kind.leaves["obs"]
        observation = spaces.Box(0, 255, shape, np.dtype(dtype).type)
        dtype, shape = self._kind.leaves["action"]
        action = spaces.Discrete(100) if not shape else spaces.Box(0, 1, shape, np.float32)
        return ReplayBuffer(capacity, observation, action, device="cpu")

    def fill(self, buffer: Any, capacity: int) -> None:
        """Fills the arrays of the buffer directly."""
        arrays = self._kind.arrays(1, np.random.default_rng(0))
        buffer.observations[:] = arrays["obs"]
        buffer.next_observations[:] = arrays["next_obs"]
        buffer.full = True

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        match operation.call, operation.form:
            case "add", "arrays":
                return self._buffer.add, [_arguments(one) for one in self._kind.batches(1, ARRAYS)]
            case "sample", "arrays":
                return self._buffer.sample, [(operation.count,)]
            case "frames", _:
                return _stacks(self._capacity).sample, [(operation.count,)]
        return None


def _stacks(capacity: int) -> Any:
    """Returns a full buffer of stacks, whose next stack is that of the following step."""
    space = spaces.Box(0, 255, (film.STACK, *film.SHAPE), np.uint8)
    memory = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    buffer = ReplayBuffer(capacity, space, spaces.Discrete(4), device="cpu", **memory)
    at = 0
    for frames in film.episodes(capacity):
        stacks = film.stacked(frames)[:-1]
        buffer.observations[at : at + len(stacks), 0] = stacks
        at += len(stacks)
        buffer.dones[at - 1] = 1.0
    buffer.full = True
    return buffer


def _arguments(items: Arrays) -> tuple[Any, ...]:
    named = ("obs", "next_obs", "action", "reward", "done")
    return (*(items[name] for name in named), [{}])


if __name__ == "__main__":
    serve(StableBaselines3)
