"""Objects of this process in a list, and a ring without leaves that keeps their order."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from shmbuffer.memory import Engine, Schema, Settings
from shmbuffer.memory.growth import grow
from shmbuffer.replay.storages.indexing import holds
from shmbuffer.replay.storages.keeping import cloned
from shmbuffer.replay.storages.list_places import places_of
from shmbuffer.replay.storages.masses import require_masses
from shmbuffer.replay.storages.placing import is_int
from shmbuffer.replay.storages.shelf import Contents, Edit, Shelf

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.replay.storages.keeping import Keeping
    from shmbuffer.replay.storages.serving import Drawn

_WHOLE = 2**20  # a ring of up to so many slots is made at once; others begin small and grow
_FIRST = 2**10


class ObjectShelf(Shelf):
    """Items without gaps at ``0 .. len - 1``, as many as there is room for, or without a limit.

    Args:
        name: of the storage's class.
        max_size: see `Shelf`.
        keeping: what is kept of an item.
        instead: what to use where processes are to share the items, for messages.
    """

    shares = False

    def __init__(self, name: str, max_size: int, keeping: Keeping, instead: str) -> None:
        super().__init__(name, max_size)
        self.keeping = keeping
        self._instead = instead
        capacity = max_size if max_size <= _WHOLE else _FIRST
        self._engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
        self._ring: Ring = self._engine.define(Schema((), capacity, (), {"kind": "leaf"}))
        self._pid = os.getpid()
        self._kept: list[Any] = []  # by slot
        # From claim to commit, and around a read: the list and the words belong together.
        self._claim = threading.RLock()

    @property
    def engine(self) -> None:
        """See `Shelf.engine`: nobody else can use it."""
        return None

    @property
    def ring(self) -> Ring:
        """The ring of the items. It is the same object also after it has grown.

        Raises:
            RuntimeError: in the child of a fork.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this {self.name} came through a fork, and its items belong to process "
                f"{self._pid}; {self._instead}"
            )
        return self._ring

    # -- writing -------------------------------------------------------------------------------

    def append(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> tuple[int, int]:
        """See `Shelf.append`."""
        kept = [self.keeping.keep(data)] if single else self.keeping.keep_all(data)
        with self._claim:
            ring, count = self.ring, len(kept)
            if priorities is not None:
                require_masses(ring, priorities)
            if ring.capacity < self.max_size:
                self._reach(ring.cursor + count + 1)  # never round, as long as there is room
            first = ring.cursor
            for start in range(0, count, ring.capacity):
                part = kept if count <= ring.capacity else kept[start : start + ring.capacity]
                at = ring.claim(len(part)) % ring.capacity
                end = min(at + len(part), ring.capacity)
                self._kept[at:end] = part[: end - at]
                if end - at < len(part):  # and on from the front
                    self._kept[: len(part) - (end - at)] = part[end - at :]
                given = None if priorities is None else priorities[start : start + len(part)]
                ring.commit(given)
        return first, count

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> NDArray[np.int64]:
        """See `Shelf.put`."""
        single = is_int(cursor)
        is_sequence = type(data) is tuple and not single
        if single:
            items = [self.keeping.keep(data)]
        else:
            items = self.keeping.keep_all(list(data) if is_sequence else data)
        with self._claim:
            slots = places_of(cursor, len(items), self.ring.length, self.max_size)
            kept = dict(zip(slots, items, strict=True))  # the last wins
            unique = np.array(list(kept), dtype=np.int64)
            if not kept:
                return unique
            self._reach(max(kept) + 1)
            present = holds(self.ring, unique)
            for which, keeps in ((present, in_place), (~present, False)):
                if which.any():
                    part = unique[which]
                    self.ring.claim_slots(part, in_place=keeps)
                    self._fill(part, [kept[slot] for slot in part.tolist()])
        return unique

    def change(self, index: Any, edit: Edit) -> None:
        """See `Shelf.change`."""
        with self._claim:
            selection = self.select(index, self.ring)
            for row, slot in enumerate(selection.elements.tolist()):
                item = cloned(self.keeping.give(self._kept[slot]))
                self.put(slot, edit(row, item), in_place=True)

    def _reach(self, end: int) -> None:
        """Have slots up to ``end``, as far as the storage goes; while holding the claim."""
        capacity = self.ring.capacity
        if end > capacity and capacity < self.max_size:
            wanted = max(2 * capacity, 1 << (end - 1).bit_length())
            self._engine = grow(self._engine, min(wanted, self.max_size))

    def _fill(self, slots: NDArray[np.int64], kept: list[Any]) -> None:
        """Put what is kept into slots that are claimed, and commit."""
        missing = int(slots.max()) + 1 - len(self._kept)
        self._kept.extend([None] * missing)
        for slot, one in zip(slots.tolist(), kept, strict=True):
            self._kept[slot] = one
        self._ring.commit()

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, index: Any) -> Any:
        """See `Shelf.fetch`."""
        with self._claim:
            ring, kept = self.ring, self._kept
            if _are_slots(index, ring):  # what a sampler has drawn
                found, is_one = [kept[at] for at in index.tolist()], False
            else:
                selection = self.select(index, ring)
                found = [kept[at] for at in selection.elements.tolist()]
                is_one = not selection.lead
        return self.keeping.give(found[0]) if is_one else self.keeping.give_all(found)

    def fetch_held(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """See `Shelf.fetch_held`: nobody else writes here."""
        return self.fetch(index)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Shelf.draw`: Python has the items, so a sampler draws indices."""
        raise NotImplementedError(f"a sampler draws from a {self.name}, by index")

    # -- everything ----------------------------------------------------------------------------

    def copy_out(self) -> Contents:
        """Everything in here, of one moment. What is kept itself, not copies."""
        with self._claim:
            moment = self.ring.copy_out(())
            slots = np.nonzero(moment.tickets >= 0)[0]
            return Contents([self._kept[slot] for slot in slots.tolist()], slots, moment)

    def copy_in(
        self,
        kept: list[Any],
        slots: NDArray[np.int64],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """Replace everything in here; see `ListStorage.copy_in`."""
        if len(slots) and int(slots.max()) >= self.max_size:
            raise IndexError(
                f"{len(kept)} items cannot be loaded into a {self.name} of max_size {self.max_size}"
            )
        with self._claim:
            ring = self.ring
            self._reach(max([cursor, *slots.tolist()]) + 1)
            ring.empty()
            self._kept = []
            if len(slots):
                ring.claim_slots(slots, in_place=False)
                self._fill(slots, kept)
            ring.restore(cursor % ring.capacity, write_count, max_priority)
            if priorities is not None:
                known = ~np.isnan(priorities)
                ring.update(slots[known], np.ascontiguousarray(priorities[known]))

    def state_dict(self) -> dict[str, Any]:
        """See `ListStorage.state_dict`."""
        contents = self.copy_out()
        capacity = len(contents.moment.tickets)
        return {
            "_list": [self.keeping.saved(kept) for kept in contents.items],
            "_index": torch.from_numpy(contents.slots),
            "_cursor": contents.moment.head % capacity,
            "_capacity": capacity,
        }

    def make_room(self, slots: int) -> None:
        """Have so many slots, as far as the storage goes."""
        with self._claim:
            if self.max_size > _WHOLE:
                self._reach(min(slots, self.max_size))

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item."""
        with self._claim:
            self.ring.empty(keep_write_count=keep_write_count)
            self._kept = []

    def close(self) -> None:
        """See `Shelf.close`."""
        self._engine.close()
        self._kept = []

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            f"a {self.name} holds objects of this process and cannot be passed to another one; "
            f"{self._instead}, or save it with state_dict() or dumps()"
        )


def _are_slots(index: Any, ring: Ring) -> bool:
    """Whether an index is a tensor of slots that hold an item, and needs no further look."""
    if type(index) is not torch.Tensor or index.dtype is not torch.int64 or index.dim() != 1:
        return False
    slots = index.numpy() if index.is_cpu else index.cpu().numpy()
    if not len(slots) or slots.view(np.uint64).max() >= ring.capacity:  # negative ones are large
        return False
    return bool(holds(ring, slots).all())
