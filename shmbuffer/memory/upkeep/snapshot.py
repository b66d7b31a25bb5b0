"""Writes a snapshot of a buffer: a directory in the format of a live buffer, without clients.

    begin ──leaves, or records──▶ the caller copies a ring ──finish──▶ READY, with the flag SAVE

The leaves are sparse files of full capacity. Only the space of rows that will be copied is
allocated. `meta.json` describes the rows up to the last item, so ``TensorDict.load_memmap`` shows
no row that was never written. There are no clients, leases, partial rollouts or weights, and the
priority tree is empty: `attaching.open_save` rebuilds it in memory.

If the process dies here: the directory looks like a buffer whose definition is incomplete. The
caller writes the snapshot to a path where no process searches for buffers, and publishes it when it
is complete.
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

_READ_AS_FOLDER = 0o664  # bits of the directory's mode that its files get
_PRIVATE_FILES = (layout.CONTROL, layout.SCHEMA, layout.SLOTS, layout.LEDGER)


class Snapshot:
    """A directory to which a save is being written.

    Args:
        folder: An existing, empty directory.
        schema: The schema of the buffer. Every leaf has a column.
        settings: The settings to record.

    Attributes:
        leaves: A writable map of each leaf's file ``[capacity, *lanes, *shape]``, or of the byte
            ring.
    """

    def __init__(self, folder: Path, schema: Schema, settings: Settings) -> None:
        self._files = Files(Directory.open(folder, allow_unsafe_fs=True))
        self._schema = schema
        record = to_record(settings, folder)
        flags = (settings.flags & ~Flag.CHECKSUM) | Flag.SAVE
        if settings.checksum or not schema.record_bytes:
            flags |= Flag.CHECKSUM  # the checksums of records are stored when the record is written
        self._control = self._files.create_control(record, flags)
        self._mapped = self._files.build(schema, slots=0, adopt=False, sparse=True)
        self.leaves = self._mapped.leaves

    def close(self) -> None:
        """Closes the directory."""
        self._files.close()

    def reserve(self, slots: int) -> None:
        """Allocates the rows of the first slots; SpaceError if there is too little space."""
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
        """Stores the dictionary of records."""
        self._files.publish_dictionary(data)

    def finish(self, moment: ItemSnapshot, tree: PriorityTree | None) -> None:
        """Writes the slots, then the superblock; sets the file permissions from the directory's.

        Args:
            moment: The snapshot of the items that were copied.
            tree: The priority tree of the ring; None if the ring has no priorities.
        """
        schema, control = self._schema, self._control
        used = moment.used
        self._store_slots(moment, slice(used))
        runtime = control.runtime
        runtime["head"] = moment.head
        runtime["write_count"] = moment.write_count
        runtime["length"] = int(np.count_nonzero(moment.tickets >= 0))
        runtime["max_priority"] = -1.0 if moment.max_priority is None else moment.max_priority
        if tree is not None and tree.prioritized:
            runtime["alpha"], runtime["eps"], runtime["prioritized"] = tree.alpha, tree.eps, 1
        runtime["byte_head"], runtime["byte_tail"] = moment.byte_head, moment.byte_tail
        runtime["state"] = BufferState.READY
        superblock = control.superblock().with_schema(schema, self._mapped.slots.nbytes)
        control.write(control.write(replace(superblock, durable_ticket=moment.head)))
        self._mapped.ring(control, entry=0).seal(0, used)
        for name, content in schema.meta_files(used).items():
            self._files.directory.write_atomic(name, content)
        control.touch()
        self._share()

    def _store_slots(self, moment: ItemSnapshot, used: slice) -> None:
        """Writes the words, sources and raw priorities of the slots."""
        live, width = SlotsFile(self._mapped.slots, self._schema), self._schema.width
        live.words[used] = slots.committed_words(moment.tickets[used])
        live.sources[used] = moment.sources[used]
        live.raw[: used.stop * width] = moment.priorities[: used.stop * width]
        if moment.extents is not None:
            live.extents[used] = moment.extents[used]

    def _share(self) -> None:
        """Makes the files readable for every user who can read the directory."""
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
                os.fchmod(file.fd, rights & _READ_AS_FOLDER)
