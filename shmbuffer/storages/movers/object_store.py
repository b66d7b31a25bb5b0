"""Stores Python objects in a list. Their order and priorities are in a ring without leaves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.items.mover import Drawn, require_one_each
from shmbuffer.memory import Engine, ItemSnapshot, Ring, Schema, Settings
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.streams import GivenStreams, expand_streams
from shmbuffer.memory.resize import grow
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.storages.indexing import as_array, integers, is_int, tickets_at
from shmbuffer.storages.movers.item_codec import ItemCodec, cloned, for_state
from shmbuffer.storages.movers.item_store import Changes, ItemStore, edits, held_slots
from shmbuffer.storages.movers.storage_mover import (
    drawn_slots,
    last_of_each,
    require_priorities,
)
from shmbuffer.tensors.form.tensor_nodes import entry_at

_WHOLE = 2**20  # larger rings start with _FIRST slots and grow
_FIRST = 2**10


class ObjectStore(ItemStore):
    """Stores items in the slots ``0 .. len - 1``, without gaps."""

    where = "this buffer"

    # Held from claim to commit and during a read, because the list and the slot words must match.
    _claim = ForkLock()

    def __init__(self, name: str, max_size: int, codec: ItemCodec, instead: str) -> None:
        self.name = name
        self.max_size = max_size
        self.codec = codec
        self._instead = instead
        capacity = max_size if max_size <= _WHOLE else _FIRST
        self._engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
        self._ring: Ring = self._engine.define(Schema((), capacity, (), {"kind": "leaf"}))
        self._pid = os.getpid()
        self._kept: list[Any] = []  # stored form of the item in each slot

    @property
    def ring(self) -> Ring:  # type: ignore[override] # a property, which checks for a fork
        """The ring of the items. It is still the same object after it has grown.

        Raises RuntimeError in the child of a fork.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this {self.name} was inherited through a fork, and its items belong to process "
                f"{self._pid}; {self._instead}"
            )
        return self._ring

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, items: Any, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Appends one or more items. Returns the first slot and the number of items."""
        count = len(items)
        of = None if streams is None else expand_streams(streams, count)
        with self._claim:
            ring = self.ring
            if priorities is not None:
                require_priorities(ring, priorities)
            if ring.capacity < self.max_size:
                self._reach(ring.cursor + count + 1)  # the ring grows before it wraps around
            capacity, kept = ring.capacity, self._kept
            first = ring.claims.claim(count, of)
            stays = items[-capacity:]
            at = (first + count - len(stays)) % capacity
            fits = capacity - at
            if len(stays) > fits:  # the remaining items are written to the first slots
                kept[: len(stays) - fits] = stays[fits:]
            kept[at : at + len(stays)] = stays[:fits]
            ring.claims.commit(None if priorities is None else priorities[-capacity:])
        return first % capacity, count

    def write_at(self, cursor: Any, items: Any, *, in_place: bool) -> Ints:
        """Writes items to the slots that ``cursor`` selects. Returns the distinct slots."""
        with self._claim:
            places = places_of(cursor, len(items), self.ring.length, self.max_size)
            slots = np.array(places, np.int64)
            if len(slots):
                self._reach(int(slots.max()) + 1)
                slots = self.put(slots, items, in_place=in_place)
        return slots

    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Writes row i of ``data`` to ``slots[i]``. The caller must hold ``_claim``."""
        self.ring.claims.claim_slots(slots, in_place=in_place)
        self._kept.extend([None] * (int(slots.max()) + 1 - len(self._kept)))
        for slot, one in zip(slots.tolist(), data, strict=True):
            self._kept[slot] = one
        self.ring.claims.commit()

    def select_rows(self, data: Any, which: NDArray[Any]) -> Any:
        """Returns the rows of ``data`` that ``which`` selects, in the form that `place` accepts."""
        return [data[at] for at in np.arange(len(data))[which].tolist()]

    def change(self, index: Any, changes: Changes) -> None:
        """Changes entries of the items at ``index``. The items keep their priorities."""
        with self._claim:
            slots = self.select(index).elements
            edit = edits(changes, index, len(slots))
            rows = last_of_each(slots).tolist()
            items = [edit(row, cloned(self.codec.give(self._kept[slots[row]]))) for row in rows]
            if rows:
                self.place(slots[rows], list(map(self.codec.keep, items)), in_place=True)

    def _reach(self, end: int) -> None:
        """Grows the ring to at least ``end`` slots, but not beyond ``max_size``.

        The caller must hold ``_claim``.
        """
        capacity = self.ring.capacity
        if end > capacity and capacity < self.max_size:
            wanted = max(2 * capacity, 1 << (end - 1).bit_length())
            self._engine = grow(self._engine, min(wanted, self.max_size))

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """Reads items by index, and returns them in the form in which they were written."""
        ring = self.ring
        slots = drawn_slots(ring, index)
        if slots is not None:
            with self._claim:
                if ring.live.holds(slots).all():
                    found = list(map(self._kept.__getitem__, slots.tolist()))
                    return self.codec.give_all(found)
        return super().fetch(index)

    def read(self, index: torch.Tensor) -> tuple[Any, torch.Tensor, int]:
        """Reads items by index.

        Returns their stored forms, which are not copied, the tickets, and the number of empty
        slots.
        """
        with self._claim:
            tickets, kept = tickets_at(self.ring, index.numpy()), self._kept
            held = (tickets >= 0).tolist()
            there = zip(index.tolist(), held, strict=True)
            found = [kept[at] if is_held else None for at, is_held in there]
        return found, torch.from_numpy(tickets), held.count(False)

    def entries(self, slots: Ints, paths: Sequence[KeyPath]) -> tuple[list[Any], Ints]:
        """Reads entries of the items that are present.

        Returns the values for each path, and the ticket of each slot, which is -1 if it is empty.
        """
        kept, tickets, _ = self.read(torch.from_numpy(slots))
        items = [self.codec.give(one) for one in self.select_rows(kept, tickets.numpy() >= 0)]
        return [[entry_at(item, path) for item in items] for path in paths], tickets.numpy()

    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """Decodes one item if ``lead`` is empty, otherwise all items in ``found``."""
        return self.codec.give_all(found) if lead else self.codec.give(found[0])

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Raises NotImplementedError, because a sampler must draw the indices of objects."""
        raise NotImplementedError(
            f"a {self.name} cannot draw items itself; choose indices with a sampler"
        )

    # -- all items -----------------------------------------------------------------------------

    def copy_out(self) -> tuple[list[Any], ItemSnapshot]:
        """Returns all items in their stored form, not copied, with a snapshot of the ring."""
        with self._claim:
            moment = self.ring.copy_out(())
            return [self._kept[slot] for slot in held_slots(moment).tolist()], moment

    def copy_in(self, kept: list[Any], slots: Ints, *, cursor: int, write_count: int) -> None:
        """Replaces the contents; see `ListStorage.copy_in`."""
        with self._claim:
            self.forget(keep_write_count=False)
            self._reach(max([cursor, *slots.tolist()]) + 1)
            if len(slots):
                self.place(slots, kept, in_place=False)
            self.ring.restore(cursor % self.ring.capacity, write_count, None)

    def _state(self) -> tuple[dict[str, Any], ItemSnapshot]:
        items, moment = self.copy_out()
        return {"_list": [for_state(kept) for kept in items]}, moment

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items."""
        with self._claim:
            self.ring.empty(keep_write_count=keep_write_count)
            self._kept = []

    def close(self) -> None:
        """Releases the ring and the items. Can be called again."""
        self._engine.close()
        self._kept = []


def places_of(cursor: Any, count: int, length: int, max_size: int) -> list[int]:
    """Returns the slots that a write of ``count`` items to the index ``cursor`` changes.

    ``length`` is the number of items in the list. Raises an error if ``cursor`` selects another
    number of slots, or if the write would leave a gap.
    """
    named = [int(cursor)] if is_int(cursor) else _named(cursor, length)
    require_one_each(named, count)
    places = []
    end = length
    for name in named:
        place = name + end if name < 0 else name
        if place < 0:
            raise IndexError(f"index {name} is out of range for {end} items")
        if place >= max_size:
            raise RuntimeError(f"index {name} is out of range for a list of max_size {max_size}")
        if place > end:
            raise RuntimeError(
                f"an item at index {name} would leave a gap, because the list has {end} items; the "
                f"next index is {end}"
            )
        end = max(end, place + 1)
        places.append(place)
    return places


def _named(cursor: Any, length: int) -> Sequence[int]:
    if isinstance(cursor, slice):
        stop = cursor.stop
        return range(length if stop is None or stop < 0 else max(length, stop))[cursor]
    found = as_array(cursor)
    if found.dtype == np.bool_:
        found = integers(found, length)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise IndexError(
            f"{cursor!r} is not an index of a list; pass a one-dimensional index of ints"
        )
    numbers: list[int] = found.astype(np.int64).tolist()
    return numbers
