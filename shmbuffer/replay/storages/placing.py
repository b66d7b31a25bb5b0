"""Writes at given places: which slots are meant, which rows go there, and columns that are new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.replay.form.leaves import Leaves
from shmbuffer.replay.storages.held_rows import HeldRows
from shmbuffer.replay.storages.indexing import extent, holds
from shmbuffer.replay.storages.rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring


def place(rows: Rows, slots: NDArray[np.int64], data: Any, *, in_place: bool) -> None:
    """Write row i of ``data`` to ``slots[i]``; of a slot that is named twice, the last row.

    Args:
        rows: where to.
        slots: int64 ``[n]``.
        data: a batch of n.
        in_place: items that are there keep their priority and are not counted as written.
    """
    if len(np.unique(slots)) < len(slots):
        last = len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]
        slots, data = slots[last], rows_of(rows.leaves, data, last)
    present = holds(rows.ring, slots)
    if not in_place or present.all():
        rows.place(slots, data, in_place=in_place)
        return
    for which, keeps in ((np.nonzero(~present)[0], False), (np.nonzero(present)[0], True)):
        if len(which):
            rows.place(slots[which], rows_of(rows.leaves, data, which), in_place=keeps)


def slots_of(cursor: Any, ring: Ring) -> NDArray[np.int64]:
    """The slots of a write.

    Args:
        cursor: int, range, slice, list, array or tensor; booleans are a mask. A slice without an
            end (or with one that counts from the end) names the slots that hold an item.
        ring: where to.

    Raises:
        IndexError: beyond the capacity.
    """
    if isinstance(cursor, slice):
        open_end = cursor.stop is None or cursor.stop < 0
        slots = np.arange(extent(ring) if open_end else ring.capacity, dtype=np.int64)[cursor]
        return slots[holds(ring, slots)] if open_end else slots
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.detach().cpu().numpy()
    slots = np.asarray(list(cursor) if isinstance(cursor, range) else cursor)
    if slots.dtype == np.bool_:
        slots = np.nonzero(slots)[0]
    slots = np.ascontiguousarray(slots, dtype=np.int64).reshape(-1)
    if (slots < 0).any():
        slots = np.where(slots < 0, slots + extent(ring), slots)
    if ((slots < 0) | (slots >= ring.capacity)).any():
        raise IndexError(f"{cursor!r} is out of range for {ring.capacity} slots")
    return slots


def is_int(index: Any) -> bool:
    """Whether an index names one slot, so that what belongs there is one item."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0 and index.dtype not in (torch.bool, np.dtype(np.bool_))
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)


def as_batch(leaves: Leaves, data: Any) -> Any:
    """One item as a batch of one."""
    values, _ = leaves.values(data, torch.Size(()))
    return leaves.build([value.unsqueeze(0) for value in values], (1, *leaves.lanes))


def rows_of(leaves: Leaves, data: Any, which: NDArray[np.int64]) -> Any:
    """Some rows of a batch, as a batch."""
    values, _ = leaves.values(data)
    chosen = torch.from_numpy(which)
    parts = [value[chosen.to(value.device)] for value in values]
    return leaves.build(parts, (len(which), *leaves.lanes))


def widened(rows: Rows, wider: Leaves) -> Rows | None:
    """The same rows with a column more for each leaf that is new; zeros where nothing was written.

    Args:
        rows: what is there.
        wider: the leaves of a write.

    Returns:
        None if the write differs in more than new leaves.
    """
    have = {
        leaf.path: (leaf, column)
        for leaf, column in zip(rows.leaves.leaves, rows.views(), strict=True)
    }
    if not set(have) <= {leaf.path for leaf in wider.leaves} or wider.lanes != rows.leaves.lanes:
        return None
    columns = []
    for at, leaf in enumerate(wider.leaves):
        known, column = have.get(leaf.path, (leaf, None))
        if known != leaf:
            return None
        if column is None:
            column = wider.column(at, (rows.ring.capacity, *wider.lanes), rows.leaves.device)
        columns.append(column)
    wider.device = rows.leaves.device
    return HeldRows(rows.ring, wider, columns)
