"""Saves the items of list storages, without pickle unless pickle is allowed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory import Engine, ItemSnapshot
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.progress import Progress
from shmbuffer.saves.checkpointers.object_files import ITEMS, write_items
from shmbuffer.saves.checkpointers.record_image import RecordImage, moment_of
from shmbuffer.saves.checkpointers.restoring import finish_load, require_alone
from shmbuffer.saves.checkpointers.ring_checkpointer import RingStorageCheckpointer, Written
from shmbuffer.saves.checkpointers.saved_storage import SavedStorage
from shmbuffer.saves.checkpointers.snapshots import settings_of, write_records, write_ring
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.safe_files import make_folder
from shmbuffer.saves.values import damaged, read_values, reading
from shmbuffer.torchrl.compat import compressed_files


class ListStorageCheckpointer(RingStorageCheckpointer):
    """Saves the items of a list storage as lines of JSON and the bytes of tensors; see `values`.

    The records of a list in a directory are saved unchanged, in a directory that `attach` opens.
    Each kind of list storage can load saves of the others.

    The following objects are restored exactly: tensors, TensorDicts, tensorclasses and lazy stacks
    of these, arrays, text, numbers, None, bytes, and lists, tuples, dicts and namedtuples of these.
    Tensors are restored on the CPU or on the storage's ``device``. TorchRL has no format for lists.

    Args:
        allow_pickle: if True, all other objects are pickled. Loading pickled objects runs code from
            the file, so allow it only for files that you trust. The buffer that loads the save
            needs the same setting.

    Example:
        >>> from shmbuffer import ListStorage, ListStorageCheckpointer, ReplayBuffer
        >>> checkpointer = ListStorageCheckpointer(allow_pickle=True)
        >>> rb = ReplayBuffer(storage=ListStorage(10), checkpointer=checkpointer)
        >>> rb.storage.checkpointer is checkpointer
        True

    Source: ``torchrl.data.ListStorageCheckpointer``, which saves nothing.
    """

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> ItemSnapshot:
        """Writes the items into a directory.

        Args:
            storage: a list storage.
            path: the directory, which is created if necessary.

        Returns:
            The snapshot that was written.

        Raises:
            TypeError: an item could only be pickled. The message has the number of the item.
            ValueError: the save hooks returned a different number of items than they received.
        """
        path = Path(path)
        make_folder(path)
        ring, settings = self.ring_of(storage), settings_of(storage)
        if ring.records is not None and not self._save_hooks:
            return write_records(path, ring, storage.engine().seat.dictionary(), settings)
        moment: ItemSnapshot
        items, moment = storage.copy_out()
        if self._save_hooks:
            record = SavedStorage.of_moment(moment)
            hooks = partial(
                self._apply_save_hooks, path=path, shift=record.shift, is_full=record.is_full
            )
            items = self._hooked(storage, items, hooks, "save")
        if ring.records is None:  # a list in memory has only one writer, this process
            streams = layout.stream_of(moment.sources)
            sources = layout.source_of(np.ones_like(streams), streams)
            moment = moment._replace(sources=sources)
        moment = moment._replace(extents=None)  # the items are not saved as records
        with Progress("copy", len(items), "items") as progress:
            write_ring(path, ring, moment, settings)
            write_items(
                *(path, progress.counted(items)),
                allow_pickle=self.allow_pickle,
                remedy=self._remedy,
            )
        return moment

    def _loads_buffer(self, storage: Any, engine: Engine, path: Path) -> Loaded:
        ring = engine.ring()
        image: RecordImage | None = None
        if ring is not None and ring.records is not None:
            dictionary = engine.seat.dictionary()
            if engine.shared:
                image, moment = RecordImage.in_memory(ring.records, dictionary)
            else:
                image, moment = RecordImage.of_save(ring, dictionary, str(path))
        elif ring is not None and ring.schema.structure == {"kind": layout.OBJECTS}:
            moment = moment_of(ring)
        else:
            raise SchemaMismatchError(
                f"{path}: is the directory of a buffer of rows, which a {type(storage).__name__} "
                "cannot load; load it into a LazyMemmapStorage"
            )
        saved = SavedStorage.of_moment(moment)
        return self._put(storage, saved, path, image)

    def _loads_files(self, storage: Any, path: Path, written: Written) -> Loaded:
        raise FileNotFoundError(f"{path}: no list of items was saved in this directory")

    def _put(
        self,
        storage: Any,
        record: SavedStorage,
        path: Path,
        image: RecordImage | None,
        kept: list[Any] | None = None,
    ) -> Loaded:
        """Replaces the items of a storage with those of a save.

        Args:
            storage: The storage.
            record: The slots of the save.
            path: The directory of the save.
            image: The saved records, which are copied unchanged unless there are load hooks.
            kept: The items in the representation of the storage. None: they are read from
                ``image`` or ``path``.
        """
        require_alone(storage)
        places = record.places(storage.max_size, str(path), "places")
        counts = {"cursor": places.cursor, "write_count": record.written}
        if image is not None and storage.shared and not self._load_hooks:
            _require_number(len(image), record, path)
            storage.notify_emptied()
            storage.load_image(image, places.slots, **counts, tickets=places.tickets)
            return finish_load(storage, record, places, by_us=not storage.shared)
        if kept is None:
            kept = self._read(storage, record, path, image)
            _require_number(len(kept), record, path)
            if self._load_hooks:
                hooks = partial(self._apply_load_hooks, out=None)
                kept = self._hooked(storage, kept, hooks, "load")
        storage.notify_emptied()
        storage.copy_in(kept, places.slots, **counts)
        return finish_load(storage, record, places, by_us=not storage.shared)

    def _read(
        self, storage: Any, record: SavedStorage, path: Path, image: RecordImage | None
    ) -> list[Any]:
        """Reads the items of a save, and converts them to the representation of the storage."""
        kept, codec = [], storage.codec
        if image is not None:
            decoded = image.items(storage.codec_for(image.dictionary))
            return [codec.keep(item) for part in decoded for item in part]
        file = path / ITEMS
        with Progress("load", int(record.present.sum()), "items") as progress:
            for item in read_values(file.parent, file.name, allow_pickle=self.allow_pickle):
                with reading(path / f"{ITEMS}.jsonl"):
                    kept.append(codec.accept(item))
                progress.advance(1)
        return kept

    @staticmethod
    def _hooked(storage: Any, kept: list[Any], hooks: Callable[[list[Any]], Any], what: str) -> Any:
        """Passes items through hooks. Items are in the representation of the storage.

        Raises ValueError if the hooks return a different number of items. ``what`` is ``"save"`` or
        ``"load"``.
        """
        codec = storage.codec
        found = [codec.keep(item) for item in hooks([codec.give(one) for one in kept])]
        if len(found) != len(kept):
            raise ValueError(
                f"{what} hooks returned {len(found)} items for {len(kept)} items; the hooks of a "
                "list storage must return as many items as they receive"
            )
        return found


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """Saves and loads the compressed bytes of a `CompressedListStorage` unchanged.

    If there are save hooks and the storage is in a directory, the items that the hooks return are
    saved without compression.

    Saves by TorchRL can also be loaded. Their items are decompressed with the storage's own
    ``decompression_fn``, or else with the codec that TorchRL used (zlib or zstd), and compressed
    again. TorchRL cannot load saves of this class, because its codec depends on the version of
    Python.

    Args:
        allow_pickle: see `ListStorageCheckpointer`.

    Source: ``torchrl.data.CompressedListStorageCheckpointer``.
    """

    def _loads_files(self, storage: Any, path: Path, written: Written) -> Loaded:
        if not compressed_files.is_of_torchrl(path):
            return super()._loads_files(storage, path, written)
        items = storage._read_torchrl(path)
        present = np.array([item is not None for item in items], np.bool_)
        cursor, count = (len(items), None) if written is None else written
        record = SavedStorage(len(items), (), present, cursor, count)
        kept = [storage.codec.keep(item[0]) for item in items if item is not None]
        return self._put(storage, record, path, None, kept)


def _require_number(found: int, record: SavedStorage, path: Path) -> None:
    """Raises CorruptBufferError if the number of items differs from that in the record."""
    expected = int(record.present.sum())
    if found != expected:
        raise damaged(path, f"must have {expected} items, got {found}")
