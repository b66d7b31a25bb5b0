"""Lists of objects: without pickle, unless that is allowed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import CorruptBufferError, SchemaMismatchError
from shmbuffer.memory import Engine
from shmbuffer.memory.layout import CONTROL
from shmbuffer.memory.progress import Progress
from shmbuffer.replay.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.replay.checkpointers.record import (
    LIST,
    METADATA,
    Record,
    read_metadata,
    write_beside,
)
from shmbuffer.replay.checkpointers.record_files import has_records, read_records, write_records
from shmbuffer.replay.checkpointers.record_image import RecordImage
from shmbuffer.replay.checkpointers.restoring import as_loaded, require_alone
from shmbuffer.replay.checkpointers.tensor import lies_in
from shmbuffer.replay.checkpoints import Loaded
from shmbuffer.replay.values import pack_plainly, read_packed, reading, unpack_plainly, write_packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Moment, Ring
    from shmbuffer.replay.form.packing import Packed

_ITEMS = "shmbuffer.list"


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Items of a list storage, as two files of our own; see `values`.

    Of a list in a directory, which has records: the records as they are; see `record_files`. Each
    is loaded by the other.

    Tensors, TensorDicts, tensorclasses and lazy stacks of them, arrays, text, numbers, None, bytes,
    and lists, tuples, dicts and namedtuples of these come back as they were; tensors on the CPU,
    or on the storage's ``device``. TorchRL has no format for lists.

    Args:
        allow_pickle: pickle what is none of these. To load what was pickled runs code from the
            file: allow it only for files that you trust. Give the same to the buffer that loads.

    Example:
        >>> from shmbuffer import ListStorage, ListStorageCheckpointer, ReplayBuffer
        >>> checkpointer = ListStorageCheckpointer(allow_pickle=True)
        >>> rb = ReplayBuffer(storage=ListStorage(10), checkpointer=checkpointer)
        >>> rb.storage.checkpointer is checkpointer
        True

    Source: ``torchrl.data.ListStorageCheckpointer``, which saves nothing.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = allow_pickle

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> Moment:
        """Write the items into a directory.

        Args:
            storage: a list storage.
            path: the directory; it is made if it is not there.

        Returns:
            The moment that was written.

        Raises:
            TypeError: an item could only be pickled; it is named.
            ValueError: a save hook gave another number of items.
        """
        path = Path(path)
        path.mkdir(exist_ok=True)
        ring = _ring_of(storage)
        if ring.records is not None and not self._save_hooks:
            moment = write_records(path, ring.records, storage.engine.dictionary())
            _record_of(moment, moment.sources).write(path, kind=LIST)
            return moment
        items, _, moment = storage.copy_out()
        if self._save_hooks:
            items = self._hooked(storage, items, path, moment)
        write_packed(
            path,
            _ITEMS,
            self._all_packed(storage, items),
            allow_pickle=self.allow_pickle,
            what="item",
            remedy=f"set storage.checkpointer = {type(self).__name__}(allow_pickle=True)",
        )
        sources = moment.sources
        if ring.records is None:  # one process is all that writes into a list
            sources = np.where(moment.tickets >= 0, 1, -1)
        _record_of(moment, sources).write(path, kind=LIST)
        return moment  # type: ignore[no-any-return] # of any list storage

    def dumps_in_place(self, storage: Any, folder: Path) -> None:
        """Write what is to be known beside the storage's own files, which stay as they are.

        The records are the live buffer's: whoever loads them sees what is there then.

        Args:
            storage: a list whose ``scratch_dir`` will have the files of ``folder``.
            folder: where to write; it is there.

        Raises:
            RuntimeError: there are save hooks, which would change the live data; or nothing was
                written to the storage yet.
        """
        if self._save_hooks:
            raise RuntimeError(
                f"{storage.scratch_dir}: is where the storage itself has its files, and "
                f"{type(self).__name__} with its hooks would write something else over them; save "
                "to another directory"
            )
        ring = _ring_of(storage)
        storage.engine.flush()
        write_beside(folder, ring)

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Put what was saved in place of what the storage has.

        Where the capacity is another one and the ring had gone round, items are put in the order
        of their age.

        Raises:
            FileNotFoundError: nothing was saved there.
            ValueError: more than there is room for; or something was pickled, and is not allowed
                to be. Nothing was changed, and nothing was unpickled.
            SchemaMismatchError: it is a storage of tensors; nothing was changed.
            BufferInUseError: other processes use the storage; nothing was changed.
            CorruptBufferError: the files are damaged.
        """
        path = Path(path)
        if (path / CONTROL).exists():  # what is in it now counts, not older files
            return self._loads_buffer(storage, path)
        record = Record.read(path, read_metadata(path), kind=LIST)
        if record is None:
            raise CorruptBufferError(
                f"{path / METADATA}: is not of a list storage; take another copy of the checkpoint",
                path=str(path / METADATA),
            )
        if has_records(path):
            return self._loads_image(storage, record, read_records(path), path)
        require_alone(storage)
        places = self._places(storage, record, path)
        kept = []
        with Progress("load", int(record.present.sum()), "items") as progress:
            for packed in read_packed(path, _ITEMS, allow_pickle=self.allow_pickle):
                with reading(path / f"{_ITEMS}.jsonl"):
                    kept.append(self._unpacked(storage, packed))
                progress.advance(1)
        return self._put(storage, record, self._hooked_in(storage, record, kept, path), places)

    def _loads_buffer(self, storage: Any, path: Path) -> Loaded:
        """What a buffer holds that has its files there: the storage's own, or another one."""
        if lies_in(storage, path):
            storage.open_there()
            return Loaded(in_place=True)
        with Engine.open(path, None) as engine:
            ring = engine.ring
            if ring is None or ring.records is None:
                raise SchemaMismatchError(
                    f"{path}: is the directory of a buffer of rows, and a {type(storage).__name__} "
                    "holds items; load it into a LazyMemmapStorage"
                )
            image, moment = RecordImage.in_memory(ring.records, engine.dictionary())
        record = _record_of(moment, moment.sources)
        return self._loads_image(storage, record, image, path)._replace(moment=moment)

    def _loads_image(self, storage: Any, record: Record, image: RecordImage, path: Path) -> Loaded:
        """Records in place of what the storage has: as they are, unless hooks want to see them."""
        require_alone(storage)
        _require_number(len(image), record, path)
        places = self._places(storage, record, path)
        if self._load_hooks or storage.record_shelf is None:
            codec = storage.codec_for(image.dictionary)
            kept = [storage.keeping.keep(item) for part in image.items(codec) for item in part]
            return self._put(storage, record, self._hooked_in(storage, record, kept, path), places)
        slots, cursor, _ = places
        storage.notify_emptied()
        storage.load_image(image, slots, cursor=cursor, write_count=record.written)
        return self._loaded(storage, record, places)

    def _put(
        self, storage: Any, record: Record, kept: list[Any], places: tuple[Any, int, int]
    ) -> Loaded:
        """Items in place of what the storage has."""
        slots, cursor, _ = places
        storage.notify_emptied()
        storage.copy_in(kept, slots, cursor=cursor, write_count=record.written)
        return self._loaded(storage, record, places)

    @staticmethod
    def _loaded(storage: Any, record: Record, places: tuple[Any, int, int]) -> Loaded:
        """Say who wrote the items, and let samplers know of them."""
        slots, cursor, shift = places
        if storage.record_shelf is not None and record.sources is not None:
            storage.ring.sources[slots] = as_loaded(record.sources[record.present])
        if len(slots):
            storage.notify(torch.from_numpy(slots))
        return Loaded(cursor, record.slots, 1, shift)

    def _hooked_in(self, storage: Any, record: Record, kept: list[Any], path: Path) -> list[Any]:
        """What the storage is to keep of the items that were saved, after the load hooks."""
        _require_number(len(kept), record, path)
        if self._load_hooks:
            keeping = storage.keeping
            given = self._apply_load_hooks([keeping.give(one) for one in kept], None)
            kept = [keeping.keep(item) for item in given]
            if len(kept) != int(record.present.sum()):
                raise ValueError(_other_number("load", len(kept), int(record.present.sum())))
        return kept

    def _all_packed(self, storage: Any, items: list[Any]) -> Iterator[Packed]:
        with Progress("copy", len(items), "items") as progress:
            for item in items:
                yield self._packed(storage, item)
                progress.advance(1)

    def _packed(self, storage: Any, kept: Any) -> Packed:
        """An item of the storage, as it is written."""
        return pack_plainly(kept)

    def _unpacked(self, storage: Any, packed: Packed) -> Any:
        """What the storage keeps of an item that was written."""
        return storage.keeping.keep(unpack_plainly(packed))

    def _hooked(self, storage: Any, items: list[Any], path: Path, moment: Moment) -> list[Any]:
        """Items after the save hooks, which are given what `get` gives."""
        capacity = len(moment.tickets)
        shift = moment.head % capacity
        is_full = bool((moment.tickets[shift:] >= 0).any())
        given = self._apply_save_hooks(
            [storage.keeping.give(item) for item in items],
            path,
            shift=shift or (capacity if is_full else 0),
            is_full=is_full,
        )
        kept = [storage.keeping.keep(item) for item in given]
        if len(kept) != len(items):
            raise ValueError(_other_number("save", len(kept), len(items)))
        return kept

    @staticmethod
    def _places(storage: Any, record: Record, path: Path) -> tuple[NDArray[np.int64], int, int]:
        """Slots of the items in their order, the next slot, and the shift."""
        slots = np.nonzero(record.present)[0]
        cursor, shift = int(record.cursor or 0), 0
        if record.is_full and record.slots != storage.max_size:
            shift = cursor
            slots = (slots - shift) % record.slots
            cursor = int(slots.max()) + 1
        if len(slots) and int(slots.max()) >= storage.max_size:
            raise ValueError(
                f"{path}: has items in {int(slots.max()) + 1} places, and the storage has room for "
                f"{storage.max_size}; load it into a larger one. Nothing was changed"
            )
        return slots, cursor % storage.max_size, shift


def _ring_of(storage: Any) -> Ring:
    ring: Ring | None = storage.ring
    if ring is None:
        raise RuntimeError(
            f"Cannot save a non-initialized storage: nothing was written to {storage.where} yet"
        )
    return ring


def _record_of(moment: Moment, sources: NDArray[np.int64]) -> Record:
    capacity = len(moment.tickets)
    return Record(
        capacity,
        (),
        moment.tickets >= 0,
        moment.head % capacity,
        moment.write_count,
        None,
        moment.tickets,
        sources,
    )


def _require_number(found: int, record: Record, path: Path) -> None:
    """CorruptBufferError where there are more or fewer items than there should be."""
    expected = int(record.present.sum())
    if found != expected:
        raise CorruptBufferError(
            f"{path}: has {found} items, {expected} belong there; take another copy of the "
            "checkpoint",
            path=str(path),
        )


def _other_number(kind: str, found: int, expected: int) -> str:
    return (
        f"{kind} hooks made {found} items of {expected}; in a list every item has its place, so "
        "there are as many after them as before"
    )
