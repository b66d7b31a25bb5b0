"""tianshou: one process. A batch of items is one item of each of several environments.

Five of the six fields are stored, because its buffers cannot have a field named ``td_error``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tianshou.data import (  # type: ignore[import-not-found, unused-ignore]
    Batch,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

from benchmarks.items import Arrays
from benchmarks.library import ALPHA, ARRAYS, BETA, Operation
from benchmarks.local import Call, Local
from benchmarks.served import serve

_FULL_CHUNK = 100_000


class Tianshou(Local):
    """``ReplayBuffer`` and ``PrioritizedReplayBuffer``, and the vector of them for ``extend``."""

    name = "tianshou"
    distributions = ("tianshou", "torch", "numpy")

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`."""
        if prioritized:
            return PrioritizedReplayBuffer(capacity, ALPHA, BETA)
        return ReplayBuffer(capacity)

    def fill(self, buffer: Any, capacity: int) -> None:
        """Fills the buffer with zeros directly, because adding them one by one takes 15 seconds."""
        buffer.add(_batch(self._kind.batches(0, ARRAYS)[0]))  # which makes the arrays
        buffer._size = capacity
        if self._prioritized:
            for start in range(0, capacity, _FULL_CHUNK):
                index = np.arange(start, min(start + _FULL_CHUNK, capacity))
                buffer.update_weight(index, 1 - np.random.random(len(index)))

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        buffer, count = self._buffer, operation.count
        match operation.call, operation.form:
            case "add", "arrays":
                return buffer.add, [(_batch(one),) for one in self._kind.batches(0, ARRAYS)]
            case "extend", "arrays" if count == 1:
                return buffer.add, [(_batch(one),) for one in self._kind.batches(0, ARRAYS)]
            case "extend", "arrays":
                add = self._vector(count).add
                return add, [(_batch(one),) for one in self._kind.batches(count, ARRAYS)]
            case "sample", "arrays":
                return buffer.sample, [(count,)]
            case "update", "index":
                sets = zip(self.indices(count), self.raw_priorities(count), strict=True)
                return buffer.update_weight, list(sets)
            case "cycle", "index":
                return self._cycle, [(count, raw) for raw in self.raw_priorities(count)]
        return None

    def _vector(self, count: int) -> Any:
        total = max(self._capacity, count)
        if self._prioritized:
            return PrioritizedVectorReplayBuffer(total, count, alpha=ALPHA, beta=BETA)
        return VectorReplayBuffer(total, count)

    def _cycle(self, count: int, raw: Any) -> None:
        _, index = self._buffer.sample(count)
        self._buffer.update_weight(index, raw)


def _batch(items: Arrays) -> Any:
    done = items["done"]
    return Batch(
        obs=items["obs"],
        obs_next=items["next_obs"],
        act=items["action"],
        rew=items["reward"],
        terminated=done,
        truncated=np.zeros_like(done),
        done=done,
        info=Batch(),
    )


if __name__ == "__main__":
    serve(Tianshou)
