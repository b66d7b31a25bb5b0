"""What every storage offers: items by index, and a list of who wants to hear of writes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from shmbuffer.memory.progress import OnProgress, hearing
from shmbuffer.replay.checkpointers.checkpointer import StorageCheckpointerBase, lies_in
from shmbuffer.replay.storages.serving import Serving


class Storage(Serving):
    """Where the items are.

    A storage of your own needs ``set``, ``get`` and ``__len__``; any sampler and any writer works
    on it, through these three. The storages of this package lie on a ring (`OnRing`), and are read
    and written by the C core.

    Args:
        max_size: capacity in elements.
        checkpointer: how the storage is saved; None is the one of its kind.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.

    Source: ``torchrl.data.Storage``.
    """

    ndim: int = 1
    """How many leading dimensions of the data belong to the storage."""

    _rng: Any = None  # torch.Generator of the buffer, as in TorchRL
    _default_checkpointer: ClassVar[type[Any]] = StorageCheckpointerBase  # TorchRL's name
    _checkpointer: Any = None

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        self._checkpointer = checkpointer
        self.compilable = bool(compilable)
        if int(max_size) < 1:
            raise ValueError(f"max_size has to be at least 1, got {max_size}")
        self._max_size = int(max_size)
        self._watchers: list[weakref.ref[Any]] = []

    @property
    def max_size(self) -> int:
        """Capacity in elements."""
        return self._max_size

    @property
    def shared(self) -> bool:
        """Whether other processes may read and write these bytes."""
        return False

    @property
    def initialized(self) -> bool:
        """Whether the storage knows its leaves."""
        return True

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``: one item at an int, a batch at a sequence of them."""
        raise NotImplementedError(f"{type(self).__name__} has no set()")

    def attach(self, buffer: Any) -> None:
        """Have ``buffer.mark_update(index)`` called for every write, whoever writes.

        Args:
            buffer: whatever keeps something about the items: a buffer, or a sampler. Held weakly.
        """
        if all(reference() is not buffer for reference in self._watchers):
            self._watchers.append(weakref.ref(buffer))

    def detach(self, buffer: Any) -> None:
        """Undo `attach`; nothing happens if it was not."""
        self._watchers = [one for one in self._watchers if one() not in (None, buffer)]

    def notify(self, index: Any) -> None:
        """Tell all that are attached that the items at ``index`` (element indices) were written."""
        for reference in self._watchers:
            entity = reference()
            if entity is not None:
                entity.mark_update(index)

    def notify_emptied(self) -> None:
        """Tell the samplers that are attached that every item was forgotten."""
        for reference in self._watchers:
            forget = getattr(reference(), "_empty", None)
            if forget is not None:
                forget()

    def define(self, example: Any) -> None:
        """Say what an item is before anything is written, where the storage needs to know."""

    def contains(self, item: int) -> bool:
        """Whether there is an item at ``item``; negative numbers count from the end."""
        return -len(self) <= item < len(self)

    @property
    def checkpointer(self) -> Any:
        """How the storage is saved; setting it to None brings back the one of its kind."""
        if self._checkpointer is None:
            self._checkpointer = self._default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have ``hook(data, path=path)`` change what is saved.

        See `StorageCheckpointerBase.register_save_hook`. Hooks are not saved themselves.
        """
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have ``hook(data, out=destination)`` change what is loaded.

        See `StorageCheckpointerBase.register_load_hook`. Hooks are not saved themselves.
        """
        self.checkpointer.register_load_hook(hook)

    def dumps(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Save into the directory ``path``; see `Checkpoints.dumps`.

        A checkpointer with a file of its own (`H5StorageCheckpointer`) saves to ``path`` itself
        where that is the name of such a file.
        """
        saves_to_file = getattr(self.checkpointer, "saves_to_file", None)
        if saves_to_file is not None and saves_to_file(path):
            with hearing(on_progress):
                self.checkpointer.dumps(self, path)
        else:
            super().dumps(path, on_progress=on_progress)

    def _has_files_in(self, path: Path) -> bool:
        return lies_in(self, path)

    def _dump(self, directory: Path, moment: Any) -> Any:
        if self._is_saved_by_state:
            return super()._dump(directory, moment)
        return self.checkpointer.dumps(self, directory)

    def _dump_in_place(self, directory: Path) -> None:
        if not hasattr(self.checkpointer, "dumps_in_place"):
            raise RuntimeError(
                f"{type(self.checkpointer).__name__} cannot save a storage where it has its own "
                "files; save to another directory"
            )
        self.checkpointer.dumps_in_place(self, directory)

    def _read(self, directory: Path) -> Any:
        return super()._read(directory) if self._is_saved_by_state else directory

    def _apply(self, saved: Any, loaded: Any) -> Any:
        if self._is_saved_by_state:
            return super()._apply(saved, loaded)
        if isinstance(self.checkpointer, StorageCheckpointerBase):
            return self.checkpointer.loads_beside(self, saved, loaded)
        return self.checkpointer.loads(self, saved)

    @property
    def _is_saved_by_state(self) -> bool:
        """A storage of the user's that has no checkpointer."""
        return type(self.checkpointer) is StorageCheckpointerBase

    def flatten(self) -> Any:
        """Every item, as one batch with one dimension for the storage."""
        return self.get(slice(None))

    def cleanup(self) -> bool:
        """Remove the files of the storage. False: there were none, or they are gone already."""
        return False

    def close(self) -> None:
        """Give back what the storage holds beyond memory.

        It cannot be used afterwards. Idempotent.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything in there, in memory."""
        raise NotImplementedError(f"{type(self).__name__} has no state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value)

    def __contains__(self, index: int) -> bool:
        return self.contains(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watchers": []}  # who is attached here is not attached there
