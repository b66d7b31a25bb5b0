"""A storage on the engine, defined by the first write.

    RingStorage ── engine: who is there, the ring, priorities, recovery (shmbuffer.memory)
                └─ rows:   where the payload lies and who moves it (rows.py); None until somebody
                has written

What is not shared may be looked at in place: an int or a slice gives views, as in TorchRL. What is
shared is copied and validated, because it may be written over while one looks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError, SchemaMismatchError, SpaceError
from shmbuffer.memory import Engine, Settings
from shmbuffer.replay.checkpointers.tensor import TensorStorageCheckpointer
from shmbuffer.replay.eager import eager
from shmbuffer.replay.form.batches import stack
from shmbuffer.replay.form.leaves import Leaves
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.keys import OWN_KEYS
from shmbuffer.replay.storages.held_rows import HeldRows
from shmbuffer.replay.storages.indexing import extent, meant, ravel, select, unravel
from shmbuffer.replay.storages.location import Location, unmade
from shmbuffer.replay.storages.native_rows import NativeRows
from shmbuffer.replay.storages.on_ring import OnRing
from shmbuffer.replay.storages.patching import change_entries
from shmbuffer.replay.storages.placing import as_batch, is_int, place, slots_of, widened
from shmbuffer.replay.storages.reading import everything, fetch
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.serving import Drawn
from shmbuffer.replay.storages.state import example_of, load_state, state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


class RingStorage(OnRing):
    """The common part of the storages of columns: items of one form, a leaf a column.

    Args:
        max_size: capacity in elements; with ``ndim > 1`` rounded up to whole slots at the first
            write.
        ndim: leading dimensions of the data that belong to the storage.
        device: where samples are.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        location: where the bytes are; None is anonymous memory.
    """

    _location: Location
    _default_checkpointer = TensorStorageCheckpointer

    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        device: torch.device | str | None = "cpu",
        compilable: bool = False,
        location: Location | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable)
        if ndim < 1:
            raise ValueError(f"ndim has to be at least 1, got {ndim}")
        self.ndim = int(ndim)
        self.device: torch.device | None = (
            None if device is None or device == "auto" else torch.device(device)
        )
        self.mapping = "dict"  # what a plain dict is; a TensorDict buffer says "tensordict"
        self.optional: frozenset[str] = OWN_KEYS  # root keys that are not stored
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._rows: Rows | None = None
        self._emptied = False
        self._handed_over = False  # before a write: no process may keep a column for itself
        self._location = Location() if location is None else location

    # -- engine and ring -----------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The process's handle; opened on first use.

        Raises:
            RuntimeError: in the child of a fork, where nothing had been written before it: parent
                and child would have a buffer each.
        """
        if self._engine is None:
            if os.getpid() != self._pid:
                raise RuntimeError(f"{self._not_yet()}; this is the child of a fork")
            self._engine = self._location.open(self._settings())
        return self._engine

    def _open_at_once(self) -> None:
        """Open the location, if it is one that does not wait for the first write."""
        if self._location.opens_at_once:
            self._engine = self._location.open(self._settings())

    @property
    def open_engine(self) -> Engine | None:
        """See `Serving.open_engine`."""
        return self._engine

    @property
    def rows(self) -> Rows | None:
        """The payload, or None as long as nobody has written.

        Cost: one attribute once it is there.
        """
        rows = self._rows
        if rows is None and self._engine is not None:
            ring = self._engine.ring
            if ring is not None:
                rows = self._meet(ring)
        return rows

    @property
    def ring(self) -> Ring | None:
        """The ring, or None as long as nobody has written."""
        rows = self.rows
        return None if rows is None else rows.ring

    @property
    def lanes(self) -> tuple[int, ...]:
        """Sizes of the dimensions after the first; ``()`` before the first write."""
        rows = self.rows
        return () if rows is None else rows.leaves.lanes

    @property
    def shape(self) -> torch.Size | None:
        """``[slots, *lanes]``; None before the first write."""
        rows = self.rows
        return None if rows is None else torch.Size((rows.ring.capacity, *rows.leaves.lanes))

    @property
    def max_size(self) -> int:
        """Capacity in elements.

        With ``ndim > 1`` it becomes a multiple of the lanes at the first write.
        """
        rows = self.rows
        return self._max_size if rows is None else rows.ring.elements

    @property
    def initialized(self) -> bool:
        """Whether somebody has written, so that the leaves are known."""
        return self.rows is not None

    @property
    def draws_natively(self) -> bool:
        """See `Serving.draws_natively`: nobody has put a ``get`` of their own in between."""
        return type(self).get is RingStorage.get

    @property
    def writes_natively(self) -> bool:
        """See `Serving.writes_natively`: nobody has put a ``set`` of their own in between."""
        return self.draws_natively and type(self).set is RingStorage.set

    @property
    def appends_natively(self) -> bool:
        """Whether nobody has put an ``append`` of their own in between."""
        kind = type(self)
        return kind.append is RingStorage.append and kind.written is RingStorage.written

    @property
    def tracks_generations(self) -> bool:
        """See `Serving.tracks_generations`."""
        return self.draws_natively

    def __repr__(self) -> str:
        rows = self.rows
        data = "<empty>"
        if rows is not None:
            leaves = (f"{leaf.name}: {leaf.dtype}{list(leaf.shape)}" for leaf in rows.leaves.leaves)
            data = f"{rows.leaves.node.kind}({', '.join(leaves)})"
        shape = None if self.shape is None else list(self.shape)
        return (
            f"{type(self).__name__}(data={data}, shape={shape}, len={len(self)}, "
            f"max_size={self.max_size})"
        )

    def allow(self, keys: frozenset[str]) -> None:
        """Let root entries come along that are no leaves; they are not stored."""
        self.optional = keys
        if self._rows is not None:
            leaves = self._rows.leaves
            leaves.optional = OWN_KEYS | (keys - {leaf.path[0] for leaf in leaves.leaves})

    # -- writing -------------------------------------------------------------------------------

    def append(
        self, data: Any, single: bool = False, priorities: NDArray[np.float64] | None = None
    ) -> tuple[int, int]:
        """Write at the ring's head.

        Args:
            data: a batch ``[n, *lanes, ...]``, or one item ``[*lanes, ...]`` where ``single``.
            single: see there.
            priorities: raw, float64 ``[n * lanes]``; None gives the largest that the buffer has
                seen.

        Returns:
            The ticket of the first slot, and how many slots were written.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed.
            RingOverrunError: the ring came round to a slot that a living writer is filling.

        Cost: one native call, and 0.25 µs a leaf.
        """
        rows = self._rows or self.rows
        if rows is None:
            rows = self._define(data, single)
        try:
            first, count = rows.write(data, single, priorities)
        except SchemaMismatchError:
            if not self._takes_another_form(data, single):
                raise
            return self.append(data, single, priorities)
        if self._watchers and count:
            self.notify(self.written(first, count))
        return first, count

    @eager
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write at given places, as new items: they get the default priority and count as written.

        Args:
            cursor: an int with one item, or ints (range, slice, list, array, tensor) with a batch;
                an index named twice: the last wins.
            data: what to write; a list is a stack of items. A key that the storage has not adds a
                column where it is not shared.
            set_cursor: accepted as in TorchRL; the ring's own position never moves here.

        Raises:
            IndexError: beyond the capacity.
            SchemaMismatchError: other leaves; on a shared storage also a new key.
        """
        self.put(cursor, data, in_place=False)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """See `Serving.put`."""
        single = is_int(cursor)
        rows = self.rows
        if type(data) is list and not single and (rows is None or rows.leaves.node.kind != "list"):
            data = stack(data, self.mapping)
        if rows is None:
            rows = self._define(data, single)
        slots = slots_of(cursor, rows.ring)
        if not self.shared and rows.leaves.new_keys(data):
            wider = widened(rows, self._described(data, single))
            rows = rows if wider is None else self._settle(wider)
        try:
            place(rows, slots, as_batch(rows.leaves, data) if single else data, in_place=in_place)
        except SchemaMismatchError:
            if not self._takes_another_form(data, single):
                raise
            self.put(cursor, data, in_place=in_place)
            return
        if self._watchers and not in_place:
            width = rows.ring.lanes
            elements = torch.from_numpy((slots[:, None] * width + np.arange(width)).ravel())
            self.notify(self.index(elements))

    def knows(self, path: tuple[str, ...]) -> bool:
        """See `Serving.knows`."""
        return any(leaf.path[: len(path)] == path for leaf in self._need_rows().leaves.leaves)

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """See `Serving.change`: where it is, also while others write."""
        rows = self._need_rows()
        chosen = select(index, rows.ring, rows.leaves.lanes, dim_extend)
        change_entries(rows, chosen.elements, chosen.lead, value, key=path)

    def change_if_present(self, index: Any, generation: Any, patch: Any) -> NDArray[np.bool_]:
        """See `Serving.change_if_present`."""
        rows = self._need_rows()
        elements, tickets = meant(index, generation, rows.leaves.lanes)
        lead = (len(elements),)
        return change_entries(rows, elements, lead, patch, key=(), tickets=tickets)

    def prepare(self, data: Any, single: bool) -> None:
        """See `Serving.prepare`: the first write says what an item is."""
        if self.rows is None:
            self._define(data, single)

    def define(self, example: Any) -> None:
        """Say what an item is, and make room for all of them, before anything is written.

        Args:
            example: a batch; or one item, if it is a TensorDict with fewer batch dimensions than
                the storage has.

        Raises:
            SchemaMismatchError: the storage is defined already, and otherwise.
            SpaceError: bytes needed and bytes free; nothing is left behind.
        """
        single = is_collection(example) and len(example.batch_size) < self.ndim
        rows = self.rows
        if rows is None:
            rows = self._define(example, single)
        rows.leaves.values(example, torch.Size(()) if single else None)

    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """The index that a write returns, from what `append` gave.

        Args:
            first: ticket of the first slot.
            count: slots.
            single: it was one item.

        Returns:
            Element indices int64 ``[count]``, or one int where ``single``; where there are lanes,
            coordinates ``[count * lanes, ndim]``.
        """
        rows = self._need_rows()
        capacity = rows.ring.capacity
        start = first % capacity
        if rows.leaves.lanes:
            width = rows.ring.lanes
            elements = np.arange(start * width, (start + count) * width) % (capacity * width)
            return self.index(torch.from_numpy(elements))
        if single:
            return start
        index = np.arange(start, start + count)
        return torch.from_numpy(index % capacity if start + count > capacity else index)

    def index(self, elements: torch.Tensor) -> torch.Tensor:
        """Element indices as a write returns them.

        ``[n]``, or ``[n, ndim]`` where there are lanes.
        """
        lanes = self.lanes
        return torch.stack(unravel(elements, lanes), -1) if lanes else elements

    # -- reading -------------------------------------------------------------------------------

    @eager
    def get(self, index: Any) -> Any:
        """Items by index.

        Args:
            index: int, slice, list, array or tensor; a tuple of them where the storage has several
                dimensions.

        Returns:
            The data in the form in which they were written. Not shared: views for ints and slices.
            Shared: validated copies.

        Raises:
            IndexError: a slot that holds no item.
            EmptyBufferError: nothing was ever written.
        """
        return self.fetch(index)

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """See `Serving.fetch`; without ``views`` they are copies where the storage is shared."""
        as_views = not self.shared if views is None else views
        if isinstance(index, int) and self.rows is None:
            raise IndexError(f"there is no item at {index}: nothing was written yet")
        found = fetch(self._need_rows(), index, dim_extend=dim_extend, as_views=as_views)
        return self.to_device(found)

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """See `Serving.fetch_held`. Copies."""
        rows = self._need_rows()
        elements = torch.from_numpy(ravel(index, rows.leaves.lanes))
        tensors, now, _ = rows.read(elements)
        if not torch.equal(now, tickets.reshape(-1)):
            return None
        return self.to_device(rows.leaves.build(tensors, (len(elements),)))

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Serving.draw`."""
        rows = self._rows or self.rows
        if rows is None:
            raise EmptyBufferError("the buffer is empty: write something before sampling")
        tensors, index, tickets, weights = rows.sample(count, key, beta)
        return self.to_device(rows.leaves.build(tensors, (count,))), index, tickets, weights

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """See `Serving.iter_in_order`: batches of at most ``chunk`` slots, each validated."""
        rows = self._need_rows()
        for start in range(0, extent(rows.ring), chunk):
            yield self.fetch(slice(start, start + chunk), views=False)

    def flatten(self) -> Any:
        """Every item, with one dimension for the storage whatever ``ndim`` is. Copies."""
        rows = self._need_rows()
        index, _, tensors = everything(rows)
        return self.to_device(rows.leaves.build(tensors, (len(index),)))

    def to_device(self, data: Any) -> Any:
        """``data`` on the storage's device."""
        return data

    # -- the rest ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Every item, where it is, and what form it has; see `state_of`. Copies everything."""
        return state_of(self.rows)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there.

        Raises:
            ValueError: it is the state of a storage of another size.
            SchemaMismatchError: its leaves are others; nothing was changed.
        """
        rows = self.rows
        if state_dict["initialized"]:
            rows = self._define(example_of(state_dict), False) if rows is None else rows
            load_state(rows, state_dict)
        elif rows is not None:
            rows.ring.empty()

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item. The next write may be of another form, see `_forget_form`."""
        super().forget(keep_write_count=keep_write_count)
        self._emptied = True

    def _takes_another_form(self, data: Any, single: bool) -> bool:
        """Whether data that did not fit are to be tried again."""
        return self._forget_form()

    def _forget_form(self) -> bool:
        """Whether the next write says what an item is, though there were items before.

        That is so where this handle has emptied the buffer, nobody has written since, and nobody
        else has the buffer.
        """
        if not self._emptied or self._rows is None:
            return False
        ring = self._rows.ring
        exponents = ring.alpha, ring.eps
        if not self.engine.undefine():
            return False
        owner = None if self._table_owner is None else self._table_owner()
        if owner is not None:
            owner.lose_ring(*exponents)
        self._rows, self._emptied = None, False
        self._tell_readers()
        return True

    def _settings(self) -> Settings:
        return Settings(capacity=self._max_size, ndim=self.ndim)

    def _described(self, data: Any, single: bool) -> Leaves:
        return Leaves.of_data(
            data, ndim=self.ndim, single=single, mapping=self.mapping, where=self.where
        )

    def _define(self, data: Any, single: bool) -> Rows:
        leaves = self._described(data, single)
        slots = -(-self._max_size // max(1, math.prod(leaves.lanes)))
        opened_here, engine = self._engine is None, self.engine
        try:
            return self._meet(engine.define(leaves.schema(slots)))
        except SpaceError:
            if opened_here and unmade(engine):
                self._engine = None
            raise

    def _meet(self, ring: Ring) -> Rows:
        leaves = Leaves.of_schema(ring.schema, self.where)
        return self._settle(NativeRows(ring, leaves, memory_mapped=self._memory_mapped))

    _memory_mapped = False

    def _settle(self, rows: Rows) -> Rows:
        self._rows = rows
        self.allow(self.optional)
        self._tell_readers()
        return rows

    def _need_rows(self) -> Rows:
        rows = self._rows or self.rows
        if rows is None:
            raise EmptyBufferError(
                f"{self.where}: nothing was written yet, so there is nothing to read"
            )
        return rows

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._rows, HeldRows):
            raise RuntimeError(
                f"this {type(self).__name__} holds what belongs to this process (on a GPU, given "
                "by the caller, a column added later, or text and other objects), which no other "
                "process can see; use a LazyMemmapStorage, or a LazyTensorStorage with all keys "
                "in its first write, all of them tensors"
            )
        if self._engine is None:
            raise RuntimeError(f"{self._not_yet()}, and would be another buffer there")
        self._handed_over |= self._forget_form()
        return {**super().__getstate__(), "_rows": None, "_emptied": False}

    def _not_yet(self) -> str:
        return (
            f"nothing was written to this {type(self).__name__} yet: it cannot be handed to "
            "another process before the first write, unless it is made with shared_init=True"
        )
