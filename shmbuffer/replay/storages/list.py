"""The storage for anything: Python objects in a list, of this process."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.memory import Engine, Schema, Settings
from shmbuffer.replay.storages.indexing import select
from shmbuffer.replay.storages.storage import Storage
from shmbuffer.replay.storages.tensor import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


class ListStorage(Storage):
    """Items as they are, in a list.

    A ring without leaves keeps their order, tickets and priorities.

    Args:
        max_size: capacity. None (without a limit) is not there yet.
        compilable: not there yet; has to be False.
        device: where items are sent when they are read; None leaves them where they are.

    It cannot be passed to another process (RuntimeError).

    Cost: a list access an item; ``collate_fn`` (by default a stack) makes the batch.

    Example:
        >>> from shmbuffer import ListStorage
        >>> storage = ListStorage(10)
        >>> storage.set(range(2), ["a", "b"])
        >>> storage.get([1, 0])
        ['b', 'a']

    Source: ``torchrl.data.ListStorage``.
    """

    lanes: tuple[int, ...] = ()

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if max_size is None:
            raise NotImplementedError(
                "a ListStorage without a limit comes in a later release; give max_size"
            )
        super().__init__(max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._engine = Engine.anonymous(
            Settings(capacity=self._max_size, checksum=False, reserve=False)
        )
        self.ring: Ring = self._engine.define(Schema((), self._max_size, (), {"kind": "leaf"}))
        self._items: list[Any] = [None] * self._max_size
        self._claim = (
            threading.RLock()
        )  # from claim to commit, and around a read: items are not copied
        self._table_owner: weakref.ref[Any] | None = None

    def append(
        self, data: Any, single: bool = False, priorities: NDArray[np.float64] | None = None
    ) -> tuple[int, int]:
        """Write at the ring's head: one item, or all of a list or batch.

        First ticket, and how many.
        """
        items = [data] if single else unbound(data)
        capacity = self._max_size
        first = self.ring.head
        with self._claim:
            for start in range(0, len(items), capacity):
                part = items[start : start + capacity]
                ticket = self.ring.claim(len(part))
                first = ticket if start == 0 else first
                given = None if priorities is None else priorities[start : start + capacity]
                self._fill((ticket + np.arange(len(part))) % capacity, part, given)
        if self._watchers and items:
            self.notify(self.written(first, len(items)))
        return first, len(items)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put one item at an int, or a list or batch of them at a sequence of ints.

        Raises:
            IndexError: beyond the capacity.
            ValueError: another number of items than places.
        """
        self.put(cursor, data, in_place=False)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """`set`, and with ``in_place`` a change of what is there."""
        single = isinstance(cursor, (int, np.integer))
        if isinstance(cursor, slice):
            cursor = select(cursor, self.ring, ()).elements
        slots = np.array([cursor] if single else list(cursor), dtype=np.int64)
        items = [data] if single else unbound(data)
        if len(items) != len(slots):
            raise ValueError(f"{len(items)} items cannot be written to {len(slots)} places")
        if ((slots < 0) | (slots >= self._max_size)).any():
            raise IndexError(f"{cursor!r} is out of range for {self._max_size} items")
        unique = dict(zip(slots.tolist(), items, strict=True))  # the last wins
        places = np.array(list(unique), dtype=np.int64)
        if len(places):
            with self._claim:
                self.ring.claim_slots(places, in_place=in_place)
                self._fill(places, list(unique.values()), None)
            if self._watchers and not in_place:
                self.notify(torch.from_numpy(places))

    def get(self, index: Any) -> Any:
        """The item at an int; a list of items at anything else.

        Raises:
            IndexError: a place without an item.
        """
        with self._claim:
            selection = select(index, self.ring, ())
            items = [self._items[at] for at in selection.elements]
        if self.device is not None:
            items = [to_device(item, self.device) for item in items]
        return items if selection.lead else items[0]

    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """The index that a write returns, from what `append` gave: int64 ``[count]``, or an int."""
        if single:
            return first % self._max_size
        return torch.from_numpy((first + np.arange(count, dtype=np.int64)) % self._max_size)

    def contains(self, index: int) -> bool:
        """Whether there is an item at ``index``."""
        return 0 <= index < self._max_size and bool((self.ring.words[index] & 3) == 2)  # COMMITTED

    def close(self) -> None:
        """Drop the items."""
        self._engine.close()
        self._items = []

    def state_dict(self) -> dict[str, Any]:
        """The items, and where they are."""
        committed = self.ring.committed()
        return {
            "_list": [self._items[at] for at in committed],
            "_index": torch.from_numpy(committed),
            "_cursor": self.ring.head % self._max_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there.

        Raises:
            IndexError: it has more items than there is room for.
        """
        self._empty()
        if cursor := int(state_dict["_cursor"]):
            self.ring.claim(cursor)  # moves the ring's position, and commits nothing
            self.ring.abort()
        self.set(state_dict["_index"].tolist(), state_dict["_list"])

    def _fill(
        self, slots: NDArray[np.int64], items: list[Any], priorities: NDArray[np.float64] | None
    ) -> None:
        for slot, item in zip(slots.tolist(), items, strict=True):
            self._items[slot] = item
        self.ring.commit(priorities)

    def _empty(self) -> None:
        with self._claim:
            self.ring.empty()
            self._items = [None] * self._max_size

    def __len__(self) -> int:
        return self.ring.length

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            "a ListStorage holds objects of this process and cannot be passed to another one; use "
            "a LazyMemmapStorage, or LazyTensorStorage for tensors"
        )


def unbound(data: Any) -> list[Any]:
    """The items of a list, or of a TensorDict or tensor along its first dimension.

    Raises:
        TypeError: a PyTree, which has no items of its own.
    """
    if isinstance(data, (list, np.ndarray)):
        return list(data)
    unbind: Callable[[int], Any] | None = getattr(data, "unbind", None)
    if unbind is None:
        raise TypeError(
            "a ListStorage takes a list of items, a tensor or a TensorDict, "
            f"got {type(data).__name__}"
        )
    return list(unbind(0))
