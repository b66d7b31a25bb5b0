"""Collects statistics about the stored items: age, writer and priority.

No lock is taken, so the statistics of a busy buffer are not from one point in time. If the buffer
is large, only a sample of the slots is read, spread evenly over the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.directory.diagnosis import Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.layout import Role
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.system.region import Directory

MAX_SLOTS = 1 << 20
"""Number of slots that are read at most. A million slots take tens of milliseconds."""


@dataclass(frozen=True)
class ItemWriter:
    """The client that wrote some of the items, as far as the registry still contains it.

    Attributes:
        incarnation: The unique number of the client.
        pid: The pid of the client; None if another client now uses its registry entry.
        role: The role of the client; "" if another client now uses its registry entry.
        living: True if the client is still attached.
    """

    incarnation: int
    pid: int | None
    role: str
    living: bool


@dataclass(frozen=True)
class ItemStats:
    """Statistics about items. Each array has one element per item that was read."""

    share: float  # the part of the written slots that was read, from 0 to 1
    ages: Ints  # number of elements that were written after the item
    sources: NDArray[np.uint64]  # incarnation of the client that wrote the item
    priorities: Floats  # raw priority; NaN if the item was being written
    masses: Floats  # mass in the priority tree; empty if the buffer has no priorities
    writers: dict[int, ItemWriter]  # the writers in `sources`, by incarnation


def take(path: str | PathLike[str]) -> ItemStats | None:
    """Reads the statistics of the buffer in a directory. Returns None before the first write."""
    with Directory.open(path, reading=True) as directory:
        files = Files(directory)
        diagnosis = Diagnosis.read(files, writable=False)
        control, schema = diagnosis.control, diagnosis.schema
        if schema is None:
            return None
        live = SlotsFile(files.map_slots(schema, writable=False), schema)
        head = int(control.runtime["head"][0])
        prioritized = bool(control.runtime["prioritized"][0])
        entries = control.entries.copy()
    capacity, width = schema.capacity, schema.width
    reached = min(head, capacity)  # no later slot was ever written
    step = max(1, -(-reached // MAX_SLOTS))
    words = live.words[:reached:step].copy()
    committed = slots.committed(words)
    writers = layout.writer_of(live.sources[:reached:step][committed])
    ages = (head - 1 - slots.tickets(words[committed])) * width

    def select_committed(values: Floats) -> Floats:
        return values.reshape(capacity, width)[:reached:step][committed].ravel()

    return ItemStats(
        len(words) / reached if reached else 1.0,
        np.repeat(np.maximum(ages, 0), width),  # the head may have moved since it was read
        np.repeat(writers, width),
        select_committed(live.raw),
        select_committed(live.mass) if prioritized else np.empty(0),
        {int(writer): _find_writer(int(writer), entries) for writer in np.unique(writers)},
    )


def _find_writer(incarnation: int, entries: NDArray[np.void]) -> ItemWriter:
    """Looks up a client in the registry by its incarnation."""
    at = np.flatnonzero(entries["incarnation"] == incarnation)
    if not len(at):
        return ItemWriter(incarnation, None, "", False)
    entry = entries[at[0]]
    role = layout.name_of(Role, int(entry["role"])).lower()
    living = int(entry["state"]) == layout.EntryState.LIVE
    return ItemWriter(incarnation, int(entry["pid"]), role, living)
