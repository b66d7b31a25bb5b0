"""Base class that decides where a sampler's priorities are stored, and changes them."""

from __future__ import annotations

import weakref
from typing import Any

from shmbuffer.items.indices import are_written
from shmbuffer.items.maximum import MaxPriority
from shmbuffer.items.raw_priorities import PriorityUpdate, as_non_negative, as_raw, check_raw
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.samplers.priority.priority_table import PriorityTable, raw_of
from shmbuffer.samplers.sampler import Sampler, lanes_of
from shmbuffer.storages.indexing import ravel, tickets_at
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import ring_of


class PriorityStore(Sampler):
    """Base class of samplers with priorities. `PrioritizedSampler` adds the draw."""

    # a storage of this package   in its ring, for one sampler, or for all samplers of a directory
    # any other storage           in the sampler's own table, which is as large as the storage
    # a second sampler            in the sampler's own table, if the storage is not shared
    def __init__(self, max_capacity: int, alpha: float, eps: float, within: bool) -> None:
        if int(max_capacity) < 1:
            raise ValueError(f"max_capacity must be at least 1, got {max_capacity}")
        self._max_capacity = int(max_capacity)
        self._alpha = as_non_negative("alpha", alpha)
        self._eps = as_non_negative("eps", eps)
        self._within = bool(within)
        self._follows = False  # True if alpha and eps are taken from the storage
        self._storage: weakref.ref[Any] | None = None  # storage to which the indices refer
        self._ring: Ring | None = None  # ring of the storage, if it stores our priorities
        self._waits_for: weakref.ref[Any] | None = None  # storage without a ring so far
        self._table: PriorityTable | None = None  # own table, instead of the ring
        self._greatest: MaxPriority | None = None

    @property
    def alpha(self) -> float:
        """Priority exponent. Setting it recomputes every mass exactly, even from 0. O(capacity).

        Raises:
            ValueError: the value is negative, or too large for the priorities. Nothing was changed.
        """
        ring = self.ring()
        return self._alpha if ring is None else ring.tree.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._set(as_non_negative("alpha", value), None)

    @property
    def eps(self) -> float:
        """Number that is added to every priority. Setting it recomputes every mass."""
        ring = self.ring()
        return self._eps if ring is None else ring.tree.eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._set(None, as_non_negative("eps", value))

    @property
    def default_priority(self) -> float:
        """Priority of a new item."""
        if self._greatest is not None:
            return self._greatest.default()
        ring = self.ring()
        return 1.0 if ring is None else ring.tree.default_priority

    def ring(self) -> Ring | None:
        """Returns the ring with the priorities, or None."""
        ring = self._bound()
        return ring if self._table is None else self._table.ring

    @property
    def _known(self) -> Any:
        """The storage to which the indices refer, or None."""
        return None if self._storage is None else self._storage()

    def _set(self, alpha: float | None, eps: float | None) -> None:
        """Sets alpha and eps. None leaves a value unchanged."""
        ring = self.ring()
        if ring is not None:
            ring.tree.set_alpha(alpha, eps)
        self._alpha = self._alpha if alpha is None else alpha
        self._eps = self._eps if eps is None else eps

    # -- a storage -----------------------------------------------------------------------------

    def bind(self, storage: Any) -> bool:
        """Stores the priorities in the ring of ``storage`` if it is free, otherwise in a table.

        Returns:
            True if the ring stores the priorities. In this case existing priorities are moved to
            the ring.

        Raises:
            ValueError: the storage is shared, and uses a different alpha or eps.
        """
        if not isinstance(storage, RingBacked):
            self._keep_table(storage)
            return False
        ring: Ring | None = storage.ring()
        self._waits_for = weakref.ref(storage) if ring is None else None
        if ring is None:  # before the first write
            return False
        if ring is self._ring:
            return True
        if self._table is not None and self._known is storage:
            return False
        owner = None if storage._table_owner is None else storage._table_owner()
        if not storage.shared and owner is not None and owner is not self:
            self._keep_table(storage)
            return False
        if not ring.tree.prioritized:
            ring.tree.bind(self._alpha, self._eps)
        elif not self._agrees(storage):
            (ring.tree.bind if storage.shared else ring.tree.set_alpha)(self._alpha, self._eps)
        before, self._table = self._table, None
        storage._table_owner = weakref.ref(self)
        self._storage = weakref.ref(storage)
        self._ring = ring
        self._attach_ring(ring)
        if before is not None:
            known = before.ring.live.committed()
            known = known[known < ring.elements]
            ring.update(known, before.ring.tree.priorities(known))
        return True

    def _bound(self) -> Ring | None:
        """Returns the ring that stores our priorities, and binds a new ring of the storage."""
        storage = None if self._waits_for is None else self._waits_for()
        if storage is not None:
            self.bind(storage)
        return self._ring

    def _agrees(self, storage: Any) -> bool:
        """True if the storage's alpha and eps equal ours, or if this is an unpickled copy."""
        if self._follows or not storage.shared:
            return self._follows
        settings = storage.engine().settings
        return bool((settings.alpha, settings.eps) == (self._alpha, self._eps))

    def _attach_ring(self, ring: Ring) -> None:
        """Sets the priority of new items in this ring."""
        self._greatest = MaxPriority(ring) if self._within else None
        ring.tree.initial = None if self._greatest is None else self._greatest.default

    def release(self, storage: Any) -> None:
        """Releases the priorities of ``storage``, unchanged, for the next sampler."""
        if getattr(storage, "_table_owner", None) is not None and storage._table_owner() is self:
            storage._table_owner = None
            if self._ring is not None:
                self._alpha, self._eps = self._ring.tree.alpha, self._ring.tree.eps
                self._ring.tree.initial = None
        storage.detach(self)
        self._storage = self._ring = self._table = self._greatest = self._waits_for = None

    def lose_ring(self, alpha: float, eps: float) -> None:
        """Prepares for a new ring of the storage with the same alpha and eps."""
        self._alpha, self._eps = alpha, eps
        self._ring, self._greatest, self._waits_for = None, None, self._storage

    def _keep_table(self, storage: Any) -> PriorityTable:
        """Returns the sampler's own table, updated to the size and the items of the storage."""
        table = self._table
        known = self._known if storage is None else storage
        ring = ring_of(known)  # for the current size of an unbounded list
        size = getattr(known, "max_size", 0) if ring is None else ring.elements
        capacity = max(self._max_capacity, size)
        if table is None or table.ring.elements < capacity:
            before, table = table, PriorityTable(capacity, self._alpha, self._eps)
            if before is not None:
                table.load(raw_of(before.ring), before.ring.tree.max_priority)
            self._table = table
            self._attach_ring(table.ring)
        if storage is None:
            return table
        ring = ring_of(storage)
        if self._known is not storage:
            self._storage = weakref.ref(storage)
            if ring is not None:
                table.add(ring.live.committed())
                storage.attach(self)  # notifies this sampler of other writes
        if ring is None:
            table.fit(len(storage))
        return table

    # -- priorities ----------------------------------------------------------------------------

    def add(self, index: Any) -> None:
        """Sets the new item at ``index`` to the default priority."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Sets new items to the default priority, unless the ring does so. Skips -1."""
        if self._bound() is None:
            self._renew(index)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Sets the items at ``index`` to the default priority."""
        if storage is not None:
            self.bind(storage)
        if self._bound() is None:
            self._renew(index)
        else:
            self.update_priority(index, self.default_priority)

    def _renew(self, index: Any) -> None:
        elements = ravel(index, self._lanes())
        self._keep_table(None).mark(elements[elements >= 0])

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Sets the priorities of items.

        Args:
            index: element indices: an int, ``[n]`` or ``[n, 1]``. With lanes, ``[n, ndim]`` or a
                tuple of ``ndim`` indices. -1 is skipped. If an index occurs twice, the last
                priority is used.
            priority: one number for all items, ``[n]`` or ``[n, 1]``, finite and not negative.
            storage: storage to which the indices refer, if the sampler has not used it yet.
            generation: tickets of a sample, ``[n]``. Items that have been overwritten since the
                sample are skipped and counted. None sets all items, as TorchRL does.

        Returns:
            The numbers of applied and of stale priorities.

        Raises:
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.
            IndexError: ``index`` is out of range, a mask, or not integral. Nothing was changed.
            RuntimeError: the sizes of ``index`` and ``priority`` differ. Nothing was changed.

        Cost: one native call. Contiguous tensors (int64 indices and generations, float32 or
            float64 priorities) are read in place.
        """
        if self._bound() is not None:
            found = self.update_given(index, priority, generation)
            if found is not None:
                return found
        elif storage is not None and not self.bind(storage) and self._waits_for is None:
            self._keep_table(storage)
        lanes = self._lanes()
        elements = ravel(index, lanes)
        raw = as_raw(priority, len(elements))
        if self._ring is None and self._table is None and self._waits_for is not None:
            check_raw(raw)
            return PriorityUpdate(0, 0 if generation is None else len(elements))  # no items yet
        tickets = None if generation is None else ravel(generation, ())
        try:
            return self._update(elements, raw, tickets)
        except IndexError:  # check for -1 only if the fast path fails
            written = are_written(elements, lanes)
            if written.all():
                raise
            tickets = None if tickets is None else tickets[written]
            return self._update(elements[written], raw[written], tickets)

    def update_given(self, index: Any, priority: Any, generation: Any) -> PriorityUpdate | None:
        """Updates priorities if the core can read the data directly, otherwise returns None."""
        ring = self._ring
        if ring is None or self._greatest is not None:
            return None
        found = ring.update_given(index, priority, generation)
        return None if found is None else PriorityUpdate._make(found)

    def _update(self, elements: Ints, raw: Floats, tickets: Ints | None) -> PriorityUpdate:
        if self._ring is not None:
            found = PriorityUpdate(*self._ring.update(elements, raw, tickets))
        else:
            found = self._update_table(elements, raw, tickets)
        if self._greatest is not None:
            self._greatest.updated(elements, raw, found.applied)
        return found

    def _update_table(self, elements: Ints, raw: Floats, tickets: Ints | None) -> PriorityUpdate:
        check_raw(raw)
        table = self._keep_table(None)
        if len(elements) and not 0 <= elements.min() <= elements.max() < table.ring.elements:
            raise IndexError(f"index out of range for {table.ring.elements} elements")
        ring = ring_of(self._known)
        if ring is None:
            return PriorityUpdate(table.update(elements, raw), 0)
        # The table follows the items of the storage.
        now = tickets_at(ring, elements // ring.width)
        there = now >= 0 if tickets is None else (now >= 0) & (now == tickets)
        applied = table.update(elements[there], raw[there])
        return PriorityUpdate(applied, len(elements) - applied)

    def _lanes(self) -> tuple[int, ...]:
        if self._ring is not None and self._ring.width == 1:
            return ()
        return () if self._known is None else lanes_of(self._known)

    def _empty(self) -> None:
        if self._table is not None:
            self._table.ring.empty()

    def __getstate__(self) -> dict[str, Any]:
        if self._table is not None:
            raise RuntimeError(
                "this PrioritizedSampler keeps its priorities in this process, so other processes "
                "cannot see them; use a LazyMemmapStorage or LazyTensorStorage, which share the "
                "items and their priorities"
            )
        return {  # the receiving process binds the sampler again
            **super().__getstate__(),
            "_alpha": self.alpha,
            "_eps": self.eps,
            "_follows": self._follows or self._ring is not None,
            "_storage": None,
            "_waits_for": None,
            "_ring": None,
            "_greatest": None,
        }
