"""Creates and opens the files of a buffer in a scratch directory.

    <scratch_dir>/               tensordict's memmap layout: meta.json, <leaf>.memmap, folders
      .shmbuffer/
        control                  exists as soon as the directory is a buffer
        made.json                list of the files that are created in the scratch directory
        schema.json, slots       exist once the schema is known
        ledger                   reservations and leases of items; created with the slots
        records, dictionary      for records: the byte ring; the dictionary for compression
        history                  the counters over time, if there is a coordinator
        weights                  the weights that a learner has published, in two copies
        init.lock, coordinator.lock, procs/NNN.lock
        spawned/<16 hex>         the processes that a coordinator started (roster.py)

Always true
  1. ``control`` gets its name when it is complete. A directory that contains it is a buffer.
  2. ``made.json`` lists a file before the file exists, so that files that remain after a crash can
     be removed.
  3. ``slots`` gets its name after the leaf files, meta.json and schema.json are complete. The
     superblock becomes READY after all of them are on the disk with their sizes.
  4. Outside ``.shmbuffer``, only the files in made.json and empty directories are removed.
If a process dies while it creates these files and the superblock is still NO_SCHEMA, the next
process that writes or recovers removes the files in made.json and starts again. If the superblock
is READY, the next process loads the files: see `definition`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferExistsError,
    BufferNotFoundError,
    BufferUnlinkedError,
    CorruptBufferError,
    SchemaMismatchError,
    SpaceError,
)
from shmbuffer.memory.clients.locks import INIT_LOCK, InitLock, Lock
from shmbuffer.memory.directory import made, restored
from shmbuffer.memory.directory.neighbours import did_you_mean
from shmbuffer.memory.format import layout, ledger
from shmbuffer.memory.format.layout import Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control, Superblock, first_superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.beneath import remove_if_empty
from shmbuffer.memory.system.filesystem import free_memory_bytes, space_error
from shmbuffer.memory.system.path_checks import explain_errors, not_durable
from shmbuffer.memory.system.private_copy import Parts, map_file
from shmbuffer.memory.system.region import Directory

_NEW_CONTROL = f"{layout.CONTROL}.new"
_NEW_SLOTS = f"{layout.SLOTS}.new"
NEW_HISTORY = f"{layout.HISTORY}.new"
NEW_WEIGHTS = f"{layout.WEIGHTS}.new"
_SCHEMA_FILES = (
    *(layout.SLOTS, _NEW_SLOTS, layout.SCHEMA, layout.RECORDS, layout.DICTIONARY),
    layout.LEDGER,
)

# Leaves whose rows are smaller than this many bytes are mapped with huge pages. Many rows then
# share a page, so that random reads need fewer page table lookups. A huge page costs a few
# milliseconds.
_SMALL_ROW = 1024


class Files:
    """The files of a buffer in a scratch directory.

    This object owns the open directory, and closes it.
    """

    def __init__(self, directory: Directory, *, private: bool = False) -> None:
        self.directory = directory
        self.path: Path = directory.path
        self.private = private  # True if stores into the maps stay in this process
        self._mapped: dict[str, tuple[int, int]] = {}  # device and inode of each file, by name

    @property
    def in_memory(self) -> bool:
        """True if the files are on a file system in memory, such as tmpfs."""
        return self.directory.in_memory

    def lock(self, timeout: float, *, creating: bool = False) -> InitLock:
        """Returns init.lock, which excludes other processes that create, join or recover a buffer.

        Args:
            timeout: Seconds to wait for the lock.
            creating: True if the caller may create a buffer. If it is False and the directory
                contains no buffer, entering the lock raises BufferUnlinkedError.
        """
        return InitLock(self.directory, timeout, creating=creating)

    def still_there(self) -> bool:
        """True if the path still refers to this directory, and the directory contains a buffer."""
        return self.directory.still_there() and self.has_control()

    def has_control(self) -> bool:
        """True if the directory contains a control file, and is therefore a buffer."""
        return self.directory.exists(layout.CONTROL)

    def require_control(self, otherwise: str = "check the path") -> None:
        """Raises BufferNotFoundError if the directory contains no buffer.

        The message suggests buffers with similar paths. If there are none, the message ends with
        the advice ``otherwise``.
        """
        if not self.has_control():
            text = f"{self.path}: there is no buffer here; {did_you_mean(self.path) or otherwise}"
            raise BufferNotFoundError(text, path=str(self.path))

    def recorded_schema(self, superblock: Superblock) -> Schema | None:
        """Reads the schema of the buffer. Returns None before the first write."""
        if superblock.schema_sha256 == bytes(32):
            return None
        data = self.directory.read(layout.SCHEMA, limit=layout.SCHEMA_LIMIT)
        return Schema.from_json(data, f"{self.path}/{layout.SCHEMA}")

    def create_control(self, settings: dict[str, Any], flags: Flag) -> Control:
        """Creates the control file under a temporary name, and renames it when it is complete."""
        self.directory.unlink(_NEW_CONTROL)
        with self.directory.create(_NEW_CONTROL, layout.CONTROL_BYTES) as file:
            _core.reached("create.control_allocated")
            with explain_errors(
                self.path / _NEW_CONTROL, needed=layout.CONTROL_BYTES, free=free_memory_bytes
            ):
                found = os.fstat(file.fd)
                control = Control(_core.Map(file.fd, layout.CONTROL_BYTES), str(self.path))
            control.format(first_superblock(settings, flags, (found.st_dev, found.st_ino)))
            _core.reached("create.formatted")
            self.directory.sync_file(file.fd)
        self.directory.rename(_NEW_CONTROL, layout.CONTROL)
        _core.reached("create.renamed")
        self.directory.sync(layout.PRIVATE)
        # otherwise files that made.json listed could reappear after a power cut, without the list
        self.directory.sync()
        self.vouch(None)
        control = self.open_control()
        control.touch()
        return control

    def open_control(self, *, writable: bool = True) -> Control:
        """Maps the control file."""
        with (
            self.directory.open_file(
                layout.CONTROL, nbytes=layout.CONTROL_BYTES, writable=writable
            ) as file,
            explain_errors(
                self.path / layout.CONTROL, needed=layout.CONTROL_BYTES, free=free_memory_bytes
            ),
        ):
            options: dict[str, Any] = {"writable": writable, "private": self.private}
            mapped = map_file(self.directory, layout.CONTROL, file, layout.CONTROL_BYTES, **options)
            found = os.fstat(file.fd)
        return Control(mapped, str(self.path), (found.st_dev, found.st_ino))

    def control_if_there(self, known: Control | None = None) -> Control | None:
        """Maps the control file. Returns None if the directory contains no buffer.

        If ``known`` is a map of the same file, it is returned instead of a new map.
        """
        try:
            found = self.directory.stat(layout.CONTROL)
            is_known = known is not None and known.file == (found.st_dev, found.st_ino)
            return known if is_known else self.open_control()
        except BufferNotFoundError:
            return None

    def vouch(self, schema: Schema | None) -> None:
        """Marks the content of the control file and the schema's files as valid; see `restored`."""
        restored.vouch(self.directory, [layout.CONTROL, *(schema.mapped_files if schema else ())])

    def build(self, schema: Schema, *, slots: int, adopt: bool, sparse: bool = False) -> Mapped:
        """Creates and maps all files of a schema.

        The caller holds init.lock, and the superblock is NO_SCHEMA.

        Args:
            schema: The schema of the buffer.
            slots: The number of slots whose space is allocated in the leaf files.
            adopt: If True, existing leaf files are used. Otherwise they raise BufferExistsError.
            sparse: If True, the slots file is sparse, because most of its bytes stay zero.
        """
        self.discard_unfinished()
        self._mapped.clear()
        slots_bytes = schema.sections["bytes"]
        leaves = {
            file: nbytes
            for file, nbytes in zip(schema.leaf_files, schema.leaf_bytes, strict=True)
            if nbytes
        }
        meta = schema.meta_files()
        adopted = self._find_existing([*leaves, *meta], adopt=adopt)
        self._require_sizes({name: leaves[name] for name in leaves if name in adopted})
        new = [name for name in leaves if name not in adopted]
        new_meta = [name for name in meta if name not in adopted]
        sizes = dict(zip(schema.map_files, schema.map_bytes, strict=True))
        parts = dict(zip(schema.map_files, schema.bytes_of_slots(slots), strict=True))
        needed = slots_bytes + sum(parts[name] for name in parts if name not in adopted)
        if slots and needed > (free := self.directory.free_bytes()):
            what = f"{self.path}: {slots} slots of {len(schema.leaves)} leaves"
            raise space_error(what, needed, free, sparse_allowed=True)
        made.note(self.directory, [*new, *new_meta])
        _core.reached("define.listed")
        try:
            for name in new:
                reserve = parts[name] == sizes[name]
                self.directory.create(name, sizes[name], reserve=reserve).close()
                _core.reached("define.leaf")
            for name in new_meta:
                self.directory.write_atomic(name, meta[name])
                _core.reached("define.meta")
            if schema.record_bytes:
                reserve = parts[layout.RECORDS] == sizes[layout.RECORDS]
                self.directory.create(layout.RECORDS, schema.record_bytes, reserve=reserve).close()
                _core.reached("define.records")
            sparse_files = [name for name in parts if name in adopted or parts[name] < sizes[name]]
            self._allocate([(name, 0, parts[name]) for name in sparse_files])
            self.directory.create(layout.LEDGER, layout.PAGE).close()
            _core.reached("define.ledger")
            self.directory.create(_NEW_SLOTS, slots_bytes, reserve=not sparse).close()
            _core.reached("define.slots_allocated")
            self.directory.write_atomic(layout.SCHEMA, schema.to_json())
            _core.reached("define.schema")
            self.directory.rename(_NEW_SLOTS, layout.SLOTS)
            _core.reached("define.renamed")
            self.directory.sync()
            self.directory.sync(layout.PRIVATE)
            mapped = self._map(schema)
            self._sync_sizes(mapped)
            restored.vouch(self.directory, schema.mapped_files)
            return mapped
        except BaseException:
            self.discard_unfinished()
            raise

    def allocate_again(self, schema: Schema, slots: int) -> None:
        """Allocates the space of the first ``slots`` slots in all files again, under init.lock.

        Some of the space may be missing. A power cut may free the space of a file, a copy may be
        sparse, and a save never had the space.
        """
        parts = zip(schema.map_files, schema.bytes_of_slots(slots), strict=True)
        slots_part = (layout.SLOTS, schema.sections["bytes"])
        self._allocate([(name, 0, nbytes) for name, nbytes in (slots_part, *parts)])

    def write_meta(self, schema: Schema) -> None:
        """Writes tensordict's meta.json files with the capacity as the number of rows.

        In a save, these files contain the number of saved rows instead.
        """
        for name, content in schema.meta_files().items():
            self.directory.write_atomic(name, content)

    def lock_growth(self, timeout: float) -> Lock:
        """Takes the growth lock.

        While it is held, no other thread or process allocates slots or withdraws the schema. The
        lock is on the slots file. It is not init.lock, because a flush holds that lock until all
        data are on the disk. Raises BufferNotFoundError if the schema was withdrawn.
        """
        lock = Lock().hold(
            self.directory,
            layout.SLOTS,
            timeout=timeout,
            purpose="allocates space for the next items of this buffer",
            make=False,
        )
        try:
            self._require_mapped(layout.SLOTS, lock)
        except BaseException:
            lock.close()
            raise
        return lock

    def grow(self, schema: Schema, start: int, stop: int, used: Callable[[], int]) -> None:
        """Allocates the space of the slots from ``start`` to ``stop`` in all leaf files.

        The caller holds the growth lock. If there is not enough space, this method frees the space
        that it has allocated and raises SpaceError. ``used`` returns the number of slots up to the
        last slot in use. These slots keep their space in any case.
        """
        first, last = schema.bytes_of_slots(start), schema.bytes_of_slots(stop)
        parts = list(zip(schema.map_files, first, last, strict=True))
        try:
            self._allocate(parts)
        except SpaceError:
            kept = schema.bytes_of_slots(max(start, used()))
            for (name, low, end), keep in zip(parts, kept, strict=True):
                self._release(name, max(low, keep), end)
            raise

    def _allocate(self, parts: Sequence[tuple[str, int, int]]) -> None:
        """Allocates byte ranges of files, each given as the name, the first byte and the end.

        The free space is compared first, for the reason in `filesystem.allocate`.
        """
        parts = [part for part in parts if part[1] < part[2]]
        missing, free = 0, self.directory.free_bytes()
        # some of the space may already be allocated, if a process died during an earlier call
        for name, start, end in parts:
            allocated = self.directory.stat(name).st_blocks * 512
            missing += min(end - start, max(0, end - allocated))
        if missing > free:
            raise space_error(self.path, missing, free)
        for name, start, end in parts:
            with (
                self._open_required(name, writable=True) as file,
                explain_errors(self.path, needed=missing, free=self.directory.free_bytes),
            ):
                self._require_mapped(name, file)
                os.posix_fallocate(file.fd, start, end - start)
                _core.reached("space.taken")
                os.utime(file.fd)  # so that `restored` considers the file unchanged
                _core.reached("space.dated")

    def _release(self, name: str, start: int, end: int) -> None:
        """Frees the disk space of a file from the byte ``start`` to the byte ``end``."""
        if start >= end:
            return
        with self._open_required(name, writable=True) as file, explain_errors(self.path / name):
            self._require_mapped(name, file)
            filesystem.release_part(file.fd, start, end - start)
            os.utime(file.fd)
            _core.reached("space.dated")

    def _require_mapped(self, name: str, file: _core.Descriptor) -> None:
        """Raises BufferUnlinkedError if an open file is not the one that this handle has mapped."""
        with explain_errors(self.path / name):
            found = os.fstat(file.fd)
        known = self._mapped.get(name)
        if known is not None and known != (found.st_dev, found.st_ino):
            raise BufferUnlinkedError(
                f"{self.path / name}: the file was replaced while this handle was open; close the "
                "handle, and attach again",
                path=str(self.path / name),
            )

    def load(
        self, superblock: Superblock, schema: Schema | None = None, *, writable: bool = True
    ) -> Mapped:
        """Maps the files of the schema that the superblock describes."""
        if schema is None:
            data = self._read_required(layout.SCHEMA, layout.SCHEMA_LIMIT)
            schema = Schema.from_json(data, f"{self.path}/{layout.SCHEMA}")
        found = (schema.capacity, schema.width, len(schema.leaves), schema.digest)
        expected = (
            *(superblock.capacity, superblock.lanes, superblock.leaves),
            superblock.schema_sha256,
        )
        if found != expected:
            raise CorruptBufferError(
                f"{self.path}/{layout.SCHEMA}: the schema does not match the superblock; restore "
                "the file from a copy of the directory",
                path=str(self.path / layout.SCHEMA),
                expected=expected[3].hex(),
                found=found[3].hex(),
            )
        return self._map(schema, writable=writable)

    def dictionary(self) -> bytes | None:
        """Reads the dictionary for compressing records. Returns None before one is published."""
        if not self.directory.exists(layout.DICTIONARY):
            return None
        return self.directory.read(layout.DICTIONARY, limit=layout.SCHEMA_LIMIT)

    def publish_dictionary(self, data: bytes) -> bytes:
        """Stores the dictionary for compressing records on the disk, unless there is one.

        Returns the stored dictionary. The caller holds init.lock.
        """
        published = self.dictionary()
        if published is not None:
            return published
        self.directory.write_atomic(layout.DICTIONARY, data)
        _core.reached("dictionary.published")
        return data

    def discard_unfinished(self) -> None:
        """Removes all files of an unfinished definition: the schema's, and those in made.json."""
        for name in _SCHEMA_FILES:
            made.unlink(self.directory, name)
        made.remove(self.directory)

    def prepare_discard(self) -> Callable[[], None]:
        """Returns a function that removes the files of a withdrawn schema."""
        return self.discard_unfinished

    def remove(self, *, created_directory: bool, keep_lock: bool = False) -> bool:
        """Removes all files that this package created, then the directories that are empty.

        The caller holds init.lock. Returns True if the directory contained a buffer.

        Args:
            created_directory: True if the scratch directory is removed too when it is empty.
            keep_lock: True if init.lock is kept, because the caller creates another buffer.
        """
        found = self.has_control()
        made.remove(self.directory)
        _core.reached("remove.leaves")
        extra = (layout.HISTORY, NEW_HISTORY, layout.WEIGHTS, NEW_WEIGHTS)
        for name in (*_SCHEMA_FILES, _NEW_CONTROL, *extra):
            made.unlink(self.directory, name)
        for folder in (f"{layout.PRIVATE}/procs", layout.SPAWNED, layout.PARTIALS):
            if self.directory.exists(folder):
                for name in self.directory.listdir(folder):
                    self.directory.unlink(f"{folder}/{name}")
                self.directory.rmdir(folder)
        self.directory.unlink(layout.COORDINATOR_LOCK)
        self.directory.unlink(layout.CONTROL)
        _core.reached("remove.control")
        if keep_lock:
            return found
        self.directory.unlink(INIT_LOCK)
        self.directory.rmdir(layout.PRIVATE)
        _core.reached("remove.private")
        if created_directory:
            remove_if_empty(self.path)
        return found

    def extra_files(self) -> Iterator[tuple[str, int]]:
        """Yields the name and the size in bytes of the history file and the weights file."""
        for name in (layout.HISTORY, layout.WEIGHTS):
            with suppress(FileNotFoundError):
                yield name, self.directory.stat(name).st_size

    def close(self) -> None:
        """Closes the directory. The maps stay valid until they are garbage collected."""
        self.directory.close()

    def _find_existing(self, names: list[str], *, adopt: bool) -> set[str]:
        """Returns the names of the files that exist.

        Raises BufferExistsError if a file exists and ``adopt`` is False.
        """
        existing = {name for name in names if self.directory.exists(name)}
        if existing and not adopt:
            name = min(existing)
            raise BufferExistsError(
                f"{self.path}/{name}: already exists, but this buffer did not create it; "
                "pass existsok=True to take it over, or choose an empty directory",
                path=str(self.path / name),
            )
        return existing

    def _require_sizes(self, leaves: dict[str, int]) -> None:
        """Raises SchemaMismatchError if an existing leaf file does not have the expected size."""
        for name, nbytes in leaves.items():
            found = self.directory.stat(name).st_size
            if found != nbytes:
                raise SchemaMismatchError(
                    f"{self.path}/{name}: has {found} bytes, but this write needs {nbytes}; it "
                    "belongs to another buffer: choose an empty directory",
                    path=str(self.path / name),
                    expected=nbytes,
                    found=found,
                )

    def _map(self, schema: Schema, *, writable: bool = True) -> Mapped:
        """Maps the slots, the leaf files or records, and the ledger."""
        slots = self.map_slots(schema, writable=writable)
        if schema.record_bytes:
            size = schema.record_bytes
            leaves = [self._map_file(layout.RECORDS, size, writable=writable, twice=True)]
        else:
            small = _SMALL_ROW * schema.capacity
            leaves = [
                self._map_file(file, nbytes, writable=writable, aligned=nbytes < small)
                if nbytes
                else _core.Map(-1, 0)
                for file, nbytes in zip(schema.leaf_files, schema.leaf_bytes, strict=True)
            ]
        return Mapped(schema, slots, leaves, self._map_ledger(schema, writable=writable))

    def _map_ledger(self, schema: Schema, *, writable: bool = True) -> Any:
        """Maps the ledger with its maximum size, because the file may grow later; see `ledger`."""
        where, max_size = self.path / layout.LEDGER, schema.ledger_bytes
        with self._open_required(layout.LEDGER, writable=writable) as file, explain_errors(where):
            ledger.require_length(file.fd, where)
            size = min(os.fstat(file.fd).st_size, max_size)
            return map_file(
                *(self.directory, layout.LEDGER, file, max_size),
                size=size,
                writable=writable,
                private=self.private,
                longer=size < max_size,
            )

    def extend_ledger(self, start: int, nbytes: int) -> None:
        """Allocates ``nbytes`` bytes of the ledger, from the byte ``start``, under init.lock.

        Raises SpaceError if the disk is full.
        """
        where, free = self.path / layout.LEDGER, self.directory.free_bytes
        with (
            self.directory.open_file(layout.LEDGER) as file,
            explain_errors(where, needed=nbytes, free=free),
        ):
            filesystem.allocate_part(file.fd, start, nbytes, free=free())
            # the caller then stores the new size, which must not reach the disk before the space
            os.fsync(file.fd)

    def _sync_sizes(self, mapped: Mapped) -> None:
        """Syncs all maps, so that the files have their sizes before the superblock gets the schema.

        Raises DurabilityError if the disk reports an error.
        """
        for mapping in (*mapped.maps, mapped.ledger):
            try:
                mapping.sync()
            except OSError as error:
                raise not_durable(str(self.path), error) from error
        _core.reached("define.synced")

    def map_slots(
        self, schema: Schema, *, writable: bool = True, parts: Parts | None = None
    ) -> Any:
        """Maps the slots file.

        If the directory can only be read, the map is a copy, which contains only the byte ranges
        ``parts`` if these are given.
        """
        size = schema.sections["bytes"]
        options: dict[str, Any] = {"aligned": True, "dense": True, "parts": parts}
        return self._map_file(layout.SLOTS, size, writable=writable, **options)

    def _map_file(self, name: str, nbytes: int, *, writable: bool, **options: Any) -> Any:
        """Maps an existing file, and stores its inode for `_require_mapped`."""
        file = self._open_required(name, nbytes=nbytes, writable=writable)
        with file, explain_errors(self.path / name, needed=nbytes, free=free_memory_bytes):
            options |= {"writable": writable, "private": self.private}
            found = os.fstat(file.fd)
            self._mapped[name] = found.st_dev, found.st_ino
            return map_file(self.directory, name, file, nbytes, **options)

    def _open_required(
        self, name: str, *, nbytes: int | None = None, writable: bool
    ) -> _core.Descriptor:
        """Opens a file. Raises CorruptBufferError if the file is missing."""
        try:
            return self.directory.open_file(name, nbytes=nbytes, writable=writable)
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def _read_required(self, name: str, limit: int) -> bytes:
        """Reads a file of at most ``limit`` bytes. Raises CorruptBufferError if it is missing."""
        try:
            return self.directory.read(name, limit=limit)
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> CorruptBufferError:
        message = f"{self.path}/{name}: is missing; restore it from a copy of the directory"
        return CorruptBufferError(message, path=str(self.path / name))
