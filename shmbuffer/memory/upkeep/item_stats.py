"""The stored items: age, writer and priority. Of a live buffer or a dead one.

Nothing is locked: of a busy buffer some items are of slightly different moments. Of a large one
some are looked at, from all over the ring.
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
"""So many slots are looked at, at most; a million takes some tens of milliseconds."""


@dataclass(frozen=True)
class ItemWriter:
    """Who wrote items, as far as the registry still knows.

    Attributes:
        incarnation: unique in the directory.
        pid: its process; None where another client has its entry by now.
        role: as in the registry; "" where it is not known.
        living: whether it still has its entry.
    """

    incarnation: int
    pid: int | None
    role: str
    living: bool


@dataclass(frozen=True)
class ItemStats:
    """The items that were looked at, one element each."""

    share: float  # of all slots that were looked at, from 0 to 1
    ages: Ints  # elements written since, by anybody
    sources: NDArray[np.uint64]  # the writer, as `layout.writer_of` has it
    priorities: Floats  # as they were given; NaN where somebody was just writing
    masses: Floats  # of the priority tree; empty without one
    writers: dict[int, ItemWriter]  # of `sources`, by incarnation


def take(path: str | PathLike[str]) -> ItemStats | None:
    """Looks at the items of a directory; None before the first write."""
    with Directory.open(path, reading=True) as directory:
        files = Files(directory)
        look = Diagnosis.of(files, writable=False)
        control, schema = look.control, look.schema
        if schema is None:
            return None
        live = SlotsFile(files.map_slots(schema, writable=False), schema)
        head = int(control.runtime["head"][0])
        prioritized = bool(control.runtime["prioritized"][0])
        entries = control.entries.copy()
    capacity, width = schema.capacity, schema.width
    reached = min(head, capacity)  # from there on nothing was written
    step = max(1, -(-reached // LOOKED_SLOTS))
    words = live.words[:reached:step].copy()
    held = slots.committed(words)
    writers = layout.writer_of(live.sources[:reached:step][held])
    ages = (head - 1 - slots.tickets(words[held])) * width

    def of_held(values: Floats) -> Floats:
        return values.reshape(capacity, width)[:reached:step][held].ravel()

    return ItemStats(
        len(words) / reached if reached else 1.0,
        np.repeat(np.maximum(ages, 0), width),  # a moment later the head is another one
        np.repeat(writers, width),
        of_held(live.raw),
        of_held(live.mass) if prioritized else np.empty(0),
        {int(one): _writer(int(one), entries) for one in np.unique(writers)},
    )


def _writer(incarnation: int, entries: NDArray[np.void]) -> ItemWriter:
    at = np.flatnonzero(entries["incarnation"] == incarnation)
    if not len(at):
        return ItemWriter(incarnation, None, "", False)
    entry = entries[at[0]]
    role = layout.name_of(Role, int(entry["role"])).lower()
    living = int(entry["state"]) == layout.EntryState.LIVE
    return ItemWriter(incarnation, int(entry["pid"]), role, living)
