"""Writes snapshots of storages as directories in the format of a buffer.

<folder>/<leaf>.memmap        leaves of rows, as memory-mapped files of tensordict
<folder>/.shmbuffer/          control, slots, schema.json, ...; see docs/format/
<folder>/.shmbuffer/items.*   objects that are not tensors; see `values`
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.memory import Engine, ItemSnapshot, Ring, Schema, Settings
from shmbuffer.memory.attaching import open_save
from shmbuffer.memory.directory import growth
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.memory.upkeep.snapshot import Snapshot
from shmbuffer.saves.checkpointers.object_files import write_objects
from shmbuffer.saves.values import damaged
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_kit import new_column

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.storages.movers.tensor_rows import Rows

# If a ring is not full, at least this much space is reserved for items that other processes write
# during the copy.
_MARGIN_BYTES = 2**22


def write_rows(
    folder: Path, rows: Rows, settings: Settings, *, allow_pickle: bool, remedy: str
) -> ItemSnapshot:
    """Writes a snapshot of a storage of rows into a directory.

    Args:
        folder: An existing, empty directory.
        rows: The rows of the storage.
        settings: The settings to record.
        allow_pickle: As for `write_values`.
        remedy: As for `write_values`.

    Returns:
        The snapshot that was written.
    """
    ring, leaves = rows.ring, rows.leaves
    stored = [at for at in range(len(leaves.leaves)) if at not in leaves.objects]
    form = leaves.node.to_json()
    if leaves.objects:
        form = {"kind": layout.OBJECTS, "item": form}
    schema = Schema(tuple(leaves.leaves[at] for at in stored), ring.capacity, leaves.lanes, form)
    lead = (ring.capacity, *leaves.lanes)
    with closing(Snapshot(folder, schema, settings)) as snapshot:
        snapshot.reserve(slots_to_reserve(ring))
        maps = dict(zip(stored, snapshot.leaves, strict=True))
        columns: list[Any] = []
        for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
            shape = (*lead, *leaf.shape)
            if at in leaves.objects:
                columns.append(new_column(leaves, at, lead, cpu.DEVICE))
            elif maps[at].nbytes:
                columns.append(torch.frombuffer(maps[at], dtype=dtype).view(shape))
            else:
                columns.append(cpu.empty(shape, dtype=dtype))
        moment = rows.copy_out(columns)
        snapshot.finish(moment, ring.tree)
        options: dict[str, Any] = {"allow_pickle": allow_pickle, "remedy": remedy}
        write_objects(folder, leaves, columns, moment.tickets >= 0, **options)
    return moment


def write_records(
    folder: Path, ring: Ring, dictionary: bytes | None, settings: Settings
) -> ItemSnapshot:
    """Writes a snapshot of the records of a ring into a directory.

    ``dictionary`` is the dictionary for compressing records, or None. Returns the snapshot that was
    written.
    """
    assert ring.records is not None
    with closing(Snapshot(folder, ring.schema, settings)) as snapshot:
        snapshot.reserve(slots_to_reserve(ring))
        with snapshot.records_file() as file:
            moment = ring.records.copy_out(file.fd, str(folder))
        if dictionary is not None:
            snapshot.publish_dictionary(dictionary)
        snapshot.finish(moment, ring.tree)
    return moment


def write_ring(folder: Path, ring: Ring, moment: ItemSnapshot, settings: Settings) -> None:
    """Writes the slots of a snapshot, without the items: their order, sources and priorities."""
    schema = Schema((), len(moment.tickets), ring.schema.lanes, {"kind": layout.OBJECTS})
    with closing(Snapshot(folder, schema, settings)) as snapshot:
        snapshot.reserve(moment.used)
        snapshot.finish(moment, ring.tree)


def slots_to_reserve(ring: Ring) -> int:
    """Returns the number of slots for a copy of a ring to which other processes may be writing."""
    used = ring.live.used()
    margin = max(_MARGIN_BYTES // growth.slot_bytes(ring.schema), used // 8, 1)
    return min(ring.capacity, used + margin)


def settings_of(storage: Any) -> Settings:
    """Returns the settings that are recorded in a save of a storage.

    A storage without a directory is saved with checksums and ``reserve="all"``.
    """
    ring, engine = storage.ring(), storage.open_engine
    settings = Settings(ring.elements) if engine is None else engine.settings
    if engine is None or not engine.shared:
        settings = replace(settings, checksum=True, reserve="all")
    extra = {name: value for name, value in settings.extra.items() if name != "share_next"}
    settings = replace(settings, extra=extra)
    if storage.described is not None and "buffer" not in extra:
        settings = storage.described(settings)
    return settings


def open_buffer(path: Path) -> Engine:
    """Opens the buffer in a directory. The items of a save are compared with their checksums.

    Raises:
        CorruptBufferError: An item of the save is damaged.
    """
    path = resolve_path(path)
    if not is_save(path):
        return Engine.open(path, None)
    engine = open_save(path, verify=True)
    report = engine.report
    assert report is not None
    lost = report.checksum_failed + report.words_refused + report.priorities_repaired
    if lost:
        engine.close()
        raise damaged(path, f"does not match the saved data: {lost} of its items are damaged")
    return engine
