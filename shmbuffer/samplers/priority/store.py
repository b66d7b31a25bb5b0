"""Base class for samplers with priorities, which chooses where priorities are stored."""

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
    """Base class for samplers with priorities. `PrioritizedSampler` adds the draw.

    Priorities for the items in a storage of this package are stored in its ring. All samplers of a
    shared directory use these priorities. If the storage is not shared, only one sampler uses them,
    and any other sampler has its own table. Priorities for any other storage are also stored in a
    table of the sampler, which is at least as large as the storage.

    Args:
        max_capacity: minimum capacity of the sampler's own table in elements.
        alpha: priority exponent.
        eps: constant that is added to every priority.
        max_within_buffer: True if new items get the largest priority of the items in the buffer,
            instead of the largest priority that was ever set.
    """

    def __init__(
        self, max_capacity: int, alpha: float, eps: float, max_within_buffer: bool
    ) -> None:
        if int(max_capacity) < 1:
            raise ValueError(f"max_capacity must be at least 1, got {max_capacity}")
        self._max_capacity = int(max_capacity)
        self._alpha = as_non_negative("alpha", alpha)
        self._eps = as_non_negative("eps", eps)
        self._max_within_buffer = bool(max_within_buffer)
        self._follows = False  # True if alpha and eps are taken from the storage
        self._storage: weakref.ref[Any] | None = None  # storage to which the indices refer
        self._ring: Ring | None = None  # ring that stores our priorities, or None
        self._waits_for: weakref.ref[Any] | None = None  # storage that has no ring yet
        self._table: PriorityTable | None = None  # the sampler's own table, if no ring is used
        self._greatest: MaxPriority | None = None

    @property
    def alpha(self) -> float:
        """Priority exponent.

        A new value recomputes every mass exactly from the raw priorities, even if the old exponent
        was 0. This takes O(capacity).

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
        """Constant that is added to every priority. A new value recomputes every mass.

        Raises:
            ValueError: the value is negative or not finite. Nothing was changed.
        """
        ring = self.ring()
        return self._eps if ring is None else ring.tree.eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._set(None, as_non_negative("eps", value))

    @property
    def default_priority(self) -> float:
        """Priority of a new item that is written without a priority."""
        if self._greatest is not None:
            return self._greatest.default()
        ring = self.ring()
        return 1.0 if ring is None else ring.tree.default_priority

    def ring(self) -> Ring | None:
        """Returns the ring that stores the priorities, or None before the first write.

        This is the ring of the storage, or the ring of the sampler's own table.
        """
        ring = self._bound()
        return ring if self._table is None else self._table.ring

    @property
    def _bound_storage(self) -> Any:
        """The storage to which the indices refer, or None."""
        return None if self._storage is None else self._storage()

    def _set(self, alpha: float | None, eps: float | None) -> None:
        """Sets alpha and eps. A value of None leaves the current value unchanged."""
        ring = self.ring()
        if ring is not None:
            ring.tree.set_alpha(alpha, eps)
        self._alpha = self._alpha if alpha is None else alpha
        self._eps = self._eps if eps is None else eps

    # -- a storage -----------------------------------------------------------------------------

    def bind(self, storage: Any) -> bool:
        """Stores the priorities in the ring of ``storage``, or in a table of the sampler.

        The ring is used if the storage belongs to this package and no other sampler uses the ring,
        or if the storage is shared. Priorities that the sampler has in its own table are then moved
        to the ring.

        Returns:
            True if the ring stores the priorities. False before the first write to the storage.

        Raises:
            ValueError: the storage is shared, and uses a different alpha or eps.
        """
        if not isinstance(storage, RingBacked):
            self._fit_table(storage)
            return False
        ring: Ring | None = storage.ring()
        self._waits_for = weakref.ref(storage) if ring is None else None
        if ring is None:  # nothing has been written yet
            return False
        if ring is self._ring:
            return True
        if self._table is not None and self._bound_storage is storage:
            return False
        owner = None if storage._table_owner is None else storage._table_owner()
        if not storage.shared and owner is not None and owner is not self:
            self._fit_table(storage)
            return False
        if not ring.tree.prioritized:
            ring.tree.bind(self._alpha, self._eps)
        elif not self._has_same_settings(storage):
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
        """Returns the ring of the storage if it stores our priorities, otherwise None.

        If the storage had no ring until now, the sampler is bound first.
        """
        storage = None if self._waits_for is None else self._waits_for()
        if storage is not None:
            self.bind(storage)
        return self._ring

    def _has_same_settings(self, storage: Any) -> bool:
        """True if the storage has the same alpha and eps as this sampler.

        An unpickled copy always agrees, because it takes both values from the storage.
        """
        if self._follows or not storage.shared:
            return self._follows
        settings = storage.engine().settings
        return bool((settings.alpha, settings.eps) == (self._alpha, self._eps))

    def _attach_ring(self, ring: Ring) -> None:
        """Sets the priority that new items in ``ring`` receive."""
        self._greatest = MaxPriority(ring) if self._max_within_buffer else None
        ring.tree.initial = None if self._greatest is None else self._greatest.default

    def release(self, storage: Any) -> None:
        """Detaches from ``storage``, and leaves its priorities unchanged for the next sampler."""
        if getattr(storage, "_table_owner", None) is not None and storage._table_owner() is self:
            storage._table_owner = None
            if self._ring is not None:
                self._alpha, self._eps = self._ring.tree.alpha, self._ring.tree.eps
                self._ring.tree.initial = None
        storage.detach(self)
        self._storage = self._ring = self._table = self._greatest = self._waits_for = None

    def lose_ring(self, alpha: float, eps: float) -> None:
        """Prepares for a new ring of the storage, because the old ring was removed.

        Args:
            alpha: alpha of the old ring, which the new ring also gets.
            eps: eps of the old ring, which the new ring also gets.
        """
        self._alpha, self._eps = alpha, eps
        self._ring, self._greatest, self._waits_for = None, None, self._storage

    def _fit_table(self, storage: Any) -> PriorityTable:
        """Returns the sampler's own table, after adapting it to the storage.

        The table is created or enlarged if necessary, and elements with items are marked.

        Args:
            storage: the storage with the items. With None, only the size is adapted, to the storage
                that the sampler already knows.
        """
        table = self._table
        known = self._bound_storage if storage is None else storage
        ring = ring_of(known)  # has the current size, also for a list without a maximum size
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
        if self._bound_storage is not storage:
            self._storage = weakref.ref(storage)
            if ring is not None:
                table.add(ring.live.committed())
                storage.attach(self)  # notifies this sampler of other writes
        if ring is None:
            table.fit(len(storage))
        return table

    # -- priorities ----------------------------------------------------------------------------

    def add(self, index: Any) -> None:
        """Sets the priority of the new item at ``index`` to the default."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Sets the priorities of the new items at ``index`` to the default.

        Does nothing if the ring stores the priorities, because the write has already set them. An
        index of -1 is skipped.
        """
        if self._bound() is None:
            self._set_default(index)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Sets the priorities of the items at ``index`` to the default."""
        if storage is not None:
            self.bind(storage)
        if self._bound() is None:
            self._set_default(index)
        else:
            self.update_priority(index, self.default_priority)

    def _set_default(self, index: Any) -> None:
        elements = ravel(index, self._lanes())
        self._fit_table(None).mark(elements[elements >= 0])

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Sets the priorities of items.

        Args:
            index: element indices: an int, ``[n]`` or ``[n, 1]``. For a storage with several
                dimensions, ``[n, ndim]`` or a tuple of ``ndim`` indices. An index of -1 is skipped.
                If an index occurs twice, the last priority is used.
            priority: finite numbers of at least 0: one for all items, ``[n]`` or ``[n, 1]``.
            storage: storage to which the indices refer, if the sampler has not used it yet.
            generation: tickets of the items when they were sampled, ``[n]``. Items that have been
                overwritten since then are skipped and counted. With None, all priorities are set,
                as in TorchRL.

        Returns:
            The number of priorities that were set, and the number that were skipped as stale.

        Raises:
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.
            IndexError: ``index`` is out of range, is a boolean mask, or does not consist of
                integers. Nothing was changed.
            RuntimeError: the sizes of ``index`` and ``priority`` differ. Nothing was changed.

        Cost: one native call. Contiguous tensors (int64 indices and generations, float32 or
            float64 priorities) are read in place.
        """
        if self._bound() is not None:
            found = self.update_arrays(index, priority, generation)
            if found is not None:
                return found
        elif storage is not None and not self.bind(storage) and self._waits_for is None:
            self._fit_table(storage)
        lanes = self._lanes()
        elements = ravel(index, lanes)
        raw = as_raw(priority, len(elements))
        if self._ring is None and self._table is None and self._waits_for is not None:
            check_raw(raw)
            return PriorityUpdate(0, 0 if generation is None else len(elements))  # no items yet
        tickets = None if generation is None else ravel(generation, ())
        try:
            return self._update(elements, raw, tickets)
        except IndexError:  # an index can be -1, which is rare and therefore checked only now
            written = are_written(elements, lanes)
            if written.all():
                raise
            tickets = None if tickets is None else tickets[written]
            return self._update(elements[written], raw[written], tickets)

    def update_arrays(self, index: Any, priority: Any, generation: Any) -> PriorityUpdate | None:
        """Sets priorities in the C core, without a conversion.

        Returns None, and changes nothing, if the core cannot read the arguments directly or if the
        ring does not store the priorities.
        """
        ring = self._ring
        if ring is None or self._greatest is not None:
            return None
        found = ring.update_arrays(index, priority, generation)
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
        table = self._fit_table(None)
        if len(elements) and not 0 <= elements.min() <= elements.max() < table.ring.elements:
            raise IndexError(
                f"indices must be from 0 to {table.ring.elements - 1}, got values from "
                f"{elements.min()} to {elements.max()}. Nothing was changed"
            )
        ring = ring_of(self._bound_storage)
        if ring is None:
            return PriorityUpdate(table.update(elements, raw), 0)
        # Only elements with an item in the storage get a priority.
        now = tickets_at(ring, elements // ring.width)
        is_present = now >= 0 if tickets is None else (now >= 0) & (now == tickets)
        applied = table.update(elements[is_present], raw[is_present])
        return PriorityUpdate(applied, len(elements) - applied)

    def _lanes(self) -> tuple[int, ...]:
        if self._ring is not None and self._ring.width == 1:
            return ()
        return () if self._bound_storage is None else lanes_of(self._bound_storage)

    def _empty(self) -> None:
        if self._table is not None:
            self._table.ring.empty()

    def __getstate__(self) -> dict[str, Any]:
        if self._table is not None:
            raise RuntimeError(
                "a PrioritizedSampler that stores its priorities in this process cannot be "
                "pickled, because other processes would not see changes to the priorities; use a "
                "LazyMemmapStorage or LazyTensorStorage, which share items and priorities"
            )
        return {  # the process that unpickles the sampler binds it to the storage again
            **super().__getstate__(),
            "_alpha": self.alpha,
            "_eps": self.eps,
            "_follows": self._follows or self._ring is not None,
            "_storage": None,
            "_waits_for": None,
            "_ring": None,
            "_greatest": None,
        }
