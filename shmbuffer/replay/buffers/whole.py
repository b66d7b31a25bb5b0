"""A buffer as a whole: counted, emptied, made durable, saved, left."""

from __future__ import annotations

from typing import Any, Self

from shmbuffer.replay.buffers.saving import Saving
from shmbuffer.replay.eager import eager


class Whole(Saving):
    """What is done to all items at once, or to the handle."""

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every item; the cursor goes to 0.

        The next write may bring items of another form (keys, dtypes, shapes) if no other handle has
        the buffer: it defines them anew, here or in the process that the buffer is pickled to
        meanwhile. Where another process has it, the form stays.

        Args:
            empty_write_count: set the write count to 0 too.

        Raises:
            RuntimeError: the writer is an `ImmutableDatasetWriter`; nothing was changed.
        """
        self._drop_prefetched()
        storage = self._storage
        self._writer._empty(empty_write_count)  # first: it may refuse
        storage.forget(keep_write_count=not empty_write_count)
        self._sampler._empty()
        storage.notify_emptied()

    @eager
    def __len__(self) -> int:
        """Elements that are there."""
        return len(self._storage)

    def stats(self) -> dict[str, Any]:
        """One flat dict: TorchRL's keys, and what the engine counts."""
        if not self.initialized:  # to look at a buffer does not make its parts
            empty = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "utilization": 0.0}
            return {**empty, "capacity": self._planned_capacity, "initialized": False}
        storage = self._storage
        engine = storage.open_engine
        counted = {} if engine is None else engine.stats()
        one_moment = engine is not None and engine.shared  # size and counters of one snapshot
        size: int | float = counted["length"] if one_moment else len(storage)
        capacity = storage.max_size
        return {
            **counted,
            "size": size,
            "capacity": capacity,
            "utilization": size / capacity,
            "write_count": counted["write_count"] if one_moment else self.write_count,
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": self.initialized,
        }

    def flush(self) -> None:
        """Make what is committed survive a power cut. Returns when it is on the disk.

        Raises:
            DurabilityError: the disk did not take it.
        """
        engine = self._storage.open_engine
        if engine is not None:
            engine.flush()

    def close(self) -> None:
        """Leave the buffer; what was committed stays in its directory. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
