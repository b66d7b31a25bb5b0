"""Copies a save into a storage. All checks come before the first item is written."""

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
    """Replaces the items of a storage with those of a save. Defines a storage without a schema.

    Args:
        storage: The storage.
        saved: The columns of the save.
        there: True if the files of the save are the storage's own files, which it then opens.
    """
    record, rows = saved.record, storage.mover()
    capacity = -(-storage.max_size // record.width)
    if there and capacity != record.slots:
        raise ValueError(
            f"{saved.where}: contains a storage of {record.slots * record.width} elements, but the "
            f"storage that loads it has max_size={storage.max_size}; use the same max_size, or "
            "load a save from another directory"
        )
    if len(record.lanes) != storage.ndim - 1:
        raise SchemaMismatchError(
            f"{saved.where}: contains a storage with ndim={1 + len(record.lanes)}, but the storage "
            f"that loads it has ndim={storage.ndim}; use the same ndim. Nothing was changed"
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
        # the files already contain the items; those of a PyTree have other names in TorchRL's save
        columns = None
    storage.notify_emptied()
    slots = np.flatnonzero(record.present)
    moment = record.moment
    sources = None if moment is None else as_loaded(moment.sources[record.present])
    counts = {"cursor": places.cursor, "write_count": record.written}
    rows.copy_in(columns, slots, places.slots, **counts, tickets=places.tickets, sources=sources)
    return finish_load(storage, record, places)


def finish_load(
    storage: Any, record: SavedStorage, places: Destinations, *, by_us: bool = False
) -> Loaded:
    """Stores the sources of the items that were loaded, and notifies samplers of the items.

    Args:
        storage: The storage, which contains the items.
        record: The slots of the save.
        places: The slots of the items in the storage.
        by_us: If True, this handle becomes the source of all items.
    """
    ring = storage.ring()
    if record.moment is not None:
        incarnation = ring.seat.incarnation if by_us else None
        sources = record.moment.sources[record.present]
        ring.live.sources[places.slots] = as_loaded(sources, incarnation)
    elements = torch.from_numpy(ring.live.committed())
    if len(elements):
        storage.notify(storage.index(elements) if record.lanes else elements)
    same = places.tickets is not None and places.tickets.head == ring.head
    moved = record.slots, record.width, places.shift
    return Loaded(*moved, same_tickets=same, moment=record.moment)


def as_loaded(sources: NDArray[np.uint64], incarnation: int | None = None) -> NDArray[np.uint64]:
    """Returns new sources for items that were loaded from a save.

    The new sources belong to no client of this buffer. Items with the same source still have the
    same source. If ``incarnation`` is given, the client with this incarnation becomes the source of
    all items. The streams do not change.
    """
    writers, streams = layout.writer_of(sources), layout.stream_of(sources)
    _, numbers = np.unique(writers, return_inverse=True)
    unknown = writers == 0
    numbers[unknown] = len(sources) + np.arange(int(unknown.sum()))
    found = numbers.astype(np.uint64) + np.uint64(layout.INCARNATIONS)
    if incarnation is not None:
        found = np.full_like(found, incarnation)
    return layout.source_of(found, streams)


def sources_in_state(sources: NDArray[np.uint64]) -> dict[str, Any]:
    """Returns the sources of items as an entry of a ``state_dict``.

    The result is empty if all items have the same source.
    """
    if not len(sources) or (sources == sources[0]).all():
        return {}
    return {"_sources": torch.from_numpy(sources.view(np.int64))}


def sources_of_state(state: dict[str, Any]) -> NDArray[np.uint64] | None:
    """Returns new sources for the items of a state; None if all items have the same source."""
    if "_sources" not in state:
        return None
    return as_loaded(state["_sources"].numpy().view(np.uint64))


def sources_from_state(ring: Ring, state: dict[str, Any], incarnation: int | None = None) -> None:
    """Stores new sources for the items of a state, which are already in their slots.

    ``incarnation`` is as for `as_loaded`.
    """
    if "_sources" in state:
        slots = state["_index"].numpy()[:: ring.width] // ring.width
        sources = state["_sources"].numpy().view(np.uint64)
        ring.live.sources[slots] = as_loaded(sources, incarnation)


def require_alone(storage: Any) -> None:
    """Raises BufferInUseError if another handle is open, which could see a part of the load."""
    engine = storage.open_engine
    if engine is None or len(engine.seat.registry.alive()) <= 1:
        return
    pids = engine.seat.registry.pids()
    raise BufferInUseError(
        f"{storage.where}: a checkpoint cannot be loaded while other processes use the buffer "
        f"(pids {', '.join(map(str, pids))}); stop them first, or load into a new buffer",
        pids=pids,
    )
