"""Copies of a ring's items, all of one moment, in files that nobody sees yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory import Engine, Moment, filesystem
from shmbuffer.replay.checkpointers.columns import Opened
from shmbuffer.replay.checkpointers.record import Record
from shmbuffer.replay.form.leaves import Leaves

if TYPE_CHECKING:
    from shmbuffer.memory import Ring
    from shmbuffer.replay.storages.rows import Rows

# Of a ring that is not full: slots beyond its last item that get their room before the copy, for
# what others write meanwhile.
_MARGIN = 4096


class Copy(NamedTuple):
    """What a storage held at one moment."""

    moment: Moment
    record: Record
    columns: list[Any]
    """One ``[slots, *lanes, *shape]`` for each leaf: a tensor, or `Objects`."""


def copy_into(rows: Rows, columns: list[Any], descriptors: Opened, folder: Path) -> Copy:
    """Copy all items into maps of files, whose room is taken first.

    A store to a map for which there is no room ends the process; want of room is an error here.

    Args:
        rows: what to copy.
        columns: where to, one for each leaf.
        descriptors: owners of the file of each column that has one, by its number; they are closed.
        folder: where the files are, for messages.

    Raises:
        SpaceError: bytes needed and free.
    """
    ring = rows.ring
    try:
        used = np.flatnonzero(ring.words != 0)  # a copy: numpy looks twice, and words change
        extent = int(used[-1]) + 1 if len(used) else 0
        extent = min(ring.capacity, extent + max(_MARGIN, extent // 8))
        needed = {
            at: columns[at].numel() // ring.capacity * extent * columns[at].itemsize
            for at in descriptors
        }
        for at, descriptor in descriptors.items():
            try:
                os.posix_fallocate(descriptor.fd, 0, needed[at])
            except OSError as error:
                free = filesystem.free_bytes(descriptor.fd)
                raise filesystem.space_error(
                    str(folder), sum(needed.values()), free, why=error.errno or 0
                ) from error
    finally:
        for descriptor in descriptors.values():
            descriptor.close()
    moment = rows.copy_out(columns)
    return Copy(moment, Record.of_moment(moment, rows.leaves), columns)


def look_at(ring: Ring) -> Moment:
    """Counters and slots of a ring that goes on living: one look at each of them."""
    tickets = ring.tickets()
    raw = np.where(np.repeat(tickets < 0, ring.width), np.nan, ring.priorities())
    sources = np.where(tickets < 0, -1, ring.sources.astype(np.int64))
    return Moment(tickets, sources, raw, ring.head, ring.write_count, ring.max_priority)


def copy_of_buffer(engine: Engine, path: Path) -> tuple[Leaves, Copy]:
    """What the buffer in a directory holds.

    Nothing is copied while nobody else has it open; else it is, into memory.

    Args:
        engine: open on the directory, for as long as the columns are used.
        path: the directory, for messages.

    Raises:
        RuntimeError: nothing was written to it yet.
    """
    ring = engine.ring
    if ring is None:
        raise RuntimeError(f"{path}: is a buffer that nothing was written to")
    leaves = Leaves.of_schema(ring.schema, str(path))
    columns: list[Any] = []
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        shape = (ring.capacity, *leaves.lanes, *leaf.shape)
        columns.append(
            torch.frombuffer(ring.leaf(at), dtype=dtype).view(shape)
            if leaf.nbytes
            else torch.empty(shape, dtype=dtype)
        )
    if ring.is_alone:
        moment = look_at(ring)
        return leaves, Copy(moment, Record.of_moment(moment, leaves), columns)
    columns = [torch.empty_like(column) for column in columns]
    moment = ring.copy_out([column.data_ptr() for column in columns])
    return leaves, Copy(moment, Record.of_moment(moment, leaves), columns)
