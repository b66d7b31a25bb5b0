"""A buffer as a whole: counted, emptied, made durable, saved, left."""

from __future__ import annotations

import os
from typing import Any, Self

import torch

from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.storages.ring_storage import RingStorage
from shmbuffer.replay.writers import RoundRobinWriter


class Whole(Parts):
    """What is done to all items at once, or to the handle."""

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every item; the cursor goes to 0. The leaves stay known.

        Args:
            empty_write_count: set the write count to 0 too.
        """
        storage = self._storage
        rows = storage.rows if isinstance(storage, RingStorage) else None
        if rows is not None:
            rows.ring.empty(keep_write_count=not empty_write_count)
        elif not isinstance(storage, RingStorage):
            storage._empty()
        self._sampler._empty()
        storage.notify_emptied()
        if isinstance(self._writer, RoundRobinWriter):
            self._writer._empty(empty_write_count)
        else:
            self._writer._empty()

    def __len__(self) -> int:
        """Elements that are there."""
        return len(self._storage)

    def stats(self) -> dict[str, Any]:
        """One flat dict: TorchRL's keys, and what the engine counts."""
        storage = self._storage
        engine = storage._engine if isinstance(storage, RingStorage) else None
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
            "prefetch_queue_size": 0,
            "initialized": self.initialized,
        }

    def flush(self) -> None:
        """Make what is committed survive a power cut. Returns when it is on the disk.

        Raises:
            DurabilityError: the disk did not take it.
        """
        storage = self._storage
        if isinstance(storage, RingStorage) and storage._engine is not None:
            storage._engine.flush()

    def close(self) -> None:
        """Leave the buffer; what was committed stays in its directory. Idempotent."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything: items, priorities, cursor, counts, transforms, generator.

        In memory; tensors and numbers.
        """
        return {
            "_storage": self._storage.state_dict(),
            "_sampler": self._sampler.state_dict(),
            "_writer": self._writer.state_dict(),
            "_transforms": self._transform.state_dict(),
            "_batch_size": self._batch_size,
            "_rng": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there.

        Raises:
            SchemaMismatchError: the buffer's leaves are others.
            ValueError: it has another capacity.
        """
        self._storage.load_state_dict(state_dict["_storage"])
        self._writer.load_state_dict(state_dict["_writer"])
        self._sampler.load_state_dict(state_dict["_sampler"])
        self._transform.load_state_dict(state_dict["_transforms"])
        self._batch_size = state_dict["_batch_size"]
        if state_dict["_rng"] is not None:
            if self._generator is None:
                self.generator = torch.Generator()
            assert self._generator is not None
            self._generator.set_state(state_dict["_rng"])

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Not there yet: a `LazyMemmapStorage` with a ``scratch_dir`` is on disk all the time."""
        self._storage.dumps(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Not there yet."""
        self._storage.loads(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._join()
