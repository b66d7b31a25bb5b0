"""Saves tensor storages as memory-mapped files of tensordict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict

from shmbuffer.errors import ShmBufferError
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.memory import Engine, ItemSnapshot
from shmbuffer.saves.checkpointers.checkpointer import lies_in
from shmbuffer.saves.checkpointers.copies import copy_rows, make_columns
from shmbuffer.saves.checkpointers.object_files import write_objects
from shmbuffer.saves.checkpointers.restoring import restore
from shmbuffer.saves.checkpointers.ring_checkpointer import RingStorageCheckpointer, Written
from shmbuffer.saves.checkpointers.saved import Saved
from shmbuffer.saves.checkpointers.saved_storage import SavedStorage
from shmbuffer.saves.checkpointers.snapshots import settings_of, write_rows
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.safe_files import exists, make_folder, require_plain
from shmbuffer.saves.values import damaged, reading
from shmbuffer.tensors.form import cpu, tensor_structure
from shmbuffer.tensors.form.tensor_kit import TENSORS, new_columns, values_of
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode, is_collection
from shmbuffer.torchrl.compat.folders import add_objects, require_nameable, require_no_pickle
from shmbuffer.torchrl.compat.storage_files import METADATA, pytree_metadata, read_metadata
from shmbuffer.torchrl.ted.entries import entries, require_loadable

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.storages.movers.tensor_rows import Rows


class TensorStorageCheckpointer(RingStorageCheckpointer):
    """Saves TensorDicts, tensorclasses, tensors and PyTrees as memory-mapped files.

    A save contains one snapshot, even if other processes write during the save. The data are never
    completely in memory. If the directory is the storage's own ``scratch_dir``, nothing is copied.

    To write the same data in another format, derive from this class and override `_write` and
    `_read`. Also override `_apply_save_hooks` if hooks are called in another way. This class
    ensures that the copy is consistent, calls the hooks, sets their ``shift`` and ``is_full``, and
    loads the data into the storage.

    Args:
        allow_pickle: if True, objects that are neither tensors, text, numbers, nor containers of
            these are pickled. Loading pickled objects runs code from the file, so allow it only for
            files that you trust.

    Source: ``torchrl.data.TensorStorageCheckpointer``.
    """

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> ItemSnapshot | None:
        """Writes the storage into a directory.

        Args:
            storage: a storage of tensors.
            path: the directory, which is created if necessary.

        Returns:
            The snapshot that was written, or None if the storage was saved in place.

        Raises:
            RuntimeError: nothing was written to the storage yet.
            TypeError: an object in the storage could only be pickled.
            SpaceError: there is not enough space. The message contains the numbers of needed and
                free bytes.
        """
        path = Path(path)
        self.ring_of(storage)
        if lies_in(storage, path):
            storage._flush_in_place(path)
            return None
        rows: Rows = storage.mover()
        if self.writes_snapshots(storage):
            make_folder(path)
            return write_rows(
                *(path, rows, settings_of(storage)),
                allow_pickle=self.allow_pickle,
                remedy=self._remedy,
            )
        return self._export(storage, path)

    def _export(self, storage: Any, path: Path) -> ItemSnapshot:
        """Writes the storage in TorchRL's layout. Returns the snapshot that was written."""
        rows: Rows = storage.mover()
        folder = self._folder(path)
        if not self.writes_snapshots(storage) or folder is None:
            return self._dumps_through_hooks(storage, path, folder)
        moment, columns = copy_rows(rows, folder, named=True)
        record = SavedStorage.of_moment(moment, rows.leaves.lanes, rows.leaves.node.to_json())
        metadata = self._metadata_of(storage)
        record.write(folder, rows.ring, settings_of(storage), metadata)
        options: dict[str, Any] = {"allow_pickle": self.allow_pickle, "remedy": self._remedy}
        write_objects(folder, rows.leaves, columns, record.present, **options)
        for at in sorted(rows.leaves.objects) if metadata is None else ():
            add_objects(folder, rows.leaves.leaves[at].path, columns[at], record.present)
        return moment

    def _metadata_of(self, storage: Any) -> dict[str, Any] | None:
        """Returns TorchRL's metadata for a PyTree; None if the items are TensorDicts."""
        leaves, slots = storage.mover().leaves, storage.ring().capacity
        return None if isinstance(leaves.node, TensorDictNode) else pytree_metadata(leaves, slots)

    def _loads_buffer(self, storage: Any, engine: Engine, path: Path) -> Loaded:
        saved = Saved.of_buffer(engine, path, allow_pickle=self.allow_pickle)
        if self._load_hooks:
            node, record = saved.node, saved.record
            assert node is not None  # the schema of a buffer contains the structure of its items
            columns = [saved.by_key[key] for key in node.paths()]
            data = node.build(iter(columns), (record.slots, *record.lanes), cpu.DEVICE)
            length = record.extent * record.width
            saved = self._through_hooks(storage, path, data, length, record)
        return restore(storage, saved)

    def _loads_files(self, storage: Any, path: Path, written: Written) -> Loaded:
        saved = (
            self._through_hooks(storage, path, *self._read(path), self._record(path))
            if self._load_hooks
            else Saved.in_files(path, ndim=storage.ndim, allow_pickle=self.allow_pickle)
        )
        record = saved.record
        if record.moment is None and written is not None:
            record.cursor = written[0] % record.slots
            if written[1] is not None:
                record.write_count = written[1] * record.width
        return restore(storage, saved, there=storage.mover() is None and lies_in(storage, path))

    def writes_snapshots(self, storage: Any) -> bool:
        """True if no save hook and no other format changes the data that are saved."""
        has_own_format = type(self)._write is not TensorStorageCheckpointer._write
        return not self._save_hooks and not has_own_format

    # -- for other formats ---------------------------------------------------------------------

    def _folder(self, path: Path) -> Path | None:
        """Creates and returns the directory for additional files; None if there is no directory."""
        make_folder(path)
        return path

    def _write(self, data: Any, path: Path, length: int) -> None:
        """Writes the data that the save hooks returned.

        Args:
            data: A TensorDict.
            path: The path of the save.
            length: The number of elements up to the last slot that contains an item.
        """
        saved_path = data.saved_path if data.is_memmap() else None
        if saved_path is None or os.path.realpath(saved_path) != os.path.realpath(path):
            require_nameable(data, str(path))
            require_loadable(entries(data), type(self).__name__)
            data.memmap(path, copy_existing=True)  # otherwise a hook has already written the data
        require_no_pickle(path)

    def _read(self, path: Path) -> tuple[Any, int]:
        """Reads the data that `_write` wrote. Returns the data and their length."""
        folder = Path(os.path.realpath(path))  # the path may be a link, but the files must not be
        require_plain(folder)
        require_no_pickle(path)
        with reading(folder / "meta.json"):
            try:
                data = TensorDict.load_memmap(folder)
            except IsADirectoryError as error:
                raise damaged(error.filename, "is a directory, not a file") from error
        return data, int(read_metadata(path)["len"])

    def _record(self, path: Path) -> SavedStorage | None:
        """Reads the record of the slots. Returns None if another program has written the data."""
        if not exists(path / METADATA):  # the save is a single file, without a record
            return None
        return SavedStorage.read(path, read_metadata(path))

    # -- hooks ---------------------------------------------------------------------------------

    def _dumps_through_hooks(self, storage: Any, path: Path, folder: Path | None) -> ItemSnapshot:
        """Passes a copy of the storage through the save hooks, and writes the result.

        ``folder`` is the directory for additional files, or None. Returns the snapshot.
        """
        rows: Rows = storage.mover()
        leaves = rows.leaves
        scratch = path.parent if folder is None else folder
        moment, columns = copy_rows(rows, scratch, named=False)
        record = SavedStorage.of_moment(moment, leaves.lanes, leaves.node.to_json())
        lead = (record.slots, *record.lanes)
        data = leaves.node.build(iter(columns), lead, cpu.DEVICE)
        data = self._apply_save_hooks(data, path, shift=record.shift, is_full=record.is_full)
        metadata: dict[str, Any] | None = None
        if is_collection(data):
            self._write(data, path, record.extent * record.width)
        elif folder is None:
            raise TypeError(f"{type(self).__name__} saves TensorDicts, not {type(data).__name__}")
        else:
            metadata, record.structure = _write_pytree(data, folder, leaves)
        if folder is not None:
            record.write(folder, rows.ring, settings_of(storage), metadata)
        return moment

    def _through_hooks(
        self, storage: Any, path: Path, data: Any, length: int, record: SavedStorage | None
    ) -> Saved:
        """Passes the data of a save through the load hooks.

        Args:
            storage: The storage that is loaded.
            path: The path of the save, for messages.
            data: The data that were read.
            length: The number of elements in the save.
            record: The slots of the save; None if another program has written the save.

        Returns:
            The data that the hooks returned, as columns.
        """
        rows = storage.mover()
        out = None
        if rows is not None:
            capacity, device = rows.ring.capacity, cpu.DEVICE
            blank = iter(new_columns(rows.leaves, capacity, device))
            out = rows.leaves.node.build(blank, (capacity, *rows.leaves.lanes), device)
        with _path_in_errors(path):
            data = self._apply_load_hooks(data, out)
        options = {"mapping": storage.mapping, "where": str(path)}
        leaves = Leaves.of_data(TENSORS, data, ndim=storage.ndim, **options)
        columns, (count,) = values_of(leaves, data)
        if record is None or record.extent > count or record.lanes != leaves.lanes:
            width = int(np.prod(leaves.lanes, dtype=np.int64))
            record = SavedStorage(count, leaves.lanes, np.arange(count) < length // width)
        node = leaves.node
        if record.structure is not None:
            # hooks return TensorDicts, but the record contains the classes, such as tensorclasses
            recorded = tensor_structure.from_json(record.structure)
            by_key = dict(zip(node.paths(), columns, strict=True))
            if {*recorded.paths()} == by_key.keys():
                node, columns = recorded, [by_key[key] for key in recorded.paths()]
        return Saved.of_columns(str(path), record, node, columns)


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Adds the path of the save to the errors that load hooks raise."""
    try:
        yield
    except ShmBufferError as error:
        error.message = f"{path}: {error.message}"
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write_pytree(data: Any, folder: Path, leaves: Leaves) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes a PyTree that save hooks returned.

    Returns:
        TorchRL's metadata for the PyTree, and the structure of an item as JSON.
    """
    ndim = 1 + len(leaves.lanes)
    found = Leaves.of_data(TENSORS, data, ndim=ndim, where=str(folder))
    values, (count,) = values_of(found, data)
    columns, files = make_columns(found, count, folder)
    for file in files.values():
        file.close()
    for column, value in zip(columns, values, strict=True):
        column.copy_(value)
    return pytree_metadata(found, count), found.node.to_json()
