"""Saved columns into a storage: checked first, then copied, each item to its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import BufferInUseError, SchemaMismatchError
from shmbuffer.replay.checkpointers.saved import Saved
from shmbuffer.replay.checkpoints import Loaded
from shmbuffer.replay.form.nodes import TensorDictNode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.replay.checkpointers.record import Record

# Sources of items that were loaded: beyond those that a directory gives to its clients.
_FIRST_SOURCE = 2**48


class _Rolled:
    """A column of a ring that has gone round, oldest item first; copied where it is looked at."""

    def __init__(self, column: Any, shift: int, slots: int) -> None:
        self._column, self._shift, self._slots = column, shift, slots

    def __getitem__(self, where: torch.Tensor) -> Any:
        return self._column[(where + self._shift) % self._slots]


def restore(storage: Any, saved: Saved) -> Loaded:
    """Put what was saved in place of what ``storage`` has; it is defined first if it is not.

    Items keep their slots. Where the capacity is another one and the ring had gone round, they
    are put in the order of their age, from slot 0 on.

    Raises:
        SchemaMismatchError: other leaves, or other lanes; nothing was changed.
        ValueError: more than there is room for; nothing was changed.
        BufferInUseError: other processes use the storage; nothing was changed.
    """
    record = saved.record
    rows = storage.rows
    if len(record.lanes) != storage.ndim - 1:
        raise SchemaMismatchError(
            f"{saved.where}: holds a storage of {1 + len(record.lanes)} dimensions, and this one "
            f"has ndim={storage.ndim}; load it into one of the same. Nothing was changed"
        )
    if rows is None:
        example = saved.example()
        _place(record, -(-storage.max_size // record.width), saved.where)  # before anything is made
        storage.define(example)
        rows = storage.rows
    columns: list[Any] = saved.columns(rows.leaves)
    slots = rows.ring.capacity
    present, cursor, shift = _place(record, slots, saved.where)
    require_alone(storage)
    if shift:
        columns = [_Rolled(column, shift, record.slots) for column in columns]
    storage.notify_emptied()
    rows.copy_in(columns, present, cursor=cursor, write_count=record.written)
    _tell(storage, record, shift)
    return Loaded(cursor, record.slots, record.width, shift)


def adopt(storage: Any, saved: Saved) -> Loaded:
    """Take over a directory that TorchRL has written, with its items where they are.

    Raises:
        ValueError: the storage has another capacity; nothing was changed.
    """
    record = saved.record
    if -(-storage.max_size // record.width) != record.slots:
        raise ValueError(
            f"{saved.where}: holds a storage of {record.slots * record.width} elements, and this "
            f"one has max_size={storage.max_size}; give the same, or load from another directory"
        )
    example = saved.example()
    storage.open_there()
    storage.define(example)
    require_alone(storage)
    rows = storage.rows
    columns = saved.columns(rows.leaves)
    present, cursor, _ = _place(record, record.slots, saved.where)
    # TorchRL has other names for the tensors of a PyTree than we have.
    lies_there = isinstance(rows.leaves.node, TensorDictNode)
    rows.copy_in(
        None if lies_there else columns, present, cursor=cursor, write_count=record.written
    )
    _tell(storage, record, 0)
    return Loaded(cursor, record.slots, record.width)


def _tell(storage: Any, record: Record, shift: int) -> None:
    """Say who wrote the items, and let samplers know of them."""
    ring: Ring = storage.ring
    if record.sources is not None:
        sources = np.roll(record.sources, -shift)[: ring.capacity]
        held = np.nonzero(sources >= 0)[0]
        ring.sources[held] = as_loaded(sources[held])
    elements = torch.from_numpy(ring.committed())
    if len(elements):
        storage.notify(storage.index(elements))


def as_loaded(sources: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Numbers that no client of this buffer has or gets; the same where they were the same."""
    _, numbers = np.unique(sources, return_inverse=True)
    unknown = sources == 0
    numbers[unknown] = len(sources) + np.arange(int(unknown.sum()))
    return (numbers + _FIRST_SOURCE).astype(np.uint64)


def _place(record: Record, slots: int, where: str) -> tuple[np.ndarray[Any, Any], int, int]:
    """Where the items go in a storage of ``slots``: the mask, the next slot, and the shift."""
    present, shift = record.present, 0
    cursor = record.extent % record.slots if record.cursor is None else record.cursor
    if slots != record.slots and record.is_full:
        shift = cursor
        present = np.roll(present, -shift)
        cursor = len(np.trim_zeros(present.astype(np.uint8), "b"))
    extent = len(np.trim_zeros(present.astype(np.uint8), "b"))
    if extent > slots:
        raise ValueError(
            f"{where}: has items in {extent} slots, and the storage has room for {slots}; load it "
            "into a larger one. Nothing was changed"
        )
    mask = np.zeros(slots, np.bool_)
    mask[:extent] = present[:extent]
    return mask, cursor % slots, shift


def require_alone(storage: Any) -> None:
    """BufferInUseError if another handle is open on the storage: it would see a mixture."""
    engine = storage.open_engine
    if engine is None or len(engine.registry.alive()) <= 1:
        return
    pids = engine.registry.pids()
    raise BufferInUseError(
        f"{storage.where}: a checkpoint can only be loaded while nobody else uses the buffer, and "
        f"processes {', '.join(map(str, pids))} do; end them first, or load into a new buffer",
        pids=pids,
    )
