"""Storage with a ring, in a directory that processes share or in memory.

    RingBacked ─┬─ engine   the handle of the buffer: clients, priorities, recovery
                └─ mover    writes items to the ring and reads them; None before the first write

A storage that is not shared returns views for an int or a slice, as in TorchRL. A shared storage
returns validated copies, because other processes can overwrite its items.
"""

from __future__ import annotations

import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.indices import unravel
from shmbuffer.items.mover import Drawn
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.saves.checkpoints import has_its_own
from shmbuffer.storages.indexing import extent, is_plain, ravel, tickets_at
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu


class RingBacked(Storage):
    """Base class for the storages that have a ring."""

    _write_hooks: ClassVar[tuple[str, ...]] = ("get", "set")
    """Methods that prevent native writes if a subclass overrides them."""

    _table_owner: weakref.ref[Any] | None = None  # the sampler that uses the ring's priorities

    described: Callable[[Settings], Settings] | None = None
    """Function that adds the buffer's own settings when its directory is created."""

    _opening = ForkLock()

    def __init__(self, max_size: int, *, compilable: bool = False) -> None:
        super().__init__(max_size, compilable=compilable)
        self._engine: Engine | None = None
        self._mover: Any = None
        self._pid = os.getpid()

    # -- engine and ring -----------------------------------------------------------------------

    def engine(self) -> Engine:
        """Returns this process's handle of the buffer, and opens it on first use.

        Raises RuntimeError if the storage was created before a fork and is first used in the child.
        """
        return self._engine or self._open()

    def _open(self, *, existsok: bool = False) -> Engine:
        with self._opening:
            if self._engine is None:
                if os.getpid() != self._pid:
                    raise RuntimeError(
                        f"{self._unwritten_message()}; this process is the child of a fork"
                    )
                assert self._location is not None
                settings = self._settings()
                if self.shared and self.described is not None:
                    settings = self.described(settings)
                self._engine = self._prepare_engine(
                    self._location.open(settings, existsok=existsok)
                )
            return self._engine

    def open_there(self) -> None:
        """Opens the buffer in ``scratch_dir`` for a load in place, regardless of ``existsok``."""
        self._open(existsok=True)

    def _settings(self) -> Settings:
        """Returns the settings of a new buffer."""
        raise NotImplementedError(type(self).__name__)

    def _prepare_engine(self, engine: Engine) -> Engine:
        """Prepares an engine that has just been opened, and returns it."""
        return engine

    def _attach_ring(self, ring: Ring) -> Any:
        """Creates the mover for a ring, stores it and returns it."""
        raise NotImplementedError(type(self).__name__)

    def mover(self) -> Any:
        """Returns the mover, or None before the first write.

        If another process has made the first write, maps the files and creates the mover.
        """
        if self._mover is None and self._engine is not None:
            ring = self._engine.ring()
            if ring is not None:
                return self._attach_ring(ring)
        return self._mover

    def _require_mover(self, index: Any = None) -> Any:
        """Returns the mover.

        Before the first write, raises IndexError for an ``index`` that names single items, and
        EmptyBufferError for any other.
        """
        mover = self._mover or self.mover()
        if mover is None:
            nothing = "nothing was written yet, so there is nothing to read"
            if self._selects_single_items(index):
                raise IndexError(f"{self.where}: there is no item at {index!r}: {nothing}")
            raise EmptyBufferError(f"{self.where}: {nothing}")
        return mover

    def _selects_single_items(self, index: Any) -> bool:
        return isinstance(index, int)

    @property
    def open_engine(self) -> Engine | None:
        """Handle that counts, flushes and records the operations of this storage.

        It is None until the handle is opened.
        """
        return self._engine

    def ring(self) -> Ring | None:
        """Returns the ring of the items, or None before the first write."""
        mover = self._mover or self.mover()
        return None if mover is None else mover.ring

    def lanes(self) -> tuple[int, ...]:
        """Returns the sizes of the storage's dimensions after the first.

        Returns ``()`` before the first write.
        """
        mover = self._mover or self.mover()
        return () if mover is None else mover.lanes

    @property
    def shared(self) -> bool:
        """True if the bytes are in a directory that other processes can open."""
        return self._location is not None and self._location.is_directory

    @property
    def _directory(self) -> Path | None:
        """Directory of the buffer. None in memory, or if it is temporary and not yet created."""
        if self._engine is not None:
            return self._engine.path
        return None if self._location is None else self._location.directory

    @property
    def scratch_dir(self) -> Path | None:
        """Directory of the buffer. None in memory, or if it is temporary and not yet created."""
        return self._directory

    @property
    def where(self) -> str:
        """Name of the buffer in messages."""
        return "this buffer" if self._directory is None else str(self._directory)

    def _directory_name(self) -> str:
        """Returns the directory of the buffer, or of the save that the storage reads, as text."""
        directory = self._directory
        return self._engine.where if directory is None and self._engine else str(directory)

    @property
    def draws_natively(self) -> bool:
        """True unless a subclass overrides ``get``."""
        return not has_its_own(self, "get")

    @property
    def writes_natively(self) -> bool:
        """True unless a subclass overrides ``get`` or a method that writes items."""
        return not any(has_its_own(self, name) for name in self._write_hooks)

    @eager
    def __len__(self) -> int:
        """Returns the number of committed elements."""
        ring = self.ring()
        return 0 if ring is None else ring.length

    def __iter__(self) -> Iterator[Any]:
        """Yields the items in storage order. Slots without an item are skipped."""
        ring = self.ring()
        slots = () if ring is None else ring.live.committed_slots().tolist()
        for slot in slots:
            try:
                yield self.get(slot)
            except IndexError:  # the item was overwritten in the meantime
                if not self.shared:
                    raise

    def contains(self, item: Any) -> Any:
        """True if there is an item at a slot. Negative numbers count from the end.

        For a tensor of slots, returns a tensor with one bool per slot.
        """
        index = np.asarray(item, np.int64)
        ring = self.ring()
        is_present = np.zeros(index.shape, np.bool_)
        if ring is not None:
            slots = index
            if (index < 0).any():
                slots = np.where(index < 0, index + extent(ring), index)
            inside = (slots >= 0) & (slots < ring.capacity)
            is_present[inside] = ring.live.holds(slots[inside])
        return torch.from_numpy(is_present) if is_present.ndim else bool(is_present)

    # -- writing -------------------------------------------------------------------------------

    @abstractmethod
    def append(
        self,
        data: Any,
        single: bool = False,
        priorities: Floats | None = None,
        streams: GivenStreams = None,
    ) -> tuple[int, int]:
        """Appends a batch, or one item if ``single``, at the head of the ring.

        Args:
            data: a batch or an item.
            single: True if ``data`` is one item.
            priorities: raw priorities, float64, one per element. If None, uses the largest so far.
            streams: stream number from 0 to 2**24 - 1 for each slot, or one number for all slots.
                None means 0.

        Returns:
            The first position, which can be passed to `written`, and the number of slots.
        """

    @eager
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes new items to explicit indices.

        The items get the default priority, and the write is counted.

        Args:
            cursor: an int for one item, or a slice, range, list, array or tensor of ints or
                booleans for a batch. If an index occurs twice, the last item is written.
            data: the item or batch. A list is a list of items.
            set_cursor: has no effect. The ring's own position never moves in this method.

        Raises:
            IndexError: an index is beyond the capacity. A list storage raises RuntimeError instead,
                and also for an index that would leave a gap.
            SchemaMismatchError: the leaves do not match, or there is a new key in a shared storage.
            ValueError: the number of items differs from the number of indices.

        If an error is raised, nothing is changed.
        """
        self.put(cursor, data, in_place=False)

    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """Returns the index of the items that `append` has written.

        Args:
            first: the first result of `append`.
            count: the second result of `append`.
            single: True if `append` was called with ``single=True``.

        Returns:
            Element numbers int64 ``[count]``, or an int if ``single`` is True. If the storage has
            lanes, coordinates int64 ``[count * lanes, ndim]``.
        """
        mover = self._mover or self.mover()
        if mover is None:  # nothing was written, because an empty list does not create a ring
            return cpu.empty(0, dtype=torch.int64)
        capacity = mover.ring.capacity
        start = first % capacity
        if mover.lanes:
            width = mover.ring.width
            elements = np.arange(start * width, (start + count) * width) % (capacity * width)
            return self.index(torch.from_numpy(elements))
        if single:
            return start  # type: ignore[no-any-return]
        index = np.arange(start, start + count)
        return torch.from_numpy(index % capacity if start + count > capacity else index)

    def index(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns element numbers ``[n]`` as the index of a write.

        The result is coordinates ``[n, ndim]`` if the storage has lanes.
        """
        lanes = self.lanes()
        return torch.stack(unravel(elements, lanes), -1) if lanes else elements

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items."""
        mover = self._mover or self.mover()
        if mover is not None:
            mover.forget(keep_write_count=keep_write_count)

    # -- reading -------------------------------------------------------------------------------

    @eager
    def get(self, index: Any) -> Any:
        """Returns items by index.

        Args:
            index: int, slice, range, list, array or tensor of ints or booleans, or a tuple of these
                if the storage has several dimensions. A mask has the length of the storage.

        Returns:
            The data in the form in which they were written. Several items of a list storage are a
                list, or a lazy stack if it is a `LazyStackStorage`. An int or a slice returns views
                if the storage is not shared. Otherwise, the result is a validated copy.

        Raises:
            IndexError: a slot contains no item. A slice skips such slots instead.
            EmptyBufferError: nothing was ever written.
            RuntimeError: the index has more dimensions than the storage.
        """
        return self.uncollated(RingBacked.fetch(self, index))

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """Returns one item for an int, or several items in a form that `collate` accepts.

        If ``views`` is None, the items are copies if the storage is shared.
        """
        as_views = not self.shared if views is None else views
        mover = self._mover or self._require_mover(index)
        return self.to_device(mover.fetch(index, dim_extend=dim_extend, as_views=as_views))

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """Copies elements that a sampler has chosen. Returns None if one of them was replaced."""
        mover = self._mover or self._require_mover()
        elements = index
        if mover.lanes or not is_plain(index):
            elements = torch.from_numpy(ravel(index, mover.lanes))
        found = mover.read_chosen(elements, tickets)
        return None if found is None else self.to_device(mover.build(found, tuple(elements.shape)))

    def tickets(self, index: Any) -> torch.Tensor:
        """Returns the tickets of the items at ``index``, int64 ``[n]``, or -1 for an empty slot.

        A custom sampler can return the tickets as ``"index_generation"`` to identify its items.
        """
        mover = self._require_mover()
        slots = ravel(index, mover.lanes) // mover.ring.width
        return torch.from_numpy(tickets_at(mover.ring, slots))

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """Chooses elements and reads them in one native call; see `Storage.draw`."""
        mover = self._mover or self.mover()
        if mover is None:
            raise EmptyBufferError("Cannot sample from an empty storage; write to it first")
        found, index, tickets, weights = mover.sample(count, key, beta)
        return self.to_device(mover.build(found, (count,))), index, tickets, weights

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields validated copies of all items in storage order, ``chunk`` slots at a time."""
        ring = self.ring()
        for start in range(0, 0 if ring is None else extent(ring), chunk):
            yield self.fetch(slice(start, start + chunk), views=False)

    def to_device(self, data: Any) -> Any:
        """Moves ``data`` to the storage's device. By default, returns ``data`` unchanged."""
        return data

    # -- clients ---------------------------------------------------------------------------------

    def cleanup(self) -> bool:
        """Removes the files of the storage from disk. The storage cannot be used afterwards.

        Returns False if there are no files. Can be called again.
        """
        return False if self._engine is None else self._engine.cleanup()

    def close(self) -> None:
        """Closes the handle and unmaps the files, which keep all committed items.

        Can be called again.
        """
        if self._engine is not None:
            self._engine.close()

    def _unwritten_message(self) -> str:
        return (
            f"this {type(self).__name__} cannot be sent to another process before the first write, "
            "unless it is created with shared_init=True"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is None:
            if self.shared or get_spawning_popen() is not None:
                raise RuntimeError(
                    f"{self._unwritten_message()}; the other process would create another buffer"
                )
            warnings.warn(
                f"nothing was written to this {type(self).__name__} yet, so unpickling it creates "
                "another storage; to share this one, write first, or use shared_init=True",
                stacklevel=2,
            )
        here = ("_table_owner", "_mover", "described")
        state = {**super().__getstate__(), **dict.fromkeys(here)}
        state.pop("_opening", None)
        return state
