"""Reads single entries of the items in a storage, without the other entries of these items.

Slice samplers need one or two small entries (``done``, a trajectory id) of every item, and some
flags of the drawn items. Samplers by version or by group need a label of every item.

    RowEntries     reads the entries of rows in place
    KeptEntries    reads each record or object once, and caches its entries by ticket
    labels_of      reads the labels of new items, as numbers or as objects
    columns_of     returns the addresses of labels, so that the core can read them in place

`ForeignItems` reads items of storages of other packages, and items that are arbitrary objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.items.form.nodes import LEAF
from shmbuffer.items.indices import elements_of
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath, key_of
from shmbuffer.memory.record_format.chunks import Codec
from shmbuffer.storages.movers.record_store import RecordStore
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import entry_at, is_collection
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor

Column = NDArray[Any] | list[Any]

_PIECE_BYTES = 2**24  # approximate number of bytes of records that are read together
_NUMBERS = (torch.Tensor, np.ndarray, np.generic, bool, int, float)
_READ = {*((kind, size) for kind in "iu" for size in (1, 2, 4, 8)), ("f", 4), ("f", 8)}
"""NumPy kinds and sizes in bytes of the numbers that the core can read."""


class RowEntries:
    """Reads the entries of rows in place.

    Args:
        rows: the mover of the storage's rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        leaves = rows.leaves
        self._at: dict[KeyPath, int] = {}  # number of the leaf at each path
        if leaves.node is not LEAF:  # an item that is a single tensor has no entries
            self._at = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}

    @property
    def elements(self) -> int:
        """Number of elements in the storage."""
        return self._rows.ring.elements

    def shape(self, path: KeyPath) -> tuple[int, ...]:
        """Returns the shape of the entry at a path, for one element."""
        return tuple(self._rows.leaves.leaves[self._at[path]].shape)

    def column(self, path: KeyPath) -> torch.Tensor | None:
        """Returns a view of an entry for all elements, or None if it is not contiguous."""
        return self._rows.contiguous(self._at[path])

    def has(self, path: KeyPath) -> bool:
        """True if the items have a tensor at this path."""
        return path in self._at

    def read(self, slots: Ints) -> None:
        """Does nothing, because entries are read in place."""

    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """Returns a copy of an entry for ``n`` slots, flattened to ``[n, lanes, numbers]``."""
        width = self._rows.ring.width
        found = self._rows.take(self._at[path], elements_of(slots, width))
        return as_numbers(found).reshape(len(slots), width, -1)

    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """Returns a copy of an entry for ``n`` elements, with shape ``[n, *shape]``."""
        return self._rows.take(self._at[path], elements)


class KeptEntries:
    """Reads the entries of each record or object once, and caches them by ticket.

    Args:
        items: the mover of the storage, or `ForeignItems`.
        capacity: number of slots.
        paths: paths of the entries.
    """

    def __init__(self, items: Any, capacity: int, paths: Sequence[KeyPath]) -> None:
        self._items = items
        self._paths = paths
        self._tickets = np.full(capacity, -1, np.int64)  # ticket of the cached item in each slot
        self._columns = {path: _KeptColumn(path, capacity) for path in paths}

    def read(self, slots: Ints) -> None:
        """Reads the items in the given slots that are not in the cache."""
        ring = self._items.ring
        now = 0 if ring is None else slot_words.tickets(ring.live.words[slots])
        new = np.unique(slots[now != self._tickets[slots]])
        for part in self._pieces(new) if len(new) else ():
            found, tickets = self._items.entries(part, self._paths)
            there = tickets >= 0
            for path, values in zip(self._paths, found, strict=True):
                self._columns[path].lose(part[~there])
                self._columns[path].put(part[there], values)
            self._tickets[part] = tickets  # written last, because other threads read tickets first

    def _pieces(self, slots: Ints) -> list[Ints]:
        """Divides slots into pieces whose records have about `_PIECE_BYTES` bytes each."""
        if not isinstance(self._items, RecordStore):
            return [slots]
        nbytes = self._items.records.extents["bytes"][slots].astype(np.int64)
        piece = np.cumsum(np.clip(nbytes, 0, _PIECE_BYTES)) // _PIECE_BYTES
        return np.split(slots, np.flatnonzero(np.diff(piece)) + 1)

    def has(self, path: KeyPath) -> bool:
        """True if all cached items have a tensor at this path."""
        return path in self._columns and self._columns[path].is_in_all()

    def at(self, path: KeyPath, slots: Ints) -> NDArray[Any]:
        """Returns a copy of an entry for ``n`` slots, flattened to ``[n, lanes, numbers]``."""
        return np.asarray(self._columns[path].values[slots])

    def take(self, path: KeyPath, elements: Ints) -> torch.Tensor:
        """Returns a copy of an entry for ``n`` elements, with shape ``[n, *shape]``."""
        column = self._columns[path]
        found = torch.from_numpy(column.values[elements])
        return found.reshape(len(elements), *(column.shape or ()))


Entries = RowEntries | KeptEntries


class _KeptColumn:
    """The cached values of one entry, for all slots.

    Args:
        path: path of the entry.
        capacity: number of slots.
    """

    def __init__(self, path: KeyPath, capacity: int) -> None:
        self._path = path
        self._lacks = np.zeros(capacity, np.bool_)  # True for cached items without the entry
        self._without = 0  # number of cached items without the entry
        self.values: NDArray[Any] = np.zeros((capacity, 1, 0), np.bool_)
        self.shape: tuple[int, ...] | None = None  # shape of the entry; None before the first value

    def lose(self, slots: Ints) -> None:
        """Removes the items in the given slots from the cache."""
        self._without -= int(self._lacks[slots].sum())
        self._lacks[slots] = False

    def put(self, slots: Ints, values: Any) -> None:
        """Stores the entry of the items in the given slots.

        Args:
            slots: the slots, int64 ``[n]``.
            values: an array or tensor ``[n, ...]``, a list with one value per item, or None. A
                value that is not numeric counts as missing.
        """
        self.lose(slots)
        if isinstance(values, torch.Tensor | np.ndarray):
            there, rows = np.ones(len(slots), np.bool_), as_tensor(values).detach().cpu()
        else:
            each = [None] * len(slots) if values is None else list(values)
            there = np.array([_is_number(value) for value in each], np.bool_)
            self._lacks[slots] = ~there
            self._without += int((~there).sum())
            tensors = [as_tensor(value).detach().cpu() for value in each if _is_number(value)]
            for tensor in tensors:
                self._require_shape(tensor.shape)
            rows = torch.stack(tensors) if tensors else cpu.empty(0, dtype=torch.bool)
        if not len(rows):
            return
        self._require_shape(rows.shape[1:])
        numbers = as_numbers(rows).reshape(len(rows), 1, -1)
        if not self.values.shape[-1]:
            self.values = np.zeros((len(self._lacks), *numbers.shape[1:]), numbers.dtype)
        dtype = np.result_type(self.values, numbers)
        if dtype != self.values.dtype:
            self.values = self.values.astype(dtype)
        self.values[slots[there]] = numbers

    def _require_shape(self, shape: Sequence[int]) -> None:
        """Raises RuntimeError if a value does not have the shape of earlier values."""
        self.shape = tuple(shape) if self.shape is None else self.shape
        if tuple(shape) != self.shape:
            raise RuntimeError(
                f"the entry {key_of(self._path)!r}, which ends trajectories, has shape "
                f"{list(shape)} in one item and {list(self.shape)} in another; use the same shape "
                "in all items"
            )

    def is_in_all(self) -> bool:
        """True if every cached item has the entry."""
        return self.shape is not None and not self._without


class ForeignItems:
    """Reads complete items of any storage with ``storage.get``."""

    ring = None

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def entries(self, slots: Ints, paths: Sequence[KeyPath]) -> tuple[list[Any], Ints]:
        """Returns entries and tickets of the items in the given slots, like the method of a mover.

        All tickets are 0, so that `KeptEntries` reads each item once.
        """
        data = self._storage.get(torch.from_numpy(slots))
        return [entries_in(data, path) for path in paths], np.zeros_like(slots)


def entries_in(data: Any, path: KeyPath) -> Any:
    """Returns an entry of a batch, or a list with the entry of each item in a list.

    If the batch or an item does not have the entry, None is returned for it.
    """
    if isinstance(data, list | tuple):
        return [entry_at(item, path) for item in data]
    return entry_at(data, path)


def pick(data: Any, path: KeyPath) -> torch.Tensor | None:
    """Returns an entry of a batch, or of a list of items, as a tensor on the CPU.

    Returns None if the entry is missing or is not numeric.
    """
    found = entries_in(data, path)
    if isinstance(found, list):
        if not found or not all(map(_is_number, found)):
            return None
        found = torch.stack([cpu.as_tensor(one) for one in found])
    if _is_number(found):
        found = cpu.as_tensor(found)
    return found.detach().cpu() if isinstance(found, torch.Tensor) else None


def any_of(numbers: NDArray[Any]) -> Flags:
    """Reduces flags to one flag per item: True if any number of the item is not 0.

    Args:
        numbers: ``[slots, lanes, numbers]``.

    Returns:
        bool ``[slots, lanes]``.
    """
    if numbers.shape[-1] != 1:
        return np.asarray(numbers.any(-1))
    return numbers[..., 0] if numbers.dtype == np.bool_ else numbers[..., 0] != 0


# -- labels ----------------------------------------------------------------------------------------


def labels_of(
    mover: Any, paths: Sequence[KeyPath], slots: Ints, seen: int
) -> tuple[list[Column], Flags]:
    """Reads the labels of items with tickets below ``seen``.

    An item that is overwritten during the read is skipped. The next update reads the new item.

    Args:
        mover: the mover of the storage.
        paths: paths of the labels.
        slots: slots of the items.
        seen: smallest ticket that must not be read.

    Returns:
        For each path, numbers ``[elements, k]`` or a list with one object per element, and a flag
        per slot that is True if the labels of its item were read.

    Raises:
        KeyError: an item does not have an entry at one of the paths.
    """
    found, tickets = mover.entries(slots, paths)
    if isinstance(mover, RecordStore) and not all(map(_are_numbers, found)):
        # A label that is text or another object requires the whole record.
        kept, known, _ = mover.read(torch.from_numpy(slots))
        tickets = known.numpy()
        items = mover.codec.decoder.items(mover.select_rows(kept, tickets >= 0))
        found = [entries_in(items, path) for path in paths]
    columns = [as_column(values, path) for values, path in zip(found, paths, strict=True)]
    there: Flags = tickets < seen
    if not there.all():
        which = there[tickets >= 0].repeat(mover.ring.width)
        columns = [_some(column, which) for column in columns]
    return columns, there & (tickets >= 0)


def columns_of(
    mover: Any, paths: Sequence[KeyPath], means: Floats | None
) -> tuple[Any, ...] | None:
    """Returns where the core finds a label of each item, and a value if there is a second path.

    Args:
        mover: the mover of the storage.
        paths: path of the label, and optionally the path of a value.
        means: array in which the core stores values, or None.

    Returns:
        Arguments for the core, or None if the core cannot read these entries. For records, these
        are the locations in the first record. The core reports records with a different layout.
    """
    if isinstance(mover, RecordStore) and len(paths) == 1:
        return _of_records(mover, paths[0])
    if not isinstance(mover, Rows):
        return None
    found: list[Any] = []
    for path in paths:
        at = mover.leaf_at(path)
        column = None if at is None else mover.contiguous(at)
        if at is None or column is None:
            return None
        numbers = as_numbers(column[:0]).dtype
        kind, size = _kind_of(numbers)
        if size != column.element_size() or (kind, size) not in _READ:
            return None
        count = math.prod(mover.leaves.leaves[at].shape)
        if count > 1 and not found:
            return None
        found += [column.data_ptr(), *((count,) if found else ()), size, kind]
    if len(paths) == 1:
        found += [0, 0, 1, "u"]
    return (*found, 0 if means is None else means.ctypes.data, b"", b"", 0)


def _of_records(store: RecordStore, path: KeyPath) -> tuple[Any, ...] | None:
    """Returns where the core finds a label in records; see `columns_of`.

    Returns None if the core cannot read the label, for example because it is compressed.
    """
    found = store.form_and_chunk(path)
    if found is None:
        return None
    form, number = found
    chunk = form.chunks[number]
    if chunk.codec is not Codec.RAW or chunk.kind not in ("tensor", "array"):
        return None
    if chunk.kind == "tensor" and not DTYPES[chunk.dtype].in_numpy:
        return None
    dtype = np.dtype(chunk.dtype)
    kind, size = _kind_of(dtype)
    if (kind, size) not in _READ or not dtype.isnative:
        return None
    steps = form.columns.steps.tobytes()
    return 0, size, kind, 0, 0, 1, "u", 0, steps, form.code, number


def _kind_of(dtype: np.dtype[Any]) -> tuple[str, int]:
    """Returns the kind and the size in bytes of a dtype. The core reads booleans as unsigned."""
    return {"b": "u"}.get(dtype.kind, dtype.kind), dtype.itemsize


def as_column(values: Any, path: KeyPath) -> Column:
    """Converts the entries of items to numbers ``[n, k]``, or to a list of objects.

    Args:
        values: the entries, or None.
        path: path of the entries, for the message.

    Raises:
        KeyError: an item does not have the entry.
    """
    if values is None or (isinstance(values, list) and any(value is None for value in values)):
        name = repr(path[0] if len(path) == 1 else path)
        raise KeyError(
            f"the items have no entry {name}, which the sampler needs; write it with every item, "
            "or choose another entry"
        )
    return _stacked(values) if _are_numbers(values) else [_as_object(value) for value in values]


def _some(column: Column, which: Flags) -> Column:
    """Returns the values of a column that a mask selects."""
    if isinstance(column, np.ndarray):
        chosen: NDArray[Any] = column[which]
        return chosen
    return [value for value, there in zip(column, which.tolist(), strict=True) if there]


def _as_object(value: Any) -> Any:
    """Converts a label to an object that can be hashed and compared, such as a tuple of numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    elif is_collection(value) and hasattr(value, "data"):
        value = value.data
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    """True if a value is a number, a tensor, or an array of numbers."""
    return isinstance(value, _NUMBERS) and not (
        isinstance(value, np.ndarray) and value.dtype.kind not in "biuf"
    )


def _are_numbers(values: Any) -> bool:
    """True if all values of a column are numeric."""
    if isinstance(values, np.ndarray):
        return bool(values.dtype.kind != "O")
    return all(map(_is_number, values))


def _stacked(values: Any) -> NDArray[Any]:
    """Stacks the values of a column into an array ``[n, k]``."""
    if not len(values):
        return np.zeros((0, 1), np.int64)
    if isinstance(values, np.ndarray):
        return values.reshape(len(values), -1)
    parts = [as_numbers(as_tensor(value)).reshape(-1) for value in values]
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            "an entry that contains versions or group keys must have the same shape in all items"
        )
    return np.stack(parts)
