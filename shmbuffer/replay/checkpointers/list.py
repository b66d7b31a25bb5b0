"""Lists of objects: without pickle, unless that is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.replay.checkpointers.record import LIST, METADATA, Record, read_metadata
from shmbuffer.replay.checkpoints import Loaded
from shmbuffer.replay.values import pack_plainly, read_packed, unpack_plainly, write_packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Moment
    from shmbuffer.replay.packing import Packed

_ITEMS = "shmbuffer.list"


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Items of a list storage, as two files of our own; see `values`.

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
        items, _, moment = storage.copy_out()
        if self._save_hooks:
            items = self._hooked(storage, items, path, moment)
        write_packed(
            path,
            _ITEMS,
            map(self._packed, items),
            allow_pickle=self.allow_pickle,
            what="item",
            remedy=f"set storage.checkpointer = {type(self).__name__}(allow_pickle=True)",
        )
        capacity = len(moment.tickets)
        record = Record(
            capacity,
            (),
            moment.tickets >= 0,
            moment.head % capacity,
            moment.write_count,
            None,
            moment.tickets,
            np.where(moment.tickets >= 0, 1, -1),  # one process is all that writes into a list
        )
        record.write(path, kind=LIST)
        return moment  # type: ignore[no-any-return] # of any list storage

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Put what was saved in place of what the storage has.

        Where the capacity is another one and the ring had gone round, items are put in the order
        of their age.

        Raises:
            FileNotFoundError: nothing was saved there.
            ValueError: more than there is room for; or something was pickled, and is not allowed
                to be. Nothing was changed, and nothing was unpickled.
            CorruptBufferError: the files are damaged.
        """
        path = Path(path)
        record = Record.read(path, read_metadata(path), kind=LIST)
        if record is None:
            raise CorruptBufferError(
                f"{path / METADATA}: is not of a list storage; take another copy of the checkpoint",
                path=str(path / METADATA),
            )
        found = read_packed(path, _ITEMS, allow_pickle=self.allow_pickle)
        kept = [self._unpacked(storage, packed) for packed in found]
        if len(kept) != int(record.present.sum()):
            raise CorruptBufferError(
                f"{path}: has {len(kept)} items, {int(record.present.sum())} belong there; take "
                "another copy of the checkpoint",
                path=str(path),
            )
        if self._load_hooks:
            given = self._apply_load_hooks([storage._give(item) for item in kept], None)
            kept = [storage._keep(item) for item in given]
            if len(kept) != int(record.present.sum()):
                raise ValueError(_other_number("load", len(kept), int(record.present.sum())))
        assert record.cursor is not None
        slots, cursor, shift = self._places(storage, record, path)
        storage.notify_emptied()
        storage.copy_in(kept, slots, cursor=cursor, write_count=record.written)
        if len(slots):
            storage.notify(torch.from_numpy(slots))
        return Loaded(cursor, record.slots, 1, shift)

    def _packed(self, kept: Any) -> Packed:
        """An item of the storage, as it is written."""
        return pack_plainly(kept)

    def _unpacked(self, storage: Any, packed: Packed) -> Any:
        """What the storage keeps of an item that was written."""
        return storage._keep(unpack_plainly(packed))

    def _hooked(self, storage: Any, items: list[Any], path: Path, moment: Moment) -> list[Any]:
        """Items after the save hooks, which are given what `get` gives."""
        capacity = len(moment.tickets)
        shift = moment.head % capacity
        is_full = bool((moment.tickets[shift:] >= 0).any())
        given = self._apply_save_hooks(
            [storage._give(item) for item in items],
            path,
            shift=shift or (capacity if is_full else 0),
            is_full=is_full,
        )
        kept = [storage._keep(item) for item in given]
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


def _other_number(kind: str, found: int, expected: int) -> str:
    return (
        f"{kind} hooks made {found} items of {expected}; in a list every item has its place, so "
        "there are as many after them as before"
    )
