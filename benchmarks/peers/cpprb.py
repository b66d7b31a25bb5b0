"""cpprb: buffers in C++ and Cython. Shared buffers use shared memory of multiprocessing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import cpprb  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from benchmarks import film
from benchmarks.items import Arrays
from benchmarks.library import ALPHA, ARRAYS, BETA, ELSEWHERE, LOADS, Operation
from benchmarks.local import Call, Local
from benchmarks.measure import Timed
from benchmarks.served import serve


class Cpprb(Local):
    """``ReplayBuffer`` and ``PrioritizedReplayBuffer``; shared: ``MPPrioritizedReplayBuffer``."""

    name = "cpprb"
    distributions = ("cpprb", "numpy")
    modules: ClassVar[list[str]] = ["cpprb"]
    most_writers = 16

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`."""
        if prioritized:
            return cpprb.PrioritizedReplayBuffer(capacity, self._fields(), alpha=ALPHA)
        return cpprb.ReplayBuffer(capacity, self._fields())

    def fill(self, buffer: Any, capacity: int) -> None:
        """Implements `Local.fill`."""
        self._kind.fill(functools.partial(_write, buffer, self._prioritized), capacity, ARRAYS)

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        if operation.call not in ("attach", "save"):
            return super().prepare(operation, block_s)
        if operation.form not in (LOADS, ELSEWHERE):
            return False
        path = str(self._directory.with_name("saved.npz"))
        call = functools.partial(self._buffer.save_transitions, path)
        if operation.form == LOADS:
            call()
            call = functools.partial(self._load, path)
        self._timed[operation] = Timed(call, [()], block_s, lambda _: None)
        return True

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        buffer, count, prioritized = self._buffer, operation.count, self._prioritized
        match operation.call, operation.form:
            case "add", "arrays":
                batches = self._kind.batches(0, ARRAYS)
                return functools.partial(_write, buffer, prioritized), [(one,) for one in batches]
            case "extend", "arrays":
                batches = self._kind.batches(count, ARRAYS)
                return functools.partial(_write, buffer, prioritized), [(one,) for one in batches]
            case "sample", "arrays":
                return buffer.sample, [(count, BETA) if prioritized else (count,)]
            case "update", "index":
                sets = zip(self.indices(count), self.raw_priorities(count), strict=True)
                return buffer.update_priorities, list(sets)
            case "cycle", "index" | "arrays":
                cycle = functools.partial(_cycle, buffer, count)
                return cycle, [(raw,) for raw in self.raw_priorities(count)]
            case "frames", _:
                return _stacks(self._capacity).sample, [(count,)]
        return None

    def share(self, writers: int, count: int) -> int:
        """Implements `Library.share`."""
        self._buffer = cpprb.MPPrioritizedReplayBuffer(self._capacity, self._fields(), alpha=ALPHA)
        self.fill(self._buffer, self._capacity)
        return super().share(writers, count)

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Implements `Local.opener`."""
        return functools.partial(functools.partial, _write, self._buffer, True)

    def _fields(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"dtype": dtype, "shape": shape or 1}
            for name, (dtype, shape) in self._kind.leaves.items()
        }

    def _load(self, path: str) -> Any:
        buffer = self.make(self._directory, self._capacity, self._prioritized)
        buffer.load_transitions(path)
        return buffer


def _stacks(capacity: int) -> Any:
    """Returns a full buffer that stores the frames of a stack and of the next stack once."""
    fields = {"obs": {"shape": (*film.SHAPE, film.STACK), "dtype": np.uint8}}
    fields |= {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = cpprb.ReplayBuffer(capacity, fields, next_of="obs", stack_compress="obs")
    for frames in film.episodes(capacity):
        stacks = np.ascontiguousarray(np.moveaxis(film.stacked(frames), 1, -1))
        count = len(stacks) - 1
        last = np.arange(count) == count - 1
        for step in range(count):
            after = {"obs": stacks[step], "next_obs": stacks[step + 1]}
            buffer.add(**after, act=0, rew=0.0, done=last[step])
        buffer.on_episode_end()
    return buffer


def _write(buffer: Any, prioritized: bool, batch: Arrays) -> None:
    if prioritized:
        buffer.add(priorities=batch["td_error"], **batch)
    else:
        buffer.add(**batch)


def _cycle(buffer: Any, count: int, raw: Any) -> None:
    sample = buffer.sample(count, BETA)
    buffer.update_priorities(sample["indexes"], raw)


if __name__ == "__main__":
    serve(Cpprb)
