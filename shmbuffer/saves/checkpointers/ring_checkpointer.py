"""The base class of checkpointers for storages on a ring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.format.layout import CONTROL
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase, lies_in
from shmbuffer.saves.checkpointers.snapshots import open_buffer
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.safe_files import exists
from shmbuffer.torchrl.compat.storage_files import METADATA

Written = tuple[int, int | None] | None
"""The cursor and write count of TorchRL's writer; see `StorageCheckpointerBase.loads_beside`."""


class RingStorageCheckpointer(StorageCheckpointerBase):
    """Saves and loads a storage that uses a ring, as a copy of one snapshot or in place."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = allow_pickle

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Loaded:
        """Replaces the contents of the storage with a save.

        If the capacity differs and the saved ring was full, the items are stored in the order of
        their age.

        Raises:
            FileNotFoundError: The directory contains no save.
            SchemaMismatchError: The leaves of the save differ from those of the storage.
            ValueError: The items do not fit into the storage, or contain pickled objects.
            BufferInUseError: Other processes use the storage.
            CorruptBufferError: The files are damaged.
        """
        return self._loads(storage, Path(path), None)

    def loads_beside(self, storage: Any, path: Path, written: Written) -> Loaded:
        """Loads the storage of a buffer whose other parts are also loaded."""
        if type(self).loads is not RingStorageCheckpointer.loads:  # a class that the user defined
            return self.loads(storage, path)
        return self._loads(storage, path, written)

    def _loads(self, storage: Any, path: Path, written: Written) -> Loaded:
        in_place, path = lies_in(storage, path), resolve_path(path)
        # a buffer takes precedence over older files of TorchRL in the same directory
        if exists(path / CONTROL) and not is_export(path):
            if in_place:
                storage.open_there()
                if storage.ring() is not None:
                    return Loaded(in_place=True)
            else:
                with open_buffer(path) as engine:
                    if engine.ring() is not None or not (path / METADATA).exists():
                        return self._loads_buffer(storage, engine, path)
        return self._loads_files(storage, path, written)

    # -- for each kind of storage --------------------------------------------------------------

    def _loads_buffer(self, storage: Any, engine: Engine, path: Path) -> Loaded:
        """Replaces the items of the storage with those of the open buffer in ``path``."""
        raise NotImplementedError

    def _loads_files(self, storage: Any, path: Path, written: Written) -> Loaded:
        """Replaces the items with those of a save in TorchRL's layout.

        ``path`` may be the scratch directory of the storage.
        """
        raise NotImplementedError

    def ring_of(self, storage: Any) -> Ring:
        """Returns the ring of a storage. Raises RuntimeError if nothing was written to it yet."""
        ring: Ring | None = storage.ring()
        if ring is None:
            raise RuntimeError(
                f"Cannot save a non-initialized storage: nothing was written to {storage.where} "
                "yet, so there is nothing to save"
            )
        return ring

    @property
    def _remedy(self) -> str:
        """The instruction for allowing pickle, which messages contain."""
        return f"set storage.checkpointer = {type(self).__name__}(allow_pickle=True)"


def is_export(path: Path) -> bool:
    """True if a directory is a save in TorchRL's layout, by this library or TorchRL."""
    return exists(path / METADATA) and is_save(path)
