"""Collects statistics of the stored items: age, writer and priority.

No lock is taken, so the statistics of a busy buffer are not from one point in time. In a large
buffer, only some slots are read, which are spread evenly over the ring.
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

LOOKED_SLOTS = 1 << 20
"""Maximum number of slots that are read; a million slots take tens of milliseconds."""


@dataclass(frozen=True)
class ItemWriter:
    """The writer of items, as far as the registry still contains it.

    Attributes:
        incarnation: The incarnation of the client, which is unique in the directory.
        pid: The pid of the client; None if another client now has its registry entry.
        role: The role in the registry; "" if unknown.
        living: Whether the client still has its registry entry.
    """

    incarnation: int
    pid: int | None
    role: str
    living: bool


@dataclass(frozen=True)
class ItemStats:
    """Statistics of items; each array has one element per item."""

    share: float  # of the sampled slots, from 0 to 1
    ages: Ints  # number of elements written after the item
    sources: NDArray[np.uint64]  # the writer, as returned by `layout.writer_of`
    priorities: Floats  # as given; NaN if the item was being written
    masses: Floats  # of the priority tree; empty without one
    writers: dict[int, ItemWriter]  # the writers in `sources`, by incarnation


def take(path: str | PathLike[str]) -> ItemStats | None:
    """Reads the statistics of a directory; None before the first write."""
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
    step = max(1, -(-reached // LOOKED_SLOTS))
    words = live.words[:reached:step].copy()
    held = slots.committed(words)
    writers = layout.writer_of(live.sources[:reached:step][held])
    ages = (head - 1 - slots.tickets(words[held])) * width

    def of_held(values: Floats) -> Floats:
        return values.reshape(capacity, width)[:reached:step][held].ravel()

    return ItemStats(
        len(words) / reached if reached else 1.0,
        np.repeat(np.maximum(ages, 0), width),  # the head may have moved since it was read
        np.repeat(writers, width),
        of_held(live.raw),
        of_held(live.mass) if prioritized else np.empty(0),
        {int(one): _writer(int(one), entries) for one in np.unique(writers)},
    )


def _writer(incarnation: int, entries: NDArray[np.void]) -> ItemWriter:
    """Looks up the writer of an incarnation in the registry."""
    at = np.flatnonzero(entries["incarnation"] == incarnation)
    if not len(at):
        return ItemWriter(incarnation, None, "", False)
    entry = entries[at[0]]
    role = layout.name_of(Role, int(entry["role"])).lower()
    living = int(entry["state"]) == layout.EntryState.LIVE
    return ItemWriter(incarnation, int(entry["pid"]), role, living)
