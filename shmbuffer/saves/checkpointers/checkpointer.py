"""What every checkpointer offers: a storage to a directory and back, with hooks on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Hook = Callable[..., Any]


class StorageCheckpointerBase:
    """How a storage is saved and loaded.

    A checkpointer of your own needs `dumps` and `loads`, and is given to a storage or a buffer as
    ``checkpointer=``. It writes plain files into the directory that it is handed; that nothing is
    seen before all of it is there is the caller's business.

    Source: ``torchrl.data.StorageCheckpointerBase``.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Have ``hook(data, path=path)`` change what is saved.

        Args:
            hook: called with the data of the storage and the directory that they go to (a path
                for this process, until the call ends); returns what is to be saved. If it has
                attributes ``shift`` and ``is_full``, they are set before the call: the slot after
                the last one that was written, and whether the ring has gone round.
        """
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Have ``hook(data, out=destination)`` change what was read from the files.

        Args:
            hook: returns the data of the storage, ``[n, *lanes]``. ``out`` is a batch of the
                storage's own form to write them into, or None where the storage has no form yet.
        """
        self._load_hooks.append(hook)

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> Any:
        """Writes ``storage`` into the directory ``path``, which is made if it is not there.

        Returns:
            None, or the `ItemSnapshot` that was written, where the storage lies on a ring.

        Raises:
            BufferExistsError: the directory has a file of that name already; ``storage.dumps``
                replaces an earlier save.
        """
        raise NotImplementedError(f"{type(self).__name__} has no dumps()")

    def writes_snapshots(self, storage: Any) -> bool:
        """True unless the whole buffer has to be saved in TorchRL's layout."""
        return True

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> Any:
        """Put what ``dumps`` wrote into ``path`` in place of what ``storage`` has."""
        raise NotImplementedError(f"{type(self).__name__} has no loads()")

    def loads_beside(self, storage: Any, path: Path, written: Any) -> Any:
        """`loads`, where a buffer is loaded as a whole.

        Args:
            storage: see `loads`.
            path: see `loads`.
            written: what a writer of TorchRL's has saved beside the storage: cursor (a slot) and
                count of writes (of slots, or None); a list of such for an ensemble; or None. What
                was saved here has its own.
        """
        return self.loads(storage, path)

    @property
    def has_hooks(self) -> bool:
        """True if hooks change what is saved."""
        return bool(self._save_hooks)

    def _apply_save_hooks(self, data: Any, path: Any, *, shift: int, is_full: bool) -> Any:
        """``data`` after all save hooks. ``path`` is what they are given as ``path=``."""
        for hook in self._save_hooks:
            if hasattr(hook, "shift"):
                hook.shift = shift
            if hasattr(hook, "is_full"):
                hook.is_full = is_full
        for hook in self._save_hooks:
            data = hook(data, path=path)
        return data

    def _apply_load_hooks(self, data: Any, out: Any) -> Any:
        """``data`` after all load hooks."""
        for hook in self._load_hooks:
            data = hook(data, out=out)
        return data


def lies_in(storage: Any, path: Path) -> bool:
    """Whether ``path`` is the directory that the storage itself has its files in."""
    scratch = getattr(storage, "scratch_dir", None)
    return scratch is not None and os.path.realpath(scratch) == os.path.realpath(path)
