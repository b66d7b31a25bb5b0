"""Base class for storages, with TorchRL's methods and the methods that only buffers call."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from shmbuffer.items.mover import Drawn
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.system.progress import OnProgress, report_to
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase, lies_in
from shmbuffer.saves.checkpointers.ring_checkpointer import RingStorageCheckpointer
from shmbuffer.saves.checkpoints import Checkpoints
from shmbuffer.storages.indexing import is_one
from shmbuffer.storages.location import Location
from shmbuffer.tensors.form import cpu


class Storage(Checkpoints):
    """Base class for storages. A storage contains the items of a buffer.

    A custom storage must define ``set``, ``get`` and ``__len__``. These three methods are enough
    for any sampler and any writer.

    Args:
        max_size: capacity in elements.
        checkpointer: object that saves the storage. If None, uses the default of the class.
        compilable: has no effect, because `torch.compile` never compiles the native calls.

    Source: ``torchrl.data.Storage``.
    """

    ndim: int = 1
    """Number of leading dimensions of the data that belong to the storage."""

    _rng: Any = None  # the buffer's torch.Generator, as in TorchRL
    _kind = "storage"
    _default_checkpointer: ClassVar[type[Any]] = StorageCheckpointerBase  # TorchRL's name
    _checkpointer: Any = None
    _location: Location | None = None  # None if the storage cannot be in a directory

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        self._checkpointer = checkpointer
        self.compilable = bool(compilable)
        if int(max_size) < 1:
            raise ValueError(f"max_size must be at least 1, got {max_size}")
        self._max_size = int(max_size)
        self._watchers: list[weakref.ref[Any]] = []

    @property
    def max_size(self) -> int:
        """Capacity in elements."""
        return self._max_size

    @property
    def shared(self) -> bool:
        """True if other processes can read and write the items."""
        return False

    @property
    def initialized(self) -> bool:
        """True if the leaves of the storage are defined."""
        return True

    @property
    def open_engine(self) -> Engine | None:
        """Handle that counts, flushes and records the operations of this storage.

        It is None if the storage has no handle, or until the handle is opened.
        """
        return None

    def ring(self) -> Ring | None:
        """Returns the ring, which contains the order, words, tickets and priorities of the items.

        Returns None if the storage has no ring.
        """
        return None

    @property
    def draws_natively(self) -> bool:
        """True if one native call of `draw` chooses, copies and validates items with weights."""
        return False

    @property
    def writes_natively(self) -> bool:
        """True if ``append`` writes a batch with its priorities completely or not at all."""
        return False

    @property
    def shape(self) -> torch.Size | None:
        """Shape ``[slots, *lanes]``. Raises RuntimeError if the class does not define the lanes."""
        if self.ndim == 1:
            return torch.Size((self.max_size,))
        raise RuntimeError(
            f"a {type(self).__name__} of {self.ndim} dimensions does not define their sizes; "
            "define a property shape in its class"
        )

    @property
    def tracks_generations(self) -> bool:
        """True if the ticket of a sampled item shows later whether the item was replaced."""
        return False

    # -- reading -------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Returns one item if ``index`` is an int, or a batch if it is a sequence of ints."""
        raise NotImplementedError(f"{type(self).__name__} does not implement get()")

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """Returns one item for an int, or several items in a form that `collate` accepts.

        Args:
            index: see `get`.
            dim_extend: dimension along which batches are appended and ``index`` selects.
            views: if True, returns views instead of copies. If None, uses the storage's default.
        """
        return self.get(index)

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """Returns elements that a sampler has chosen, or None if one of them was replaced.

        Args:
            index: element indices int64 ``[n]``, or a tuple of coordinates.
            tickets: tickets of the chosen items, int64 ``[n]``.
        """
        return self.get(index)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """Chooses elements and reads them in one native call, if `draws_natively` is True.

        Args:
            count: number of elements.
            key: seed of the draw.
            beta: exponent of the importance weights. If None, draws uniformly, without weights.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement draw(); choose indices with a sampler, and "
            "read the items with get()"
        )

    def collate(self, data: Any) -> Any:
        """Builds a batch from several items that `fetch` returned. By default, changes nothing."""
        return data

    def uncollated(self, data: Any) -> Any:
        """Converts several items that `fetch` returned to the form of `get` and ``collate_fn``."""
        return data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields all items in order, ``chunk`` slots at a time, in the form of `fetch`."""
        for start in range(0, len(self), chunk):
            yield self.fetch(slice(start, start + chunk))

    # -- writing -------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes one item if ``cursor`` is an int, or a batch if it is a sequence of ints."""
        raise NotImplementedError(f"{type(self).__name__} does not implement set()")

    def prepare(self, data: Any, single: bool) -> None:
        """Prepares the storage for a write of ``data``, without writing it.

        Priorities can then be passed with the first write. ``data`` is one item if ``single`` is
        True, otherwise a batch.
        """

    def put(self, index: Any, data: Any, *, in_place: bool) -> None:
        """Writes ``data`` to ``index``. With ``in_place``, existing items keep their priorities."""
        self[index] = data

    def knows(self, path: tuple[str, ...]) -> bool:
        """True if the items have an entry at ``path``. If not, writing it adds a column."""
        return True

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """Changes the entry at ``path`` of some items, or whole items if ``path`` is None.

        Args:
            index: see `get`.
            value: the new value, in the form that `get` returns for the entry.
            path: path of the entry.
            dim_extend: see `fetch`.
        """
        if path is None:
            self[index] = value
            return
        single, found = is_one(index), self.get(index)
        places = [int(index)] if single else cpu.arange(len(self))[index].tolist()
        for at, item in enumerate([found] if single else list(found)):
            changed = item.clone()
            changed.set_(path, value if single else value[at])
            self.put(places[at], changed, in_place=True)

    @property
    def supports_conditional_update(self) -> bool:
        """True if `change_if_present` can detect that an item was replaced."""
        return False

    def change_if_present(
        self, index: Any, generation: Any, patch: Any, *, dim_extend: int = 0
    ) -> Flags:
        """Changes entries of items that have not been overwritten since they were sampled.

        Args:
            index: the index of a sample.
            generation: the generation of the same sample.
            patch: new values of the entries. Each value has the shape ``[n, ...]``, or the
                dimensions of the written data: ``[n, *lanes, ...]``, or those of an index of
                streams.
            dim_extend: see `fetch`.

        Returns:
            bool ``[n]``, True for the items that were changed.

        Raises:
            RuntimeError: the storage does not track generations.
        """
        raise RuntimeError(self._no_generations)

    def entry(self, index: Any, path: tuple[str, ...]) -> tuple[Ints, torch.Tensor, Ints]:
        """Reads one entry of some items.

        Returns:
            The element numbers int64 ``[n]``, the values of the entry ``[n, ...]``, and the tickets
            int64 ``[n]``, which are -1 for slots without an item.
        """
        raise RuntimeError(self._no_generations)

    @property
    def _no_generations(self) -> str:
        return (
            f"a {type(self).__name__} does not track generations; use a LazyTensorStorage or a "
            "LazyMemmapStorage"
        )

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items. With ``keep_write_count``, the number of writes is not reset."""
        self._empty()

    # -- watching --------------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Registers ``buffer.mark_update(index)``, which each write through this object calls.

        The storage holds a weak reference to ``buffer``.
        """
        if all(reference() is not buffer for reference in self._watchers):
            self._watchers.append(weakref.ref(buffer))

    def detach(self, buffer: Any) -> None:
        """Undoes `attach`. Does nothing if ``buffer`` is not attached."""
        self._watchers = [one for one in self._watchers if one() not in (None, buffer)]

    def notify(self, index: Any) -> None:
        """Tells all attached buffers that the items at these element indices were written."""
        for reference in self._watchers:
            entity = reference()
            if entity is not None:
                entity.mark_update(index)

    def notify_emptied(self) -> None:
        """Tells the attached samplers that all items were removed."""
        for reference in self._watchers:
            forget = getattr(reference(), "_empty", None)
            if forget is not None:
                forget()

    def define(self, example: Any) -> None:
        """Defines the structure of the items before the first write. Does nothing by default."""

    def contains(self, item: int) -> bool:
        """True if there is an item at the index ``item``. Negative indices count from the end."""
        return -len(self) <= item < len(self)

    @property
    def checkpointer(self) -> Any:
        """Object that saves the storage. Setting it to None restores the default."""
        if self._checkpointer is None:
            self._checkpointer = self._default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Registers ``hook(data, path=path)``, which changes the saved data."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Registers ``hook(data, out=destination)``, which changes the loaded data."""
        self.checkpointer.register_load_hook(hook)

    def dumps(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Saves the storage to the directory ``path``; see `Checkpoints.dumps`.

        A checkpointer with its own file format, such as `H5StorageCheckpointer`, saves to the file
        ``path`` if its name has the suffix of that format.
        """
        saves_to_file = getattr(self.checkpointer, "saves_to_file", None)
        if saves_to_file is not None and saves_to_file(path):
            with report_to(on_progress):
                self.checkpointer.dumps(self, path)
        else:
            super().dumps(path, on_progress=on_progress)

    def _has_files_in(self, path: Path) -> bool:
        return lies_in(self, path)

    def _dump(self, directory: Path, moment: Any) -> Any:
        if self._is_saved_by_state:
            return super()._dump(directory, moment)
        return self.checkpointer.dumps(self, directory)

    def _flush_in_place(self, path: Path) -> None:
        checkpointer = self.checkpointer
        if not isinstance(checkpointer, RingStorageCheckpointer):
            raise RuntimeError(
                f"{path}: the storage has its own files there, so {type(checkpointer).__name__} "
                "cannot save it in this directory; save to another directory"
            )
        if checkpointer.has_hooks or not checkpointer.writes_snapshots(self):
            raise RuntimeError(
                f"{path}: the storage has its own files there, which "
                f"{type(checkpointer).__name__} would overwrite; save to another directory"
            )
        checkpointer.ring_of(self)
        engine = self.open_engine
        assert engine is not None
        engine.flush()

    def _read(self, directory: Path) -> Any:
        return super()._read(directory) if self._is_saved_by_state else directory

    def _apply(self, saved: Any, loaded: Any) -> Any:
        if self._is_saved_by_state:
            return super()._apply(saved, loaded)
        if isinstance(self.checkpointer, StorageCheckpointerBase):
            return self.checkpointer.loads_beside(self, saved, loaded)
        return self.checkpointer.loads(self, saved)

    @property
    def saves_snapshots(self) -> bool:
        """False if a buffer with this storage can only be saved in TorchRL's layout."""
        ask = getattr(self.checkpointer, "writes_snapshots", None)
        return ask is None or ask(self)

    @property
    def _is_saved_by_state(self) -> bool:
        """True for a custom storage without a checkpointer."""
        return type(self.checkpointer) is StorageCheckpointerBase

    def flatten(self) -> Any:
        """Returns all items as one batch, with a single dimension for the storage."""
        return self.get(slice(None))

    # -- saving and closing --------------------------------------------------------------------

    def cleanup(self) -> bool:
        """Removes the files of the storage. Returns False if there are no files."""
        return False

    def close(self) -> None:
        """Releases all resources of the storage except memory. Can be called again."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the contents of the storage as a dict in memory."""
        raise NotImplementedError(f"{type(self).__name__} does not implement state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the contents of the storage with a result of `state_dict`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement load_state_dict()")

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be emptied")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not implement __len__()")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value)

    def __contains__(self, index: int) -> bool:
        return self.contains(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watchers": []}  # other processes do not have the watchers


def ring_of(storage: Any) -> Ring | None:
    """Returns the ring of a storage of any class, or None if the storage has no ring."""
    return storage.ring() if isinstance(storage, Storage) else None
