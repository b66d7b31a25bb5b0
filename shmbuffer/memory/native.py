"""The C core's ring, made from what is mapped."""

from __future__ import annotations

from shmbuffer._native import _core
from shmbuffer.memory import layout
from shmbuffer.memory.control import Control
from shmbuffer.memory.layout import Flag
from shmbuffer.memory.schema import Schema


def native_ring(
    control: Control,
    schema: Schema,
    slots: _core.Map,
    leaves: list[_core.Map],
    *,
    entry: int,
    folder: int | None = None,
) -> _core.Ring:
    """A ring on these maps, for the client of a registry entry.

    Without a client there, it may lock, verify and reap under init.lock, and never claim. Where
    ``folder`` is the descriptor of the directory, its removal is an error of the hot calls.
    """
    superblock = control.superblock()
    records = leaves[0] if schema.record_bytes else None
    rows = [] if schema.record_bytes else leaves
    return _core.Ring(
        control.map,
        slots,
        tuple(zip(rows, (leaf.nbytes for leaf in schema.leaves), strict=True)),
        schema.capacity,
        schema.width,
        entry,
        bool(superblock.flags & Flag.CHECKSUM),
        superblock.salt,
        records,
        None if folder is None else (folder, layout.CONTROL, superblock.device, superblock.inode),
    )
