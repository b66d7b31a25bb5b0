"""Index of a storage's items by label, which is updated after writes.

    ring ──▶ Follower           items committed or removed since the last update of this process
                 └──▶ labels_of     the label entry of the new items
                          └──▶ Labels   items of each label, oldest first

Each process has its own index, and writers continue during an update. The tickets of their new
items are at least as large as the head that the update has read. A draw compares the tickets of its
items with this head. If all tickets are smaller, the items have not changed since the update.

If a slot is being written during an update, its item is treated as temporarily absent, and its
group is kept but not sampled. If the write changes the same item in place, the group is complete
again after the write.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.indices import elements_of
from shmbuffer.memory import Ring
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers.item_entries import Column, ForeignItems, as_column, columns_of, labels_of
from shmbuffer.samplers.passes import wait_for_items
from shmbuffer.samplers.sampler import NOTHING_THERE
from shmbuffer.storages.storage import ring_of

_PIECE = 2**15  # maximum number of items that are read together


class LabelIndex:
    """Index of the items in one storage by label.

    Args:
        path: path of the entry that contains the label.
        to_labels: function that converts entries to 64-bit labels.
        value: path of an entry whose mean is kept for each item, such as the reward, or None.
        limit: number of items in a group, or 0 for no limit.
        by_age: if True, groups are numbered by the age of their first item.
        trim: None, or a function that is called after each update. Its argument is a function that
            returns the labels in use.

    Attributes:
        limit: the argument ``limit``.
        table: the items of each label. The caller must hold `lock` while using the table.
        values: mean of the entry ``value`` for each element, float64 ``[elements]``, or None.
        head: head of the ring at the last update. Items whose tickets are at least ``head`` are not
            included.
        is_claimed: True if the table excludes items that other learners have claimed.

    Cost: the first update reads every slot, which takes 100 ms per million slots. Later updates
        read only new and removed items. The index takes 12 to 16 bytes of memory per item, and 80
        bytes per label.
    """

    def __init__(
        self,
        path: KeyPath,
        to_labels: Callable[[Column], Ints],
        *,
        value: KeyPath | None = None,
        limit: int = 0,
        by_age: bool = False,
        trim: Callable[[Callable[[], Ints]], None] | None = None,
    ) -> None:
        self._paths = (path,) if value is None else (path, value)
        self._to_labels = to_labels
        self.limit, self._by_age, self._trim = limit, by_age, trim
        self.is_claimed = False
        self.forget()

    def forget(self) -> None:
        """Discards the index. The next update reads every item."""
        self._storage: weakref.ref[Any] | None = None
        self._native: Any = None
        self._mover: Any = None
        self._columns_mover: Any = None  # mover from which `_columns` was determined
        self._follower: Any = None
        self.table: Any = None
        self.values: Floats | None = None
        self.head = 0
        self._columns: tuple[Any, ...] | None = None
        self._piece_arrays = np.empty((2, 0), np.int64)

    #: Must be held while the table is used, because another thread could update the table.
    lock = ForkLock(lambda index, _: index.forget())

    def __getstate__(self) -> dict[str, Any]:
        copy = LabelIndex.__new__(LabelIndex)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.pop("lock", None)
        copy.forget()
        return copy.__dict__

    # -- looking -------------------------------------------------------------------------------

    def update(self, storage: Any) -> Ring | None:
        """Adds new items to the table, and removes overwritten items. The caller must hold `lock`.

        Returns:
            The ring of the storage, or None if the storage has no ring.

        Raises:
            EmptyBufferError: the storage is empty.
            KeyError: an item lacks the entry with the label or the value.
            ValueError: the group size is larger than the storage.
        """
        ring: Ring | None = ring_of(storage)
        if ring is None:
            self._read_foreign(storage)
            return None
        if self.limit > ring.elements:
            raise ValueError(
                f"a storage of {ring.elements} items is too small for a group of "
                f"group_size={self.limit}"
            )
        if not ring.length and not self.is_claimed:
            wait_for_items(storage, ring, NOTHING_THERE)
        native = ring.seat.native
        if native is not self._native or self._storage is None or self._storage() is not storage:
            self.forget()
            self._begin(ring.elements)
            self._native, self._storage = native, weakref.ref(storage)
            self._follower = _core.Follower(native)
        self._mover = mover = storage.mover()
        if mover is not self._columns_mover and ring.length:
            self._columns_mover = mover
            self._columns = columns_of(mover, self._paths, self.values)
        try:
            self._catch_up(ring)
        except BaseException:
            self._follower.forget()
            raise
        if self._trim is not None:
            self._trim(lambda: self.labels(ring.live.committed_slots()))
        if not self.table.items and not self.is_claimed:
            raise EmptyBufferError(NOTHING_THERE)
        return ring

    def _begin(self, elements: int) -> None:
        self.table = _core.Labels(max(1, elements), self.limit, self._by_age)
        if self.is_claimed:
            self.table.record_lost()  # before the first update, so that no lost item is missed
        self.values = np.zeros(elements) if len(self._paths) > 1 else None

    def _read_foreign(self, storage: Any) -> None:
        """Rebuilds the table from all items in a storage that does not belong to this package."""
        count = len(storage)
        if not count:
            raise EmptyBufferError(NOTHING_THERE)
        if self.table is None or self._storage is None or self._storage() is not storage:
            self.forget()
            self._storage = weakref.ref(storage)
        self._begin(count)
        values, _ = ForeignItems(storage).entries(np.arange(count), self._paths)
        found = [as_column(each, path) for each, path in zip(values, self._paths, strict=True)]
        self._put(np.arange(count), found, np.arange(count), 0)
        self.table.settle(None)

    def _catch_up(self, ring: Ring) -> None:
        """Updates the table. After a complete rebuild, a second update adds the newest items."""
        columns = self._columns
        if columns is not None:
            now = time.monotonic_ns() if self.limit else 0
            head = self.table.follow(self._follower, *columns, now)
            if head is not None:
                self.head = head
                return
            self._columns = None  # the core cannot read this entry, so Python reads it from now on
        while self._update_once(ring):
            pass

    def _update_once(self, ring: Ring) -> bool:
        """Processes the result of one poll of the follower.

        Returns True if all items were read. This takes so long that newer items have probably been
        written in the meantime.
        """
        follower, table = self._follower, self.table
        before = follower.seen
        seen = follower.poll()
        if seen is None:
            table.settle(follower)
            return False
        restarted, gone, changed = seen
        if restarted:
            table.clear()
        self.head = follower.seen
        parts = [] if restarted else list(self._pieces())
        removed = np.frombuffer(gone, np.int64)
        if self.limit:
            absent = np.ascontiguousarray(elements_of(removed[follower.overwritten :], ring.width))
            table.mark_absent(address(absent), len(absent))
            removed = removed[: follower.overwritten]
        if len(removed):
            self._drop(
                ring, removed if restarted else _without_returned(ring, removed, parts, before)
            )
        if len(changed):
            parts = [*parts, np.frombuffer(changed, np.int64).copy()]
        for slots in self._pieces() if restarted else parts:
            self.add_slots(ring, slots)
        table.settle(follower)
        return bool(restarted)

    def _pieces(self) -> Any:
        if not self._piece_arrays.shape[1]:
            self._piece_arrays = np.empty((2, _PIECE), np.int64)
        slots, reach = self._piece_arrays
        while count := self._follower.next(address(slots), address(reach), _PIECE):
            yield slots[:count].copy()

    def add_slots(self, ring: Ring, slots: Ints) -> None:
        """Adds the items in ``slots`` to the table. Items that were overwritten are skipped."""
        columns, present = labels_of(self._mover, self._paths, slots, self.head)
        elements = elements_of(slots[present], ring.width)
        if len(elements):
            head = self.head
            first = head % ring.capacity * ring.width if head >= ring.capacity else 0
            self._put(elements, columns, np.ascontiguousarray(elements), first)

    def _put(self, elements: Ints, columns: list[Column], at: Ints, first: int) -> None:
        labels = np.ascontiguousarray(self._to_labels(columns[0]), np.int64)
        if self.values is not None:
            self.values[elements] = means_of(columns[1])
        now = time.monotonic_ns() if self.limit else 0
        self.table.put(address(at), address(labels), len(at), first, now)

    def _drop(self, ring: Ring, slots: Ints) -> None:
        elements = np.ascontiguousarray(elements_of(slots, ring.width))
        self.table.drop(address(elements), len(elements))

    # -- asking --------------------------------------------------------------------------------

    def find_groups(self, elements: Ints) -> Ints:
        """Returns the number of each element's group or version, int64 ``[n]``.

        The number is -1 if the element is not in the index.
        """
        found = np.empty(len(elements), np.int64)
        self.table.read_groups(address(elements), len(elements), address(found))
        return found

    def leave_out(self, elements: Ints) -> None:
        """Removes the items at ``elements`` from the index, although they are in the storage."""
        elements = np.ascontiguousarray(elements)
        self.table.drop(address(elements), len(elements))
        self.table.settle(self._follower)

    def labels(self, elements: Ints) -> Ints:
        """Returns the label of each element, int64 ``[n]``."""
        found = np.empty_like(elements)
        self.table.read(address(elements), len(elements), address(found))
        return found

    def groups(self, key: int, most: int, size: int) -> Ints:
        """Chooses up to ``most`` complete groups at random.

        Args:
            key: seed of the choice.
            most: maximum number of groups.
            size: number of items in a group.

        Returns:
            The elements of the items in each group, int64 ``[groups, size]``.
        """
        count = min(self.table.marked, most)
        numbers, found = np.empty(count, np.int64), np.empty((count, size), np.int64)
        self.table.choose(key, self.table.marked, count, address(numbers))
        self.table.choose_members(address(numbers), count, size, key ^ 1, address(found))
        return found

    def draw_by_staleness(
        self, version: int, most: int, key: int, count: int, *out: int
    ) -> bool | None:
        """Draws items in the C core with weights ``1 / (staleness + 1)``.

        Args:
            version: policy version from which the staleness is computed.
            most: maximum staleness.
            key: seed of the draw.
            count: number of items.
            out: addresses of the elements, int64 ``[count]``, their staleness, float32 ``[count]``,
                and their tickets, int64 ``[count]``.

        Returns:
            True after a draw, False if an item was overwritten, or None if no item is fresh enough.
        """
        found: bool | None = self.table.draw_fresh(self._follower, version, most, key, count, *out)
        return found

    def tickets(self, elements: Ints) -> Ints | None:
        """Returns the tickets of the items at ``elements``, int64 ``[n]``.

        Returns None if one of the items has been overwritten since the last update.
        """
        found = np.empty(len(elements), np.int64)
        out = address(elements), len(elements), address(found)
        return found if self.table.read_tickets(self._follower, *out) else None


def _without_returned(ring: Ring, gone: Ints, parts: list[Ints], before: int) -> Ints:
    """Returns the slots in ``gone``, except slots that contain the same item again.

    Args:
        ring: the ring.
        gone: slots whose items were removed.
        parts: slots of the new items.
        before: head of the ring at the previous update. A smaller ticket belongs to an item that
            was already in the index.
    """
    if not parts:
        return gone
    fresh = np.concatenate(parts)
    known = fresh[slot_words.tickets(ring.live.words[fresh]) < before]
    return gone[~np.isin(gone, known)] if len(known) else gone


def means_of(column: Column) -> Floats:
    """Returns the mean of each item's reward, float64 ``[n]``.

    Raises TypeError if a reward is not a number or an array of numbers.
    """
    if not isinstance(column, np.ndarray):
        kind = type(column[0]).__name__ if column else "nothing"
        raise TypeError(
            f"rewards must be numbers or tensors of numbers, got {kind}; choose another reward_key"
        )
    means: Floats = column.astype(np.float64).mean(-1)
    return means
