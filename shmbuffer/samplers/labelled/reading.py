"""One entry of some items, of whatever form they are, and the tickets that they had then.

What is read is copied first and compared with the words behind it, so that what a writer has torn
meanwhile is left out: it is told of again at the next look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.record_format.chunks import Codec
from shmbuffer.storages.item_store import ItemStore
from shmbuffer.storages.record_store import RecordStore
from shmbuffer.storages.rows import Rows
from shmbuffer.tensors.form.nodes import entry_at, is_collection
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor

Column = NDArray[Any] | list[Any]
_READ = {*((kind, size) for kind in "iu" for size in (1, 2, 4, 8)), ("f", 4), ("f", 8)}
"""Kinds and sizes of numbers that the core reads."""


class LabelEntry(NamedTuple):
    """What some items have under one path."""

    column: Column
    """Numbers ``[elements, k]``, or an object an element; of what is not there anything."""
    there: Flags
    """``[slots]``: the item was there while it was read."""


def entries_of(mover: Any, paths: Sequence[KeyPath], slots: Ints, seen: int) -> list[LabelEntry]:
    """The entries of items with tickets below ``seen``.

    Raises:
        KeyError: items that are there do not have one.
    """
    if isinstance(mover, Rows):
        return [_of_rows(mover, path, slots, seen) for path in paths]
    if isinstance(mover, RecordStore):
        found, tickets = mover.entries(slots, paths)
        held = tickets >= 0
        if all(map(_are_numbers, found)):
            return [LabelEntry(_stacked(column, held), held & (tickets < seen)) for column in found]
    assert isinstance(mover, ItemStore)
    kept, known, _ = mover.read(torch.from_numpy(slots))
    tickets = known.numpy()
    there = (tickets >= 0) & (tickets < seen)
    items = iter(_items(mover, mover.some(kept, there), int(there.sum())))
    rows = [next(items) if held else None for held in there.tolist()]
    return [entry_of_items(rows, path, there) for path in paths]


def columns_of(
    mover: Any, paths: Sequence[KeyPath], means: Floats | None
) -> tuple[Any, ...] | None:
    """Where numbers of a label, and of a value, lie in an item, as the core takes them; else None.

    Of records as in the first of them that is there: the core says where one is of another form.
    """
    if isinstance(mover, RecordStore) and len(paths) == 1:
        return _of_records(mover, paths[0])
    if not isinstance(mover, Rows):
        return None
    found: list[Any] = []
    for path in paths:
        at = next((at for at, leaf in enumerate(mover.leaves.leaves) if leaf.path == path), None)
        if at is None or at in mover.leaves.objects:
            return None
        if mover.ring.schema.sharing and path in mover.ring.schema.sharing.paths:
            return None
        column = mover.column(at).detach()
        if not column.is_cpu or not column.is_contiguous():
            return None
        dtype = as_numbers(column[:0]).dtype
        kind = {"b": "u"}.get(dtype.kind, dtype.kind)
        size = dtype.itemsize
        if size != column.element_size() or (kind, size) not in _READ or size == 0:
            return None
        numbers = math.prod(mover.leaves.leaves[at].shape)
        if not numbers or (numbers > 1 and not found):
            return None
        found += [column.data_ptr(), *((numbers,) if found else ()), size, kind]
    if len(paths) == 1:
        found += [0, 0, 1, "u"]
    return (*found, 0 if means is None else means.ctypes.data, b"", b"", 0)


def _of_records(store: RecordStore, path: KeyPath) -> tuple[Any, ...] | None:
    """The same of records, where the number is not compressed."""
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
    kind = {"b": "u"}.get(dtype.kind, dtype.kind)
    if (kind, dtype.itemsize) not in _READ or not dtype.isnative:
        return None
    steps = form.columns.steps.tobytes()
    return 0, dtype.itemsize, kind, 0, 0, 1, "u", 0, steps, form.code, number


def entry_of_items(items: Sequence[Any], path: KeyPath, there: Flags) -> LabelEntry:
    """The same of items that are objects: TensorDicts, or dicts of them."""
    held = there.tolist()
    column = [_pick(item, path) for item, kept in zip(items, held, strict=True) if kept]
    if _are_numbers(column):
        return LabelEntry(_stacked(column, there), there)
    values = iter(column)
    return LabelEntry([_as_object(next(values)) if kept else None for kept in held], there)


def _of_rows(rows: Rows, path: KeyPath, slots: Ints, seen: int) -> LabelEntry:
    ring, width = rows.ring, rows.ring.width
    at = next((at for at, leaf in enumerate(rows.leaves.leaves) if leaf.path == path), None)
    if at is None:
        raise _lacks(path)
    elements = slots if width == 1 else (slots[:, None] * width + np.arange(width)).ravel()
    column: Column
    if at in rows.leaves.objects:
        held: Any = rows.views()[at]  # `Objects`
        column = [_as_object(value) for value in held.view(ring.elements).array[elements]]
    else:
        column = as_numbers(rows.take(at, elements)).reshape(len(elements), -1)
    _core.fence()  # SYNC slot-claim, acquire
    words = ring.live.words[slots]
    there = slot_words.committed(words) & (slot_words.tickets(words) < seen)
    return LabelEntry(column, there)


def _items(mover: Any, kept: Any, count: int) -> list[Any]:
    if not count:
        return []
    if isinstance(mover, RecordStore):
        return mover.codec.decoder.items(kept)
    return [mover.codec.give(one) for one in kept]


def _pick(item: Any, path: KeyPath) -> Any:
    """KeyError where it is not there."""
    found = entry_at(item, path)
    if found is None:
        raise _lacks(path)
    return found


def _as_object(value: Any) -> Any:
    """A key that Python can compare: of a tensor its number, or a tuple of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    elif is_collection(value) and hasattr(value, "data"):
        value = value.data
    return tuple(value) if isinstance(value, list) else value


def _are_numbers(column: Sequence[Any] | NDArray[Any]) -> bool:
    return isinstance(column, np.ndarray) or all(
        isinstance(value, (torch.Tensor, np.ndarray, np.generic, bool, int, float))
        and not (isinstance(value, np.ndarray) and value.dtype.kind not in "biuf")
        for value in column
    )


def _stacked(column: Sequence[Any] | NDArray[Any], held: Flags) -> NDArray[Any]:
    """What the slots have that hold an item, among zeros."""
    if not len(column):
        return np.zeros((len(held), 1), np.int64)
    if isinstance(column, np.ndarray):
        values = column.reshape(len(column), -1)
    else:
        parts = [as_numbers(as_tensor(value)).reshape(-1) for value in column]
        if len({len(part) for part in parts}) > 1:
            raise ValueError("an entry that names versions or groups has one shape in all items")
        values = np.stack(parts)
    if held.all():
        return values
    whole = np.zeros((len(held), values.shape[1]), values.dtype)
    whole[held] = values
    return whole


def _lacks(path: KeyPath) -> KeyError:
    name = repr(path[0] if len(path) == 1 else path)
    return KeyError(
        f"the items have no entry {name}, by which the sampler tells them apart; write it with "
        "every item, or name another entry"
    )
