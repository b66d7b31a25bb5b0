"""Copies a save into a storage. All checks are made before any item is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.errors import BufferInUseError, SchemaMismatchError
from shmbuffer.memory import Ring
from shmbuffer.memory.format import layout
from shmbuffer.saves.checkpointers.saved import Saved
from shmbuffer.saves.checkpointers.saved_storage import Destinations, SavedStorage
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode


def restore(storage: Any, saved: Saved, *, there: bool = False) -> Loaded:
    """Replaces the items of ``storage`` with saved columns; defines the storage if it is new."""
    record, rows = saved.record, storage.mover()
    capacity = -(-storage.max_size // record.width)
    if there and capacity != record.slots:
        raise ValueError(
            f"{saved.where}: contains a storage of {record.slots * record.width} elements, but "
            f"this one has max_size={storage.max_size}; use the same max_size, or load from "
            "another directory"
        )
    if len(record.lanes) != storage.ndim - 1:
        raise SchemaMismatchError(
            f"{saved.where}: contains a storage of {1 + len(record.lanes)} dimensions, but this "
            f"one has ndim={storage.ndim}; load it into one with the same ndim. Nothing was changed"
        )
    if rows is None:
        example = saved.example()
        record.places(capacity, saved.where)  # raises before anything is created
        if there:
            storage.open_there()
        storage.define(example)
        rows = storage.mover()
    if there:
        rows.ring.schema.require_columns(storage.where)
    columns: list[Any] | None = saved.columns(rows.leaves)
    places = record.places(rows.ring.capacity, saved.where)
    require_alone(storage)
    if there and isinstance(rows.leaves.node, TensorDictNode):
        columns = None  # TorchRL uses other names for the tensors of a PyTree
    storage.notify_emptied()
    held = np.flatnonzero(record.present)
    moment = record.moment
    whose = None if moment is None else as_loaded(moment.sources[record.present])
    of = {"cursor": places.cursor, "write_count": record.written}
    rows.copy_in(columns, held, places.slots, **of, tickets=places.tickets, sources=whose)
    return restored(storage, record, places)


def restored(
    storage: Any, record: SavedStorage, places: Destinations, *, by_us: bool = False
) -> Loaded:
    """Records the writers of the loaded items, and notifies samplers of the items.

    With ``by_us``, this handle is recorded as the writer of all of them.
    """
    ring = storage.ring()
    if record.moment is not None:
        whose = ring.seat.incarnation if by_us else None
        sources = record.moment.sources[record.present]
        ring.live.sources[places.slots] = as_loaded(sources, whose)
    elements = torch.from_numpy(ring.live.committed())
    if len(elements):
        storage.notify(storage.index(elements) if record.lanes else elements)
    same = places.tickets is not None and places.tickets.head == ring.head
    moved = record.slots, record.width, places.shift
    return Loaded(*moved, same_tickets=same, moment=record.moment)


def as_loaded(sources: NDArray[np.uint64], whose: int | None = None) -> NDArray[np.uint64]:
    """Returns new sources for loaded items, which belong to no client of this buffer.

    Equal sources stay equal. With ``whose``, all items get that incarnation.
    """
    writers, streams = layout.writer_of(sources), layout.stream_of(sources)
    _, numbers = np.unique(writers, return_inverse=True)
    unknown = writers == 0
    numbers[unknown] = len(sources) + np.arange(int(unknown.sum()))
    found = numbers.astype(np.uint64) + np.uint64(layout.INCARNATIONS)
    return layout.source_of(found if whose is None else np.full_like(found, whose), streams)


def sources_in_state(sources: NDArray[np.uint64]) -> dict[str, Any]:
    """Returns the ``state_dict`` entry for sources; empty if all items have the same source."""
    if not len(sources) or (sources == sources[0]).all():
        return {}
    return {"_sources": torch.from_numpy(sources.view(np.int64))}


def sources_of_state(state: dict[str, Any]) -> NDArray[np.uint64] | None:
    """Returns the sources of the items of a state; None if all items have the same source."""
    if "_sources" not in state:
        return None
    return as_loaded(state["_sources"].numpy().view(np.uint64))


def sources_from_state(ring: Ring, state: dict[str, Any], whose: int | None = None) -> None:
    """Stores the sources of a state for items that are already in their slots; see `as_loaded`."""
    if "_sources" in state:
        slots = state["_index"].numpy()[:: ring.width] // ring.width
        sources = state["_sources"].numpy().view(np.uint64)
        ring.live.sources[slots] = as_loaded(sources, whose)


def require_alone(storage: Any) -> None:
    """Raises BufferInUseError if another handle could see a mixture of old and new items."""
    engine = storage.open_engine
    if engine is None or len(engine.seat.registry.alive()) <= 1:
        return
    pids = engine.seat.registry.pids()
    raise BufferInUseError(
        f"{storage.where}: a checkpoint cannot be loaded while other processes use the buffer: "
        f"{', '.join(map(str, pids))}; stop them first, or load into a new buffer",
        pids=pids,
    )
