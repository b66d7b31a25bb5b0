"""flashbax: pure functions of JAX over a state, here compiled and with donated states.

A call ends when its result is ready (``block_until_ready``). Writers cannot give priorities, so new
items have the largest priority.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashbax  # type: ignore[import-not-found, unused-ignore]
import jax  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from benchmarks.library import ALPHA, ARRAYS, Operation
from benchmarks.local import Call, Local
from benchmarks.served import serve


class Flashbax(Local):
    """Item buffers with or without priorities, one for each batch size."""

    name = "flashbax"
    distributions = ("flashbax", "jax", "numpy")

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`; returns the state. Functions depend on the batch size."""
        self._key = jax.random.PRNGKey(0)
        item = jax.tree.map(jax.numpy.asarray, self._kind.batches(0, ARRAYS)[0])
        return self._functions(1).init(item)

    def fill(self, buffer: Any, capacity: int) -> None:
        """Implements `Local.fill`."""
        size = max(1, min(capacity, (1 << 24) // self._kind.nbytes, 10_000))
        while capacity % size:
            size -= 1
        add = jax.jit(self._functions(size).add, donate_argnums=0)
        batches = self._on_device(size)
        for at in range(capacity // size):
            self._buffer = jax.block_until_ready(add(self._buffer, batches[at % len(batches)]))

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        count = operation.count
        functions = self._functions(count)
        match operation.call, operation.form:
            case (("add" | "extend"), "arrays"):
                self._add = jax.jit(self._functions(count).add, donate_argnums=0)
                return self._write, [(self._add, batch) for batch in self._on_device(count)]
            case "sample", "arrays":
                sample = jax.jit(functions.sample)
                return self._draw, [(sample,)]
            case "update", "index":
                update = jax.jit(functions.set_priorities, donate_argnums=0)
                sets = zip(self.indices(count), self.raw_priorities(count), strict=True)
                return self._update, [(update, index, raw) for index, raw in sets]
            case "cycle", "index":
                sample = jax.jit(functions.sample)
                update = jax.jit(functions.set_priorities, donate_argnums=0)
                return self._cycle, [(sample, update, raw) for raw in self.raw_priorities(count)]
        return None

    def _functions(self, count: int) -> Any:
        sizes = {"max_length": self._capacity, "min_length": 1, "sample_batch_size": count}
        if self._prioritized:
            return flashbax.make_prioritised_item_buffer(
                **sizes, add_batches=True, priority_exponent=ALPHA
            )
        return flashbax.make_item_buffer(**sizes, add_batches=True)

    def _on_device(self, count: int) -> list[Any]:
        batches = self._kind.batches(count, ARRAYS)[:16]
        return [jax.tree.map(jax.numpy.asarray, batch) for batch in batches]

    def _write(self, add: Any, batch: Any) -> None:
        self._buffer = jax.block_until_ready(add(self._buffer, batch))

    def _draw(self, sample: Any) -> Any:
        self._key, key = jax.random.split(self._key)
        return jax.block_until_ready(sample(self._buffer, key))

    def _update(self, update: Any, index: Any, raw: np.ndarray[Any, Any]) -> None:
        self._buffer = jax.block_until_ready(update(self._buffer, index, raw))

    def _cycle(self, sample: Any, update: Any, raw: np.ndarray[Any, Any]) -> None:
        self._update(update, self._draw(sample).indices, raw)


if __name__ == "__main__":
    serve(Flashbax)
