"""What checkpointers of storages on a ring have in common: their own directory, and another's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format.layout import CONTROL
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase, lies_in
from shmbuffer.saves.checkpointers.saved_storage import write_beside
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.torchrl.compat.storages import METADATA

Written = tuple[int, int | None] | None
"""What a writer of TorchRL's has saved beside: see `StorageCheckpointerBase.loads_beside`."""


class RingStorageCheckpointer(StorageCheckpointerBase):
    """A storage that lies on a ring: saved of one moment, or where it is."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = allow_pickle

    def dumps_in_place(self, storage: Any, folder: Path) -> None:
        """Write what else is to be known of a storage whose own files are in that directory.

        The items are the live buffer's: a load sees those of its time. RuntimeError where hooks
        would change them, or nothing was written yet.
        """
        if self._save_hooks or self._has_format_of_its_own:
            raise RuntimeError(
                f"{storage.scratch_dir}: is where the storage itself has its files, and "
                f"{type(self).__name__} with its hooks would write something else over them; save "
                "to another directory"
            )
        ring = self._ring_of(storage)
        ring.schema.require_columns(storage.where)
        storage.engine().flush()
        write_beside(folder, ring, metadata=self._metadata_of(storage))

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Replace what the storage has with what was saved.

        Where the capacity differs and the ring had gone round, items go by their age.

        Raises:
            FileNotFoundError: nothing was saved there.
            SchemaMismatchError, ValueError: it does not fit, or has something pickled.
            BufferInUseError: other processes use the storage.
            CorruptBufferError: the files are damaged.
        """
        return self._loads(storage, Path(path), None)

    def loads_beside(self, storage: Any, path: Path, written: Written) -> Loaded:
        """See `StorageCheckpointerBase.loads_beside`."""
        if type(self).loads is not RingStorageCheckpointer.loads:  # a class of the user's
            return self.loads(storage, path)
        return self._loads(storage, path, written)

    def _loads(self, storage: Any, path: Path, written: Written) -> Loaded:
        in_place = lies_in(storage, path)
        if (path / CONTROL).exists():  # what is in it now counts, not older files
            if in_place:
                storage.open_there()
                if storage.ring() is not None:
                    return Loaded(in_place=True)
            else:
                with Engine.open(path, None) as engine:
                    if engine.ring() is not None or not (path / METADATA).exists():
                        return self._loads_buffer(storage, engine, path)
        return self._loads_files(storage, path, written)

    # -- for each kind of storage --------------------------------------------------------------

    _has_format_of_its_own = False

    def _metadata_of(self, storage: Any) -> dict[str, Any] | None:
        """What TorchRL says of a PyTree's tensors; None: no PyTree."""
        return None

    def _loads_buffer(self, storage: Any, engine: Engine, path: Path) -> Loaded:
        """Put what another buffer holds, which is open, in place of what the storage has."""
        raise NotImplementedError

    def _loads_files(self, storage: Any, path: Path, written: Written) -> Loaded:
        """Put what was saved in place of the storage's items; ``path`` may be its own directory."""
        raise NotImplementedError

    def _ring_of(self, storage: Any) -> Ring:
        ring: Ring | None = storage.ring()
        if ring is None:
            raise RuntimeError(
                f"Cannot save a non-initialized storage: nothing was written to {storage.where} "
                "yet, so there is nothing to save"
            )
        return ring

    @property
    def _remedy(self) -> str:
        """What allows pickle, for messages."""
        return f"set storage.checkpointer = {type(self).__name__}(allow_pickle=True)"
