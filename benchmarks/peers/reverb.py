"""Reverb: a server in threads of the learner's process, and clients that use gRPC.

The table has at most 50,000 items, because each item is inserted separately, in about 70
microseconds. A learner reads the ``TimestepDataset``, which prefetches samples. Priorities are
updated by key.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is loaded

import numpy as np
import reverb  # type: ignore[import-not-found, unused-ignore]
import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]

from benchmarks.items import Arrays, Kind
from benchmarks.library import ALPHA, ARRAYS, LOADS, Operation
from benchmarks.local import Call, Local
from benchmarks.measure import Timed
from benchmarks.served import serve

_TABLE = "replay"
_FULL_CHUNK = 1000


class Reverb(Local):
    """A table with or without priorities."""

    name = "reverb"
    distributions = ("dm-reverb", "tensorflow-cpu", "numpy")
    modules: ClassVar[list[str]] = []  # gRPC does not outlive a fork
    most_items = 50_000
    most_writers = 4

    def __init__(self) -> None:
        super().__init__()
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self._draws: dict[int, Any] = {}

    def make(self, directory: Path, capacity: int, prioritized: bool) -> Any:
        """Implements `Local.make`; returns the server."""
        checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(directory))
        return self._serve(checkpointer)

    def fill(self, buffer: Any, capacity: int) -> None:
        """Implements `Local.fill`."""
        self._write = _Writing(self._address())
        batches = self._kind.batches(min(capacity, _FULL_CHUNK), ARRAYS)
        for start in range(0, capacity, _FULL_CHUNK):
            self._write(batches[start // _FULL_CHUNK % len(batches)])

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        if operation.call != "attach":
            return super().prepare(operation, block_s)
        if operation.form != LOADS:
            return False
        reverb.Client(self._address()).checkpoint()
        checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(self._directory))
        load = functools.partial(self._serve, checkpointer)
        self._timed[operation] = Timed(load, [()], block_s, lambda server: server.stop())
        return True

    def call(self, operation: Operation) -> Call | None:
        """Implements `Local.call`."""
        count = operation.count
        match operation.call, operation.form:
            case (("add" | "extend"), "arrays"):
                return self._write, [(batch,) for batch in self._kind.batches(count, ARRAYS)]
            case "sample", "arrays":
                return functools.partial(next, self._drawing(count)), [()]
            case "update", "index":
                keys = next(self._drawing(count)).info.key.numpy().tolist()
                return self._update, [(keys, raw) for raw in self.raw_priorities(count)]
            case "cycle", "index" | "arrays":
                drawing = self._drawing(count)
                return self._cycle, [(drawing, raw) for raw in self.raw_priorities(count)]
        return None

    def opener(self) -> Callable[[], Callable[[Any], object]]:
        """Implements `Local.opener`."""
        return functools.partial(_Writing, self._address())

    def close(self) -> None:
        """Implements `Library.close`."""
        self._draws.clear()
        if self._buffer is not None:
            self._write.close()
            self._buffer.stop()
        super().close()

    def _serve(self, checkpointer: Any) -> Any:
        table = reverb.Table(
            _TABLE,
            reverb.selectors.Prioritized(ALPHA)
            if self._prioritized
            else reverb.selectors.Uniform(),
            reverb.selectors.Fifo(),
            max_size=self._capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=_signature(self._kind),
        )
        return reverb.Server([table], checkpointer=checkpointer)

    def _address(self) -> str:
        return f"localhost:{self._buffer.port}"

    def _drawing(self, count: int) -> Any:
        if count not in self._draws:
            dataset = reverb.TimestepDataset.from_table_signature(
                self._address(), _TABLE, max_in_flight_samples_per_worker=2 * count
            )
            self._draws[count] = iter(dataset.batch(count))
        return self._draws[count]

    def _update(self, keys: list[int], raw: Any) -> None:
        updates = dict(zip(keys, raw.tolist(), strict=True))
        self._write.client.mutate_priorities(_TABLE, updates)

    def _cycle(self, drawing: Any, raw: Any) -> None:
        self._update(next(drawing).info.key.numpy().tolist(), raw)


class _Writing:
    """Writes the items of a batch one by one, until the server has received all of them."""

    def __init__(self, address: str) -> None:
        self.client = reverb.Client(address)
        self._writer = self.client.trajectory_writer(1)

    def __call__(self, batch: Arrays) -> None:
        writer = self._writer
        for at, priority in enumerate(batch["td_error"].tolist()):
            writer.append({name: leaf[at] for name, leaf in batch.items()})
            writer.create_item(
                _TABLE, priority, {name: kept[-1] for name, kept in writer.history.items()}
            )
        writer.flush()

    def close(self) -> None:
        self._writer.close()


def _signature(kind: Kind) -> dict[str, Any]:
    return {
        name: tf.TensorSpec(shape, tf.as_dtype(np.dtype(dtype)))
        for name, (dtype, shape) in kind.leaves.items()
    }


if __name__ == "__main__":
    serve(Reverb)
