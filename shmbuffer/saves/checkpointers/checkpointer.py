"""The base class of checkpointers, which save a storage into a directory and load it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Hook = Callable[..., Any]


class StorageCheckpointerBase:
    """Base class for checkpointers, which save a storage into a directory and load it again.

    A custom checkpointer implements `dumps` and `loads`. Pass it to a storage or a buffer as
    ``checkpointer=``. The checkpointer writes files into the given directory, which the caller
    publishes when all files are complete.

    Source: ``torchrl.data.StorageCheckpointerBase``.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Registers ``hook(data, path=path)``, which changes the data that are saved.

        Args:
            hook: Function that receives the data of the storage and the directory of the save, and
                returns the data to save. The path is valid only in this process and during the
                call. If the hook has the attributes ``shift`` and ``is_full``, they are set before
                the call: ``shift`` to the slot after the newest item, and ``is_full`` to True if
                the ring is full.
        """
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Registers ``hook(data, out=destination)``, which changes the data that were read.

        Args:
            hook: Function that receives the data of the save, and returns the data for the storage,
                ``[n, *lanes]``. ``out`` is a batch with the structure of the storage that the hook
                may fill and return, or None if nothing was written to the storage yet.
        """
        self._load_hooks.append(hook)

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> Any:
        """Writes ``storage`` into the directory ``path``, which is created if necessary.

        Returns:
            The `ItemSnapshot` that was written if the storage uses a ring, otherwise None.

        Raises:
            BufferExistsError: A file that the checkpointer would create already exists. Use
                ``storage.dumps`` to replace an earlier save.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement dumps()")

    def writes_snapshots(self, storage: Any) -> bool:
        """True unless the whole buffer must be saved in TorchRL's layout."""
        return True

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Any:
        """Replaces the contents of ``storage`` with the save in the directory ``path``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement loads()")

    def loads_beside(self, storage: Any, path: Path, written: Any) -> Any:
        """Loads the storage of a buffer whose other parts are also loaded.

        Args:
            storage: The storage.
            path: The directory of the save.
            written: The cursor (a slot) and the number of written slots (or None) that a writer of
                TorchRL has saved; for an ensemble, a list of these. None if no such writer was
                saved. Saves of this library contain their own values.
        """
        return self.loads(storage, path)

    @property
    def has_hooks(self) -> bool:
        """True if hooks change the data that are saved."""
        return bool(self._save_hooks)

    def _apply_save_hooks(self, data: Any, path: Any, *, shift: int, is_full: bool) -> Any:
        """Passes the data through all save hooks in order, and returns the result."""
        for hook in self._save_hooks:
            if hasattr(hook, "shift"):
                hook.shift = shift
            if hasattr(hook, "is_full"):
                hook.is_full = is_full
        for hook in self._save_hooks:
            data = hook(data, path=path)
        return data

    def _apply_load_hooks(self, data: Any, out: Any) -> Any:
        """Passes the data through all load hooks in order, and returns the result."""
        for hook in self._load_hooks:
            data = hook(data, out=out)
        return data


def lies_in(storage: Any, path: Path) -> bool:
    """True if ``path`` is the scratch directory of the storage."""
    scratch = getattr(storage, "scratch_dir", None)
    return scratch is not None and os.path.realpath(scratch) == os.path.realpath(path)
