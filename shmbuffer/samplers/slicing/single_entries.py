"""Single entries of the items of a storage, read without the rest of the item.

A slice sampler reads one or two small entries (``done``, a trajectory id) of every item, and some
flags of the items that it draws. Tensors are read where they are. Objects are read whole, all at
once, and records once each; only the entries are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.items.indices import elements_of
from shmbuffer.items.nodes import LEAF
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.leaf import KeyPath, key_of
from shmbuffer.storages.record_store import RecordStore
from shmbuffer.storages.rows import Rows
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.nodes import entry_at
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor, take_rows

_PIECE_BYTES = 2**24  # of records that are read at once


class Entries(ABC):
    """Entries of the items of a storage, by path."""

    @abstractmethod
    def has(self, path: KeyPath) -> bool:
        """True if the items have a tensor there."""

    @abstractmethod
    def read(self, slots: Ints) -> None:
        """Read the new items of these slots."""

    @abstractmethod
    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """A copy of that entry of some slots, ``[n, lanes, numbers]``."""

    @abstractmethod
    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """A copy of that entry of some elements, ``[n, *shape]``."""


class LeafEntries(Entries):
    """Entries of tensors, read where they are stored."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        leaves = rows.leaves
        self._at: dict[KeyPath, int] = {}
        if leaves.node is not LEAF:  # one tensor has no entries
            self._at = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}

    @property
    def elements(self) -> int:
        """Elements of the storage."""
        return self._rows.ring.elements

    def shape(self, path: KeyPath) -> tuple[int, ...]:
        """The shape of an entry of one element."""
        return tuple(self._rows.leaves.leaves[self._at[path]].shape)

    def column(self, path: KeyPath) -> torch.Tensor | None:
        """An entry of all elements; None unless it is contiguous in memory."""
        return self._rows.contiguous(self._at[path])

    def has(self, path: KeyPath) -> bool:
        """See `Entries.has`."""
        return path in self._at

    def read(self, slots: Ints) -> None:
        """See `Entries.read`; nothing is kept."""

    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """See `Entries.at`."""
        width = self._rows.ring.width
        found = self._rows.take(self._at[path], elements_of(slots, width))
        return as_numbers(found).reshape(len(slots), width, -1)

    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """See `Entries.take`."""
        return self._rows.take(self._at[path], elements)


class ObjectEntries(Entries):
    """Entries of items that are objects, read through ``get``."""

    def __init__(self, storage: Any, slots: Ints, paths: Sequence[KeyPath]) -> None:
        items = storage.get(torch.from_numpy(slots))
        found = {path: pick(items, path) for path in paths}
        self._found = {path: entry for path, entry in found.items() if entry is not None}
        self._slots = slots

    def has(self, path: KeyPath) -> bool:
        """See `Entries.has`."""
        return path in self._found

    def read(self, slots: Ints) -> None:
        """See `Entries.read`."""
        at = np.searchsorted(self._slots, slots)
        if not np.array_equal(self._slots[np.minimum(at, len(self._slots) - 1)], slots):
            raise IndexError("an object was written since all were read; read them again")

    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """See `Entries.at`."""
        numbers = as_numbers(self._found[path]).reshape(len(self._slots), 1, -1)
        return np.asarray(numbers[np.searchsorted(self._slots, slots)])

    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """See `Entries.take`."""
        where = np.searchsorted(self._slots, elements)
        return take_rows(self._found[path], torch.from_numpy(where))


class RecordEntries(Entries):
    """Entries of records, read once and kept by ticket; other entries are not decompressed."""

    def __init__(self, store: RecordStore, paths: Sequence[KeyPath]) -> None:
        self._store = store
        self._paths = paths
        self._tickets = np.full(store.max_size, -1, np.int64)  # of what was read
        self._columns = {path: _Column(path, store.max_size) for path in paths}

    def read(self, slots: Ints) -> None:
        """See `Entries.read`."""
        words = self._store.ring.live.words[slots]
        new = np.unique(slots[slot_words.tickets(words) != self._tickets[slots]])
        if not len(new):
            return
        nbytes = self._store.records.extents["bytes"][new].astype(np.int64)
        piece = np.cumsum(np.clip(nbytes, 0, _PIECE_BYTES)) // _PIECE_BYTES
        for part in np.split(new, np.flatnonzero(np.diff(piece)) + 1):
            found, tickets = self._store.entries(part, self._paths)
            there = tickets >= 0
            for path, leaves in zip(self._paths, found, strict=True):
                self._columns[path].lose(part[~there])
                self._columns[path].put(part[there], leaves)
            self._tickets[part] = tickets  # only now: others look at them first

    def has(self, path: KeyPath) -> bool:
        """See `Entries.has`."""
        return path in self._columns and self._columns[path].is_in_all()

    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """See `Entries.at`."""
        return np.asarray(self._columns[path].values[slots])

    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """See `Entries.take`."""
        column = self._columns[path]
        found = torch.from_numpy(column.values[elements])
        return found.reshape(len(elements), *(column.shape or ()))


class _Column:
    """An entry of all slots."""

    def __init__(self, path: KeyPath, capacity: int) -> None:
        self._path = path
        self._lacks = np.zeros(capacity, np.bool_)  # items that were read and do not have it
        self._without = 0  # how many
        self.values: NDArray[Any] = np.zeros((capacity, 1, 0), np.bool_)
        self.shape: tuple[int, ...] | None = None

    def lose(self, slots: Ints) -> None:
        """The items in these slots are gone."""
        self._without -= int(self._lacks[slots].sum())
        self._lacks[slots] = False

    def put(self, slots: Ints, leaves: Sequence[Any] | NDArray[Any]) -> None:
        """Keep the entries of the items in these slots; None: an item has none."""
        there = np.array([leaf is not None for leaf in leaves], np.bool_)
        self.lose(slots)
        self._lacks[slots] = ~there
        self._without += int((~there).sum())
        if not there.any():
            return
        tensors = [as_tensor(leaf).detach().cpu() for leaf in leaves if leaf is not None]
        shape = tuple(tensors[0].shape) if self.shape is None else self.shape
        for tensor in tensors:
            if tensor.shape != shape:
                raise RuntimeError(
                    f"the entry {key_of(self._path)!r} ends trajectories, and its shape is "
                    f"{list(tensor.shape)} in one item and {list(shape)} in another; give it the "
                    "same shape in all items"
                )
        numbers = as_numbers(torch.stack(tensors)).reshape(len(tensors), 1, -1)
        if self.shape is None:
            self.shape = shape
            self.values = np.zeros((len(self._lacks), *numbers.shape[1:]), numbers.dtype)
        dtype = np.result_type(self.values, numbers)
        if dtype != self.values.dtype:
            self.values = self.values.astype(dtype)
        self.values[slots[there]] = numbers

    def is_in_all(self) -> bool:
        """True if every item that was read has it."""
        return self.shape is not None and not self._without


def pick(data: Any, path: KeyPath) -> torch.Tensor | None:
    """An entry of a batch, or of a list of items; None if it is missing or not a tensor."""
    if isinstance(data, (list, tuple)):
        parts = [pick(item, path) for item in data]
        there = [part for part in parts if part is not None]
        return torch.stack(there) if there and len(there) == len(parts) else None
    found = entry_at(data, path)
    if isinstance(found, (np.ndarray, np.generic, bool, int, float)):
        found = cpu.as_tensor(found)
    return found.detach().cpu() if isinstance(found, torch.Tensor) else None


def any_of(numbers: NDArray[Any]) -> Flags:
    """Whether any number of an item is not 0, ``[slots, lanes]``."""
    if numbers.shape[-1] != 1:
        return np.asarray(numbers.any(-1))
    return numbers[..., 0] if numbers.dtype == np.bool_ else numbers[..., 0] != 0
