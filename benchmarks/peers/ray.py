"""A ray actor with torchrl's buffer, in torchrl's environment with ray added.

Each call is a method of the actor, whose answer is awaited. Unlike with torchrl's shared buffers,
writers can give priorities, because the buffer is in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.library import TENSORDICT, Operation
from benchmarks.local import Call, Local
from benchmarks.served import serve

_NAME = "replay"


class Ray(Local):
    """torchrl's buffer in an actor."""

    name = "ray"
    distributions = ("ray", "torchrl", "torch", "tensordict")
    batches = TENSORDICT
    most_writers = 4

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        ray.init(include_dashboard=False, log_to_driver=False, num_cpus=8, namespace=_NAME)

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`."""
        actor = ray.remote(_Replay).options(name=_NAME, num_cpus=1)
        return actor.remote(str(directory), capacity, prioritized)

    def fill(self, buffer: Any, capacity: int) -> None:
        """Implements `Local.fill`."""
        self._kind.fill(_Writing(buffer), capacity, TENSORDICT)

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        actor, count = self._buffer, operation.count
        match operation.call, operation.form:
            case (("add" | "extend"), "TensorDict"):
                return _Writing(actor), [(one,) for one in self._kind.batches(count, TENSORDICT)]
            case "sample", "TensorDict":
                return functools.partial(_draw, actor), [(count,)]
            case "update", "index":
                sets = zip(self.indices(count), self.raw_priorities(count), strict=True)
                return functools.partial(_update, actor), list(sets)
            case "cycle", "index" | "TensorDict":
                cycle = functools.partial(_cycle, actor, count)
                return cycle, [(raw,) for raw in self.raw_priorities(count)]
        return None

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Implements `Local.opener`."""
        return functools.partial(_find, ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        """Implements `Library.close`."""
        if self._buffer is not None:
            ray.kill(self._buffer)
        super().close()


class _Replay:
    """The actor."""

    def __init__(self, directory: str, capacity: int, prioritized: bool) -> None:
        from benchmarks.peers.torchrl import TorchRL

        self._buffer = TorchRL().make(Path(directory), capacity, prioritized)

    def extend(self, batch: Any) -> None:
        self._buffer.extend(batch)

    def sample(self, count: int) -> Any:
        return self._buffer.sample(count)

    def update(self, index: Any, raw: Any) -> None:
        self._buffer.update_priority(index, raw)


class _Writing:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self, batch: Any) -> None:
        ray.get(self._actor.extend.remote(batch))


def _draw(actor: Any, count: int) -> Any:
    return ray.get(actor.sample.remote(count))


def _update(actor: Any, index: Any, raw: Any) -> None:
    ray.get(actor.update.remote(index, raw))


def _cycle(actor: Any, count: int, raw: Any) -> None:
    _update(actor, _draw(actor, count)["index"], raw)


def _find(address: str) -> Callable[[Any], object]:
    ray.init(address=address, namespace=_NAME, log_to_driver=False)
    return _Writing(ray.get_actor(_NAME))


if __name__ == "__main__":
    serve(Ray)
