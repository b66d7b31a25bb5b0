"""Writer that keeps the items with the highest ranks. A better item replaces the worst one.

    storage is not full  ──▶  the item is written to the next free slot
    storage is full      ──▶  if its rank is above the lowest rank, the item replaces that item
                         └─▶  otherwise the item is rejected

A heap contains the ranks of the stored items, lowest first. The heap is a cache. It is rebuilt from
the items after other code has written to, emptied or loaded the storage.
"""

from __future__ import annotations

import heapq
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch

from shmbuffer.memory.format.leaf import Key
from shmbuffer.memory.mapped.recorded import REDUCTIONS
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.writer_files import RANKS
from shmbuffer.writers.ranks import Rank, rank_of, ranks_of
from shmbuffer.writers.writer import Writer


class TensorDictMaxValueWriter(Writer):
    """Writer that keeps the items with the highest ranks, as many as the storage can hold.

    If the storage is full, an item is rejected unless its rank is above the lowest stored rank.
    Otherwise it replaces the item with the lowest rank. If several items have this rank, the one
    with the smallest index is replaced. The items of a batch are compared in order, and then all
    accepted items are written together. An item can be a complete trajectory ``[T]`` with a single
    rank.

    The existing items of a storage, such as a `TensorStorage`, are also ranked. `rb[i] = ...`
    changes an item but not its rank. The ranks are private to this process. Therefore the writer
    cannot be pickled, and raises RuntimeError if other processes can write to the storage. For such
    storages, use a `RoundRobinWriter`.

    Args:
        rank_key: key of the rank. None stands for ``("next", "reward")``.
        reduction: how several values of an item are reduced to its rank: ``"max"``, ``"min"``,
            ``"mean"``, ``"median"`` (the lower of two middle values) or ``"sum"``.
        compilable: has no effect, because `torch.compile` never compiles the native calls.

    Raises:
        ValueError: ``reduction`` is unknown, or the storage has more than one dimension.

    Cost: one comparison per rejected item, O(log capacity) per accepted item, and one write per
        batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, TensorDictMaxValueWriter
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> writer = TensorDictMaxValueWriter(rank_key="score")
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=writer)
        >>> rb.extend(TensorDict({"score": torch.tensor([3.0, 1.0, 2.0])}, [3]))
        tensor([ 0, -1,  1])
        >>> rb[:]["score"]
        tensor([3., 2.])

    Source: ``torchrl.data.TensorDictMaxValueWriter``.
    """

    _state_keys = ("_current_top_values", "_cursor", "_write_count")
    _torchrl_files = RANKS

    def __init__(
        self, rank_key: Key | None = None, reduction: str = "sum", *, compilable: bool = False
    ) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        super().__init__(compilable)
        self._rank_key: Key = ("next", "reward") if rank_key is None else rank_key
        self._reduction = reduction
        self._current_top_values: list[tuple[Rank, int]] = []  # a heap of (rank, index)
        self._cursor = 0  # slot where the search for a free slot starts
        self._count = 0
        # State of the storage after this writer's last write (`_state_of`).
        self._known_state: tuple[int, ...] | None = None

    @property
    def rank_key(self) -> Key:
        """Key of the rank."""
        return self._rank_key

    @property
    def reduction(self) -> str:
        """How several values of an item are reduced to its rank."""
        return self._reduction

    @property
    def write_count(self) -> int:
        """Number of items accepted so far, including those that were replaced later."""
        return self._count

    _write_count = write_count

    def register_storage(self, storage: Any) -> None:
        """Sets the storage to write to.

        Raises:
            RuntimeError: the storage was created to be shared.
            ValueError: the storage has more than one dimension.
        """
        if getattr(storage, "ndim", 1) > 1:
            raise ValueError(
                "TensorDictMaxValueWriter needs a storage with ndim=1, but this one has "
                f"ndim={storage.ndim}: the steps of a trajectory cannot be ranked separately. "
                "Store trajectories as items, with ndim=1 and batches of shape [n, T]"
            )
        location = getattr(storage, "_location", None)
        if location is not None and location.shared_init:
            raise RuntimeError(_shared("the storage was created to be shared"))
        if storage is not self._storage:
            self._known_state = None
        super().register_storage(storage)

    def add(self, data: Any) -> int | None:
        """Writes one TensorDict of any batch size. Returns its index, or None if it is rejected.

        Raises:
            RuntimeError: ``data`` is not a TensorDict, or other processes have the storage open.
            KeyError: ``data`` has no entry ``rank_key``.
            ValueError: the rank is NaN. Nothing was changed.
        """
        with self._lock:
            index = self.get_insert_index(data)
            if index is not None:
                self._write(index, data)
                self._count += 1
        return index

    def extend(self, data: Any) -> torch.Tensor:
        """Writes a batch ``[n, ...]``, a TensorDict or a list of TensorDicts.

        Raises the errors of `add`.

        Returns:
            The index of each item, int64 ``[n]``. It is -1 if the item was rejected, or was
                replaced by a better item of the same batch.
        """
        ranks = ranks_of(data, self._rank_key, self._reduction)
        index = cpu.full((len(ranks),), -1, dtype=torch.int64)
        with self._lock:
            self._prepare_write()
            accepted, row_at = 0, {}  # `row_at` contains the last row accepted for each slot
            heap, free = self._current_top_values, self._count_free()
            for row, rank in enumerate(ranks):
                if not free and rank <= heap[0][0]:
                    continue
                accepted += 1
                row_at[self._reserve_slot(rank)] = row
                free = max(0, free - 1)
            if row_at:
                slots = cpu.tensor(list(row_at), dtype=torch.int64)
                rows = cpu.tensor(list(row_at.values()), dtype=torch.int64)
                index[rows] = slots
                chosen = [data[row] for row in rows] if isinstance(data, list) else data[rows]
                self._write(slots, chosen)
            self._count += accepted
        return index

    def get_insert_index(self, data: Any) -> int | None:
        """Reserves a slot for one item, which the caller must write.

        Returns None if the item is rejected.
        """
        rank = rank_of(data, self._rank_key, self._reduction)
        with self._lock:
            self._prepare_write()
            if not self._count_free() and rank <= self._current_top_values[0][0]:
                return None
            return self._reserve_slot(rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns the ranks with their indices, the cursor and the write count."""
        with self._lock:
            if self._storage is not None:
                self._update_ranks()
            return {
                "_current_top_values": list(self._current_top_values),
                "_cursor": self._cursor,
                "_write_count": self._count,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`. The items must be loaded first."""
        top = [(rank, int(index)) for rank, index in state_dict["_current_top_values"]]
        with self._lock:
            heapq.heapify(top)
            self._current_top_values = top
            self._cursor = int(state_dict["_cursor"])
            self._count = int(state_dict["_write_count"])
            self._known_state = None if self._storage is None else _state_of(self._storage)

    def _saved(self, moment: Any, folder: Path) -> dict[str, Any]:
        return {**self.state_dict(), "_rank_key": self._rank_key, "_reduction": self._reduction}

    def _apply(self, saved: dict[str, Any], loaded: Loaded | None) -> None:
        self._rank_key = saved["_rank_key"]
        self._reduction = saved.get("_reduction", self._reduction)
        top = saved["_current_top_values"]
        if loaded is not None:
            top = [(rank, loaded.places(index)) for rank, index in top]
        self.load_state_dict({**saved, "_current_top_values": top})

    # -- inside --------------------------------------------------------------------------------

    def _reserve_slot(self, rank: Rank) -> int:
        """Adds an accepted rank to the heap, and returns the slot for its item."""
        heap = self._current_top_values
        if not self._count_free():
            return heapq.heapreplace(heap, (rank, heap[0][1]))[1]
        capacity = self._storage.max_size
        while self._storage.contains(self._cursor):
            self._cursor = (self._cursor + 1) % capacity
        slot: int = self._cursor
        self._cursor = (slot + 1) % capacity
        heapq.heappush(heap, (rank, slot))
        return slot

    def _count_free(self) -> int:
        capacity: int = self._storage.max_size
        return max(0, capacity - len(self._current_top_values))

    def _write(self, index: int | torch.Tensor, data: Any) -> None:
        try:
            self._storage.set(index, data)
        except BaseException:
            self._known_state = None  # causes the heap to be rebuilt
            raise
        self._known_state = _state_of(self._storage)

    def _prepare_write(self) -> None:
        """Prepares a write: checks that it is allowed, and updates the ranks.

        Raises:
            RuntimeError: the writer has no storage, or another client has it open.
        """
        storage = self._storage
        if storage is None:
            raise RuntimeError(
                "this TensorDictMaxValueWriter has no storage; pass it to a buffer, or call "
                "register_storage() first"
            )
        if getattr(storage, "shared", False) and _is_open_elsewhere(storage):
            raise RuntimeError(_shared("another client has the storage open"))
        self._update_ranks()

    def _update_ranks(self) -> None:
        """Rebuilds the heap if other code has changed the storage."""
        storage = self._storage
        seen = _state_of(storage)
        if seen == self._known_state:
            return
        ring = ring_of(storage)
        if ring is None:
            present = list(range(len(storage)))
            items: Any = present
        else:
            present, items = ring.live.committed().tolist(), slice(None)  # a slice returns views
        ranks = ranks_of(storage.get(items), self._rank_key, self._reduction) if present else []
        self._current_top_values = list(zip(ranks, present, strict=True))
        heapq.heapify(self._current_top_values)
        self._cursor = len(present) % storage.max_size
        self._known_state = seen

    def _in_child(self, abandoned: bool) -> None:
        if abandoned:
            self._known_state = None

    _lock = ForkLock(_in_child)  # held while ranks and items are changed together

    def _empty(self, empty_write_count: bool = True) -> None:
        with self._lock:
            self._current_top_values = []
            self._cursor = 0
            self._known_state = None
            if empty_write_count:
                self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        if self._storage is not None and (
            self._current_top_values or get_spawning_popen() is not None
        ):
            raise RuntimeError(_shared("it cannot be sent to another process"))
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank_key={self._rank_key!r}, reduction={self._reduction!r}, "
            f"items={len(self._current_top_values)})"
        )


def _state_of(storage: Any) -> tuple[int, ...]:
    """Returns the state of the storage: numbers that change when it is written or emptied."""
    ring = ring_of(storage)
    if ring is None:
        return (len(storage),)
    return (ring.head, ring.write_count, ring.length)


def _is_open_elsewhere(storage: Any) -> bool:
    engine = getattr(storage, "open_engine", None)
    return engine is not None and len(engine.seat.registry.alive()) > 1


def _shared(what: str) -> str:
    return (
        f"a TensorDictMaxValueWriter keeps its ranks in one process, but {what}. Use a "
        "RoundRobinWriter if several processes write"
    )
