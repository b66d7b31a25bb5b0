"""Writer that fills a storage as a ring, so that new items replace the oldest ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from shmbuffer.items.indices import unravel
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.samplers.sampler import lanes_of
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.torchrl.compat.writer_files import CURSOR
from shmbuffer.writers.writer import Writer


class RoundRobinWriter(Writer):
    """Writer that writes at the cursor, and continues at slot 0 after the end of the storage.

    The storages of this package contain the cursor and the write count, which all writers in all
    processes share. With a custom storage, the writer itself contains both.

    Args:
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        track_generations: if True, samples have the entry ``index_generation``, which is the
            ticket of the item's write, even if the buffer is not shared.

    Source: ``torchrl.data.RoundRobinWriter``.
    """

    _state_keys = ("_cursor", "_write_count")
    _torchrl_files = CURSOR

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable)
        self.track_generations = track_generations
        self._own_cursor = 0
        self._own_count = 0
        self._count_offset = 0  # loaded write count minus that of the ring

    @eager
    def add(self, data: Any) -> int | torch.Tensor:
        """Writes one item ``[*lanes, ...]``.

        Returns its index, or an int64 tensor ``[lanes, ndim]`` if the storage has lanes.
        """
        return self._write(data, True)  # type: ignore[no-any-return]

    @eager
    def extend(self, data: Any) -> torch.Tensor:
        """Writes a batch.

        Returns the indices, int64 ``[n]``, or ``[n * lanes, ndim]`` if the storage has lanes.
        """
        return self._write(data, False)  # type: ignore[no-any-return]

    def _write(self, data: Any, single: bool) -> Any:
        storage = self._storage
        if hasattr(storage, "append"):
            first, count = storage.append(data, single)
            return storage.written(first, count, single=single)
        start, count = self._own_cursor, 1 if single else length_of(data)
        index = start if single else (start + cpu.arange(count)) % storage.max_size
        if count:
            storage.set(index, data)
        self._own_cursor = (start + count) % storage.max_size
        self._own_count += count
        return index

    def write_at(self, index: Any, data: Any) -> Any:
        """Writes new items to the slots ``index``, ``[n]`` or an int, without moving the cursor.

        Returns:
            The slots, or an int64 tensor ``[n * lanes, ndim]`` if the storage has lanes.
        """
        storage = self._storage
        slots = index if isinstance(index, int) else cpu.as_tensor(index)
        storage.set(slots, data)
        places = cpu.as_tensor(slots).reshape(-1)
        self._own_count += len(places)
        lanes = lanes_of(storage)
        if not lanes:
            return slots
        width = math.prod(lanes)
        elements = places[:, None] * width + cpu.arange(width)
        return torch.stack(unravel(elements.reshape(-1), lanes), -1)

    @property
    def tracks_generations(self) -> bool:
        """True if samples have the entry ``index_generation``."""
        return self.track_generations or super().tracks_generations

    @property
    def _ring(self) -> Ring | None:
        return ring_of(self._storage)

    @property
    def _cursor(self) -> int:
        ring = self._ring
        return self._own_cursor if ring is None else int(ring.head % ring.capacity)

    @property
    def write_count(self) -> int:
        """Number of elements that all processes have written so far."""
        ring = self._ring
        return self._own_count if ring is None else int(ring.write_count) + self._count_offset

    _write_count = write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        self._own_cursor = 0
        if empty_write_count:
            self._own_count = self._count_offset = 0

    def __repr__(self) -> str:
        storage = self._storage
        full = storage is not None and len(storage) == storage.max_size
        return f"{type(self).__name__}(cursor={self._cursor}, full_storage={full})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor and the write count."""
        return {"_cursor": self._cursor, "_write_count": self.write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`. The items must be loaded first."""
        ring = self._ring
        self._own_cursor = int(state_dict["_cursor"])
        self._own_count = int(state_dict["_write_count"])
        if ring is not None and ring.seat.is_alone():
            ring.restore(self._own_cursor % ring.capacity, self._own_count, ring.tree.max_priority)
        if ring is not None:
            self._count_offset = self._own_count - int(ring.write_count)

    def _saved(self, moment: Any, folder: Path) -> dict[str, Any]:
        if not isinstance(moment, ItemSnapshot):
            return self.state_dict()
        count = moment.write_count + self._count_offset
        return {"_cursor": moment.head % len(moment.tickets), "_write_count": count}

    def _of_saved(self, saved: Any, folder: Path) -> dict[str, int]:
        state = super()._of_saved(saved, folder)
        return {key: int(state[key]) for key in self._state_keys}

    def _apply(self, saved: dict[str, int], loaded: Loaded | None) -> None:
        if self._ring is None or loaded is None:
            self.load_state_dict(saved)
        else:
            self._count_offset = 0  # the storage has restored the write count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}  # the unpickled buffer registers it again


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` for TensorDicts.

    Unlike the class in TorchRL, it does not store an entry ``"index"``.

    Source: ``torchrl.data.TensorDictRoundRobinWriter``.
    """


def length_of(data: Any) -> int:
    """Returns the number of items in a batch."""
    if is_collection(data):
        return int(data.batch_size[0])
    if isinstance(data, dict):
        return length_of(next(iter(data.values())))
    if isinstance(data, (list, tuple)):
        return length_of(data[0]) if isinstance(data, tuple) else len(data)
    return len(data)
