"""The storage for anything: Python objects in a list, of this process."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory import Engine, Schema, Settings
from shmbuffer.memory.growth import grow
from shmbuffer.replay.batches import collate, unbound
from shmbuffer.replay.checkpointers.list import ListStorageCheckpointer
from shmbuffer.replay.eager import eager
from shmbuffer.replay.nodes import is_collection
from shmbuffer.replay.storages.indexing import holds, select
from shmbuffer.replay.storages.list_places import places_of
from shmbuffer.replay.storages.placing import is_int
from shmbuffer.replay.storages.storage import Storage
from shmbuffer.replay.storages.tensor import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Moment, Ring

UNLIMITED: int = torch.iinfo(torch.int64).max
"""What ``max_size`` shows where there is no limit, as in TorchRL."""

_WHOLE = 2**20  # a ring of up to so many slots is made at once; others begin small and grow
_FIRST = 2**10


class Contents(NamedTuple):
    """Everything in a list storage, of one moment."""

    items: list[Any]
    """As they are kept, in storage order."""
    slots: NDArray[np.int64]
    """int64[n]: where each of them is."""
    moment: Moment
    """The ring: order, priorities, position and counts."""


class ListStorage(Storage):
    """Items as they are, in a list: any Python objects.

    A ring without leaves keeps their order and priorities, so that every sampler works here.

    Args:
        max_size: capacity; None is without a limit (`max_size` shows the largest int64 then).
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        device: where tensors in the items are sent when they are written; None leaves them where
            they are.

    Items stand without gaps at ``0 .. len - 1``. They are kept as they are, not copied: what is
    changed in one of them is changed in the storage, and rows of a batch keep the batch in memory.

    It cannot be passed to another process, and not be used in the child of a fork (RuntimeError).

    Cost: a list access an item; ``collate_fn`` (by default a stack) makes the batch. Growing to n
        items moves each of them a constant number of times.

    Example:
        >>> from shmbuffer import ListStorage
        >>> storage = ListStorage()
        >>> storage.set(range(2), ["a", {"b": 1}])
        >>> storage.get([1, 0])
        [{'b': 1}, 'a']

    Source: ``torchrl.data.ListStorage``.
    """

    lanes: tuple[int, ...] = ()
    _default_checkpointer = ListStorageCheckpointer

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(UNLIMITED if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        capacity = self._max_size if self._max_size <= _WHOLE else _FIRST
        self._engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
        self._ring: Ring = self._engine.define(Schema((), capacity, (), {"kind": "leaf"}))
        self._pid = os.getpid()
        self._items: list[Any] = []  # by slot
        # From claim to commit, and around a read: the list and the words belong together.
        self._claim = threading.RLock()
        self._table_owner: weakref.ref[Any] | None = None

    @property
    def ring(self) -> Ring:
        """The ring of the items. It is the same object also after it has grown.

        Raises:
            RuntimeError: in the child of a fork.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this {type(self).__name__} came through a fork, and its items belong to process "
                f"{self._pid}; {self._instead()}"
            )
        return self._ring

    # -- writing -------------------------------------------------------------------------------

    @eager
    def append(self, data: Any, single: bool = False) -> tuple[int, int]:
        """Write behind what was written last: one item, or all of a list or batch.

        Args:
            data: one item where ``single``; else a list or other iterable of items, a tensor, array
                or TensorDict that is taken apart along its first dimension.
            single: see there.

        Returns:
            The slot of the first, and how many.

        Raises:
            TypeError: a PyTree, which has no items of its own; nothing was changed.
        """
        items = [self._keep(item) for item in ([data] if single else unbound(data))]
        with self._claim:
            ring, count = self.ring, len(items)
            if ring.capacity < self._max_size:
                self._reach(ring.cursor + count + 1)  # never round, as long as there is room
            first = ring.cursor
            for start in range(0, count, ring.capacity):
                part = items[start : start + ring.capacity]
                ticket = ring.claim(len(part))
                self._fill((ticket + np.arange(len(part))) % ring.capacity, part)
        if self._watchers and items:
            self.notify(self.written(first, count))
        return first, count

    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """The index that a write returns, from what `append` gave: int64 ``[count]``, or an int."""
        if single:
            return first
        index = np.arange(first, first + count, dtype=np.int64)
        return torch.from_numpy(index if self._max_size == UNLIMITED else index % self._max_size)

    @eager
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put one item at an int, or several at a sequence of ints.

        Args:
            cursor: int (negative from the end), slice, range, list, array or tensor of ints or of
                booleans. An index named twice: the last wins.
            data: one item; or items as `append` takes them, or a tuple of them.
            set_cursor: accepted as in TorchRL; the ring's own position never moves here.

        Raises:
            RuntimeError: a place behind the first free one, or beyond the capacity.
            ValueError: another number of items than places.
            TypeError: a dict, which has no items of its own.

        Nothing is changed then.
        """
        self.put(cursor, data, in_place=False)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """`set`, and with ``in_place`` a change of the items that are there."""
        single = is_int(cursor)
        is_sequence = type(data) is tuple and not single
        items = [data] if single else list(data) if is_sequence else unbound(data)
        items = [self._keep(item) for item in items]
        with self._claim:
            slots = places_of(cursor, len(items), len(self), self._max_size)
            kept = dict(zip(slots, items, strict=True))  # the last wins
            if not kept:
                return
            self._reach(max(kept) + 1)
            unique = np.array(list(kept), dtype=np.int64)
            present = holds(self.ring, unique)
            for which, keeps in ((present, in_place), (~present, False)):
                if which.any():
                    part = unique[which]
                    self.ring.claim_slots(part, in_place=keeps)
                    self._fill(part, [kept[slot] for slot in part.tolist()])
        if self._watchers and not in_place:
            self.notify(torch.from_numpy(unique))

    def _reach(self, end: int) -> None:
        """Have slots up to ``end``, as far as the storage goes; while holding the claim."""
        capacity = self.ring.capacity
        if end > capacity and capacity < self._max_size:
            wanted = max(2 * capacity, 1 << (end - 1).bit_length())
            self._engine = grow(self._engine, min(wanted, self._max_size))

    def _fill(self, slots: NDArray[np.int64], items: list[Any]) -> None:
        """Put items into slots that are claimed, and commit."""
        missing = int(slots.max()) + 1 - len(self._items)
        self._items.extend([None] * missing)
        for slot, item in zip(slots.tolist(), items, strict=True):
            self._items[slot] = item
        self._ring.commit()

    def _keep(self, item: Any) -> Any:
        """What is kept of an item."""
        return item if self.device is None else to_device(item, self.device)

    # -- reading -------------------------------------------------------------------------------

    @eager
    def get(self, index: Any) -> Any:
        """The item at an int; a list of items at anything else.

        Args:
            index: int, slice, range, list, array or tensor of ints or booleans, in one dimension;
                or a tuple with one of them. A mask has the length of the storage.

        Raises:
            IndexError: a place without an item. A slice leaves such places out.
            RuntimeError: more than one dimension.
        """
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        with self._claim:
            selection = None if isinstance(index, tuple) else select(index, self.ring, ())
            if selection is None or len(selection.lead) > 1:
                raise RuntimeError(f"a {type(self).__name__} has one dimension, got {index!r}")
            kept = [self._items[at] for at in selection.elements.tolist()]
        items = [self._give(one) for one in kept]
        return items if selection.lead else items[0]

    def _give(self, kept: Any) -> Any:
        """The item, from what is kept of it."""
        return kept

    def collate(self, items: Any) -> Any:
        """A batch from what `get` gives for several; see `shmbuffer.replay.batches.collate`."""
        return collate(items)

    def contains(self, item: Any) -> Any:
        """Whether there is an item at ``item``.

        Args:
            item: int (negative from the end); or a tensor of them.

        Returns:
            bool; for a tensor one for each, of its shape.

        Raises:
            TypeError: something else: it is places that are looked for, not items.
        """
        if isinstance(item, torch.Tensor) and item.dim():
            there = [self.contains(one) for one in item.reshape(-1).tolist()]
            return torch.tensor(there, dtype=torch.bool, device=item.device).view(item.shape)
        if not is_int(item):
            raise TypeError(
                f"a {type(self).__name__} contains places, ints or a tensor of them, got {item!r}"
            )
        slot, ring = int(item), self.ring
        if slot < 0:
            slot += len(self)
        return 0 <= slot < ring.capacity and bool(holds(ring, np.array([slot]))[0])

    # -- the rest ------------------------------------------------------------------------------

    def copy_out(self) -> Contents:
        """Everything in here, of one moment. The items themselves, not copies."""
        with self._claim:
            moment = self.ring.copy_out(())
            slots = np.nonzero(moment.tickets >= 0)[0]
            return Contents([self._items[slot] for slot in slots.tolist()], slots, moment)

    def copy_in(
        self,
        items: list[Any],
        slots: NDArray[np.int64],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """Replace everything in here.

        Args:
            items: as they are kept; see `copy_out`.
            slots: int64 ``[n]``: where each of them goes.
            cursor: slot of the next item.
            write_count: items written so far.
            priorities: raw, float64 ``[n]``; NaN, or None, is the default priority.
            max_priority: the largest raw priority ever given; None: none yet.

        Raises:
            IndexError: there is no room for them; nothing was changed.
        """
        if len(slots) and int(slots.max()) >= self._max_size:
            raise IndexError(
                f"{len(items)} items cannot be loaded into a {type(self).__name__} of max_size "
                f"{self._max_size}"
            )
        with self._claim:
            ring = self.ring
            self._reach(max([cursor, *slots.tolist()]) + 1)
            ring.empty()
            self._items = []
            if len(slots):
                ring.claim_slots(slots, in_place=False)
                self._fill(slots, items)
            ring.restore(cursor % ring.capacity, write_count, max_priority)
            if priorities is not None:
                known = ~np.isnan(priorities)
                ring.update(slots[known], np.ascontiguousarray(priorities[known]))

    def state_dict(self) -> dict[str, Any]:
        """The items (not copies), where they are, and the size of the ring."""
        contents = self.copy_out()
        capacity = len(contents.moment.tickets)
        return {
            "_list": [self._saved(kept) for kept in contents.items],
            "_index": torch.from_numpy(contents.slots),
            "_cursor": contents.moment.head % capacity,
            "_capacity": capacity,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there. Tensors in the items are copied.

        A full ring that is loaded where there is more room goes on behind its last item.

        Raises:
            IndexError: it has more items than there is room for; nothing was changed.
        """
        items, slots = state_dict["_list"], state_dict["_index"].numpy()
        cursor, capacity = int(state_dict["_cursor"]), int(state_dict["_capacity"])
        if len(items) == capacity < self._max_size:
            cursor = capacity
        with self._claim:
            if self._max_size > _WHOLE:
                self._reach(min(capacity, self._max_size))
            kept = [self._loaded(item) for item in items]
            self.copy_in(kept, slots, cursor=cursor, write_count=len(items))

    def _saved(self, kept: Any) -> Any:
        """What a state has of an item."""
        return kept

    def _loaded(self, saved: Any) -> Any:
        """What is kept of an item of a state."""
        return self._keep(_cloned(saved))

    def close(self) -> None:
        """Drop the items."""
        self._engine.close()
        self._items = []

    def _empty(self, keep_write_count: bool = False) -> None:
        with self._claim:
            self.ring.empty(keep_write_count=keep_write_count)
            self._items = []

    @eager
    def __len__(self) -> int:
        """Items that are there."""
        return self.ring.length

    def __repr__(self) -> str:
        limit = "None" if self._max_size == UNLIMITED else self._max_size
        return f"{type(self).__name__}(max_size={limit}, len={len(self)})"

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            f"a {type(self).__name__} holds objects of this process and cannot be passed to "
            f"another one; {self._instead()}, or save it with state_dict() or dumps()"
        )

    @staticmethod
    def _instead() -> str:
        return (
            "use a LazyMemmapStorage with a scratch_dir and shared_init=True, or a "
            "LazyTensorStorage, for tensors that processes share"
        )


def _cloned(item: Any) -> Any:
    """An item whose tensors are copies."""
    if isinstance(item, torch.Tensor) or is_collection(item):
        return item.clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if type(item) is dict:
        return {key: _cloned(value) for key, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(_cloned(value) for value in item)
    return item
