"""Resolves an index to the elements that it selects, their shape, and a view of them.

An index selects slots. A tuple selects along several dimensions of the storage. A slice skips slots
without an item, and any other index of such a slot raises IndexError. Negative numbers count from
the end of the items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.items import indices
from shmbuffer.memory import Ring
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.tensors.form.tensors import require_memory


class Selection(NamedTuple):
    """The elements that an index selects."""

    elements: Ints
    """Numbers of the elements (slot * lanes + lane), as a one-dimensional array."""
    lead: tuple[int, ...]
    """Shape of the selection. The product of the sizes is ``len(elements)``."""
    view: Callable[[torch.Tensor], torch.Tensor] | None
    """Function that selects the elements from a leaf ``[slots, *lanes, ...]`` as a view.

    It is None if the selection cannot be a view.
    """
    skips: bool
    """True for a slice, which skips slots without an item instead of raising an error."""


def select(index: Any, ring: Ring, lanes: tuple[int, ...], dim_extend: int = 0) -> Selection:
    """Resolves an index.

    Args:
        index: int, slice, sequence, mask or tuple; see `RingBacked.get`.
        ring: ring of the storage.
        lanes: sizes of the storage's dimensions after the first.
        dim_extend: dimension along which an index that is not a tuple selects.

    Cost: constant for an int, O(capacity) for a tuple.

    Raises:
        IndexError: the index is invalid, or selects a slot without an item.
    """
    if is_int(index):
        index = int(index)
    if index is Ellipsis:
        index = slice(None)
    if not dim_extend and _is_coordinates(index, lanes):
        elements = ravel(index, lanes)
        _check(elements // ring.width, ring, index)
        return Selection(elements, (len(elements),), None, False)
    if dim_extend or (isinstance(index, tuple) and len(index) != 1):
        return _in_grid(index, ring, lanes, dim_extend)
    if isinstance(index, tuple):
        index = index[0]
    if isinstance(index, (int, np.integer)):
        slot = int(index) + (extent(ring) if index < 0 else 0)
        _check(np.array([slot]), ring, index)
        return _whole_slots(np.array([slot]), ring, lanes, (), lambda leaf: leaf[slot])
    if isinstance(index, slice):
        slots = np.ascontiguousarray(np.arange(extent(ring), dtype=np.int64)[index])
        present = slots[ring.live.holds(slots)] if ring.length < ring.elements else slots
        view = None
        if len(present) == len(slots) and _has_positive_step(index):
            part = slice(*index.indices(extent(ring)))
            view = lambda leaf: leaf[part]  # noqa: E731
        return _whole_slots(present, ring, lanes, (len(present),), view, skips=True)
    chosen = integers(index, extent(ring))
    _check(chosen, ring, index)
    return _whole_slots(chosen.ravel(), ring, lanes, chosen.shape, None)


def slots_of(cursor: Any, ring: Ring) -> Ints:
    """Returns the slots that a write to the index ``cursor`` changes."""
    if isinstance(cursor, slice):
        open_end = cursor.stop is None or cursor.stop < 0
        slots = np.arange(extent(ring) if open_end else ring.capacity, dtype=np.int64)[cursor]
        return slots[ring.live.holds(slots)] if open_end else slots
    slots = integers(cursor, extent(ring)).reshape(-1)
    if ((slots < 0) | (slots >= ring.capacity)).any():
        raise IndexError(f"index {cursor!r} is out of range for {ring.capacity} slots")
    return slots


def is_int(index: Any) -> bool:
    """True if an index selects a single slot, so that one item is written to it."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0 and index.dtype not in _BOOLS
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)


def extent(ring: Ring) -> int:
    """Returns the number of the last slot that contains an item, plus one."""
    lanes = ring.width
    length = ring.length
    if length == ring.elements:
        return int(ring.capacity)
    head = ring.head
    if head <= ring.capacity and length == head * lanes:  # filled in order, not wrapped
        return int(head)
    committed = ring.live.committed_slots()
    return int(committed[-1]) + 1 if len(committed) else 0


def tickets_at(ring: Ring, slots: Ints) -> Ints:
    """Returns the current ticket of each slot, or -1 for an empty slot."""
    _core.fence()  # SYNC slot-claim, acquire
    words = ring.live.words[slots]
    _core.fence()  # SYNC slot-commit, acquire
    return np.where(slot_words.committed(words), slot_words.tickets(words), -1)


def is_one(index: Any) -> bool:
    """True if an index selects one item. The index can be a tuple with one int."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    return is_int(index)


def ravel(index: Any, lanes: tuple[int, ...]) -> Ints:
    """Converts the index of a sample or a write to element numbers, contiguous int64 ``[n]``."""
    return indices.ravel(index, lanes, as_array)


def meant(index: Any, generation: Any, lanes: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Converts the index and the generation of a sample to element numbers and tickets.

    Both results are int64 ``[n]``.
    """
    elements, tickets = ravel(index, lanes), ravel(generation, ())
    if len(tickets) != len(elements):
        raise RuntimeError(
            f"got {len(tickets)} generations for {len(elements)} items; pass the generations of "
            "the same sample"
        )
    return elements, tickets


_BOOLS = (torch.bool, np.dtype(np.bool_))


def _is_coordinates(index: Any, lanes: tuple[int, ...]) -> bool:
    """True for an index from a sampler, which is a tuple with a tensor ``[n]`` per dimension."""
    return (
        bool(lanes)
        and isinstance(index, tuple)
        and len(index) == len(lanes) + 1
        and all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in index)
        and all(int(part.min()) >= 0 for part in index if part.numel())
    )


def as_array(index: Any) -> NDArray[Any]:
    """Converts a list, range, array or tensor of numbers or booleans to an array."""
    if isinstance(index, torch.Tensor):
        if not index.is_cpu or not index.data_ptr():
            require_memory(index)
            index = index.cpu()
        array: NDArray[Any] = index.numpy()
        return array
    return np.asarray(index)


def integers(index: Any, end: int) -> Ints:
    """Converts an index or a mask to slot numbers. Negative numbers count from ``end``.

    Raises IndexError if the index is not of integers, or if the mask has another length.
    """
    chosen = as_array(index)
    if chosen.dtype == np.bool_:
        if chosen.shape != (end,):
            raise IndexError(
                f"a boolean mask must have the shape {(end,)}, one value per slot, got "
                f"{chosen.shape}"
            )
        return np.nonzero(chosen)[0].astype(np.int64)
    if chosen.size and not np.issubdtype(chosen.dtype, np.integer):
        raise IndexError(
            f"{index!r} is not an index: an index consists of integers, booleans, slices, or "
            "tuples of them"
        )
    chosen = chosen.astype(np.int64)
    return np.where(chosen < 0, chosen + end, chosen)


def _check(slots: Ints, ring: Ring, index: Any) -> None:
    outside = (slots < 0) | (slots >= ring.capacity)
    if outside.any():
        raise IndexError(f"index {index!r} is out of range for {ring.capacity} slots")
    absent = slots.ravel()[~ring.live.holds(slots.ravel())]
    if len(absent):
        raise IndexError(f"there is no item at {int(absent[0])} (the index was {index!r})")


def _whole_slots(
    slots: Ints,
    ring: Ring,
    lanes: tuple[int, ...],
    lead: tuple[int, ...],
    view: Callable[[torch.Tensor], torch.Tensor] | None,
    *,
    skips: bool = False,
) -> Selection:
    width = ring.width
    elements = slots
    if width != 1:
        elements = (slots[:, None] * width + np.arange(width)).ravel()
    return Selection(elements, (*lead, *lanes), view, skips)


def _in_grid(index: Any, ring: Ring, lanes: tuple[int, ...], dim_extend: int) -> Selection:
    end = extent(ring)
    grid = np.arange(end * ring.width, dtype=np.int64).reshape(end, *lanes).swapaxes(0, dim_extend)
    if isinstance(index, tuple):
        index = tuple(as_array(part) if isinstance(part, torch.Tensor) else part for part in index)
    elif isinstance(index, torch.Tensor):
        index = as_array(index)
    parts = _expand_index(index, grid.ndim)
    if parts is not None and isinstance(parts[dim_extend], slice):
        slots = np.arange(end)[parts[dim_extend]]
        present = slots[ring.live.holds(slots)]
        if len(present) < len(slots):  # a slice skips slots without an item
            grid = grid.take(present, axis=dim_extend)
            parts = (*parts[:dim_extend], slice(None), *parts[dim_extend + 1 :])
            chosen = np.asarray(grid[parts])
            return Selection(np.ascontiguousarray(chosen.ravel()), chosen.shape, None, False)
    chosen = np.asarray(grid[index])
    _check(chosen // ring.width, ring, index)
    view = None
    parts = index if isinstance(index, tuple) else (index,)
    if all(isinstance(part, int) or _has_positive_step(part) for part in parts):
        view = lambda leaf: leaf[:end].transpose(0, dim_extend)[index]  # noqa: E731
    return Selection(np.ascontiguousarray(chosen.ravel()), chosen.shape, view, False)


def _has_positive_step(part: Any) -> bool:
    """True for a slice with a positive step, which is the only kind that torch supports."""
    return isinstance(part, slice) and (part.step or 1) > 0


def _expand_index(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """Expands an index to a tuple with one part per dimension.

    Returns None if this is impossible, because a part adds or combines dimensions.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or np.ndim(part) > 1 for part in parts if not isinstance(part, slice)):
        return None
    selectors = [part for part in parts if part is not Ellipsis]
    if len(selectors) > ndim or len(parts) - len(selectors) > 1:
        return None
    rest = (slice(None),) * (ndim - len(selectors))
    if len(selectors) == len(parts):
        return (*selectors, *rest)
    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    return (*parts[:at], *rest, *parts[at + 1 :])


def is_plain(index: Any) -> bool:
    """True if the C core accepts the index unchanged."""
    return (
        type(index) is torch.Tensor
        and index.dtype is torch.int64
        and index.dim() == 1
        and index.is_cpu
        and index.is_contiguous()
    )
