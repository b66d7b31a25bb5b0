"""Writes a snapshot of a buffer: a directory in the format of a live buffer, without clients.

    Snapshot() ──leaves or records──▶ the caller copies a ring ──finish──▶ READY, with the flag SAVE

The leaf files are sparse files of full capacity. Only the space of the rows that will be copied is
allocated. `meta.json` describes the rows up to the last item, so ``TensorDict.load_memmap`` shows
no row that was never written. A snapshot has no clients, leases, partial rollouts or weights. Its
priority tree is empty; `attaching.open_save` rebuilds the tree in memory.

If the process dies here, the directory looks like a buffer whose definition is incomplete. The
caller therefore writes the snapshot to a path where no process searches for buffers, and publishes
the directory when it is complete.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.directory import made
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.recorded import to_record
from shmbuffer.memory.mapped.settings import Settings
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.ring.item_snapshot import ItemSnapshot
from shmbuffer.memory.ring.tree import PriorityTree
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

_FILE_MODE_BITS = 0o664  # the bits of the directory's mode that its files also get
_PRIVATE_FILES = (layout.CONTROL, layout.SCHEMA, layout.SLOTS, layout.LEDGER)


class Snapshot:
    """A directory to which a save is being written.

    Args:
        folder: An existing, empty directory.
        schema: The schema of the buffer.
        settings: The settings of the buffer, which are recorded in the snapshot.

    Attributes:
        leaves: A writable map of each leaf file ``[capacity, *lanes, *shape]``, or of the byte
            ring.
    """

    def __init__(self, folder: Path, schema: Schema, settings: Settings) -> None:
        self._files = Files(Directory.open(folder, allow_unsafe_fs=True))
        self._schema = schema
        record = to_record(settings, folder)
        flags = (settings.flags & ~Flag.CHECKSUM) | Flag.SAVE
        if settings.checksum or not schema.record_bytes:
            # the checksums of rows are computed at the end, and those of records are only copied
            flags |= Flag.CHECKSUM
        self._control = self._files.create_control(record, flags)
        self._mapped = self._files.build(schema, slots=0, adopt=False, sparse=True)
        self.leaves = self._mapped.leaves

    def close(self) -> None:
        """Closes the directory."""
        self._files.close()

    def reserve(self, slots: int) -> None:
        """Allocates the space of the first ``slots`` slots in all files.

        Raises SpaceError if there is not enough space.
        """
        schema, directory = self._schema, self._files.directory
        parts = [
            (file, 0, nbytes // schema.capacity * slots)
            for file, nbytes in zip(schema.leaf_files, schema.leaf_bytes, strict=True)
        ]
        at, width = schema.sections, schema.width
        sizes = {"words": 8, "sources": 8, "checksums": 4, "raw": 8 * width}
        if schema.record_bytes:
            sizes["extents"] = layout.EXTENT.itemsize
        parts += [(layout.SLOTS, at[name], size * slots) for name, size in sizes.items()]
        needed = sum(nbytes for _, _, nbytes in parts)
        for name, start, nbytes in (part for part in parts if part[2]):  # empty leaves have no file
            with (
                directory.open_file(name) as file,
                explain_errors(self._files.path, needed=needed, free=directory.free_bytes),
            ):
                filesystem.allocate_part(file.fd, start, nbytes, free=needed)

    def records_file(self) -> _core.Descriptor:
        """Opens the file of the byte ring."""
        return self._files.directory.open_file(layout.RECORDS)

    def publish_dictionary(self, data: bytes) -> None:
        """Stores the dictionary for compressing records."""
        self._files.publish_dictionary(data)

    def finish(self, items: ItemSnapshot, tree: PriorityTree | None) -> None:
        """Writes the slots and then the superblock, and sets the permissions of the files.

        Args:
            items: The snapshot of the items that were copied.
            tree: The priority tree of the ring; None if the ring has no priorities.
        """
        schema, control = self._schema, self._control
        used = items.used
        self._store_slots(items, slice(used))
        runtime = control.runtime
        runtime["head"] = items.head
        runtime["write_count"] = items.write_count
        runtime["length"] = int(np.count_nonzero(items.tickets >= 0))
        runtime["max_priority"] = -1.0 if items.max_priority is None else items.max_priority
        if tree is not None and tree.prioritized:
            runtime["alpha"], runtime["eps"], runtime["prioritized"] = tree.alpha, tree.eps, 1
        runtime["byte_head"], runtime["byte_tail"] = items.byte_head, items.byte_tail
        runtime["state"] = BufferState.READY
        superblock = control.superblock().with_schema(schema, self._mapped.slots.nbytes)
        control.write(control.write(replace(superblock, durable_ticket=items.head)))
        self._mapped.ring(control, entry=0).seal(0, used)
        for name, content in schema.meta_files(used).items():
            self._files.directory.write_atomic(name, content)
        control.touch()
        self._share()

    def _store_slots(self, items: ItemSnapshot, used: slice) -> None:
        """Writes the words, sources, raw priorities and extents of the slots."""
        live, width = SlotsFile(self._mapped.slots, self._schema), self._schema.width
        live.words[used] = slots.committed_words(items.tickets[used])
        live.sources[used] = items.sources[used]
        live.raw[: used.stop * width] = items.priorities[: used.stop * width]
        if items.extents is not None:
            live.extents[used] = items.extents[used]

    def _share(self) -> None:
        """Gives the files the permissions of the directory, so that the same users can read."""
        directory = self._files.directory
        rights = stat.S_IMODE(os.fstat(directory.file.fd).st_mode)
        names = {*_PRIVATE_FILES, layout.DICTIONARY, layout.RECORDS, made.NAME}
        names |= {*self._schema.leaf_files, *self._schema.meta_files()}
        folders = {layout.PRIVATE, *(str(above) for name in names for above in Path(name).parents)}
        for name in folders - {"."}:
            with directory.folder(name) as folder:
                os.fchmod(folder.file.fd, rights)
        for name in names:
            with suppress(FileNotFoundError), directory.open_file(name, writable=False) as file:
                os.fchmod(file.fd, rights & _FILE_MODE_BITS)
