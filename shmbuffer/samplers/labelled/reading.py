"""Reads one entry of items of any form, and the tickets that the items had then.

What is read is copied first and compared with the words behind it, so that what a writer has torn
meanwhile is left out: it is told of again at the next look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.record_format.chunks import Codec
from shmbuffer.storages.record_store import RecordStore
from shmbuffer.storages.rows import Rows
from shmbuffer.tensors.form.nodes import entry_at, is_collection
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor

Column = NDArray[Any] | list[Any]
_READ = {*((kind, size) for kind in "iu" for size in (1, 2, 4, 8)), ("f", 4), ("f", 8)}
"""Kinds and sizes of numbers that the core reads."""


def entries_of(
    mover: Any, paths: Sequence[KeyPath], slots: Ints, seen: int
) -> tuple[list[Column], Flags]:
    """Entries of the items with tickets below ``seen``.

    Returns:
        For each path numbers ``[elements, k]``, or an object an element; and which slots had such
        an item while they were read.

    Raises:
        KeyError: an item does not have an entry.
    """
    found, tickets = mover.entries(slots, paths)
    if isinstance(mover, RecordStore) and not all(map(_are_numbers, found)):
        kept, known, _ = mover.read(torch.from_numpy(slots))  # text and objects: whole records
        tickets = known.numpy()
        items = mover.codec.decoder.items(mover.some(kept, tickets >= 0))
        found = [[entry_at(item, path) for item in items] for path in paths]
    columns = [as_column(values, path) for values, path in zip(found, paths, strict=True)]
    there: Flags = tickets < seen
    if not there.all():
        which = there[tickets >= 0].repeat(mover.ring.width)
        columns = [_some(column, which) for column in columns]
    return columns, there & (tickets >= 0)


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
        at = mover.leaf_at(path)
        column = None if at is None else mover.contiguous(at)
        if at is None or column is None:
            return None
        dtype = as_numbers(column[:0]).dtype
        kind = {"b": "u"}.get(dtype.kind, dtype.kind)
        size = dtype.itemsize
        if size != column.element_size() or (kind, size) not in _READ:
            return None
        numbers = math.prod(mover.leaves.leaves[at].shape)
        if numbers > 1 and not found:
            return None
        found += [column.data_ptr(), *((numbers,) if found else ()), size, kind]
    if len(paths) == 1:
        found += [0, 0, 1, "u"]
    return (*found, 0 if means is None else means.ctypes.data, b"", b"", 0)


def _of_records(store: RecordStore, path: KeyPath) -> tuple[Any, ...] | None:
    """Where the number of a label lies in records; None if it is compressed."""
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


def as_column(values: Any, path: KeyPath) -> Column:
    """The entries of some items at a path; KeyError if an item has none."""
    if values is None or (isinstance(values, list) and any(value is None for value in values)):
        name = repr(path[0] if len(path) == 1 else path)
        raise KeyError(
            f"the items have no entry {name}, by which the sampler tells them apart; write it with "
            "every item, or name another entry"
        )
    return _stacked(values) if _are_numbers(values) else [_as_object(value) for value in values]


def _some(column: Column, which: Flags) -> Column:
    if isinstance(column, np.ndarray):
        chosen: NDArray[Any] = column[which]
        return chosen
    return [value for value, there in zip(column, which.tolist(), strict=True) if there]


def _as_object(value: Any) -> Any:
    """A key that Python can compare: of a tensor its number, or a tuple of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    elif is_collection(value) and hasattr(value, "data"):
        value = value.data
    return tuple(value) if isinstance(value, list) else value


def _are_numbers(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return bool(values.dtype.kind != "O")
    return all(
        isinstance(value, (torch.Tensor, np.ndarray, np.generic, bool, int, float))
        and not (isinstance(value, np.ndarray) and value.dtype.kind not in "biuf")
        for value in values
    )


def _stacked(values: Any) -> NDArray[Any]:
    """Numbers ``[n, k]``."""
    if not len(values):
        return np.zeros((0, 1), np.int64)
    if isinstance(values, np.ndarray):
        return values.reshape(len(values), -1)
    parts = [as_numbers(as_tensor(value)).reshape(-1) for value in values]
    if len({len(part) for part in parts}) > 1:
        raise ValueError("an entry that names versions or groups has one shape in all items")
    return np.stack(parts)
