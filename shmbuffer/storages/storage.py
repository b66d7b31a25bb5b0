"""The protocol of storages: items by index, as in TorchRL, and what a buffer needs beyond."""

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
from shmbuffer.memory.system.progress import OnProgress, hearing
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase, lies_in
from shmbuffer.saves.checkpointers.ring_backed import RingStorageCheckpointer
from shmbuffer.saves.checkpoints import Checkpoints
from shmbuffer.storages.indexing import is_one
from shmbuffer.storages.location import Location
from shmbuffer.tensors.form import cpu


class Storage(Checkpoints):
    """Where the items are.

    A storage of your own needs ``set``, ``get`` and ``__len__``; any sampler and any writer works
    on it, through these three.

    Args:
        max_size: capacity in elements.
        checkpointer: how the storage is saved; None is the one of its kind.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.

    Source: ``torchrl.data.Storage``.
    """

    ndim: int = 1
    """How many leading dimensions of the data belong to the storage."""

    _rng: Any = None  # torch.Generator of the buffer, as in TorchRL
    _kind = "storage"
    _default_checkpointer: ClassVar[type[Any]] = StorageCheckpointerBase  # TorchRL's name
    _checkpointer: Any = None
    _location: Location | None = None  # of its directory, where it can have one

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
        """True if other processes may read and write these bytes."""
        return False

    @property
    def initialized(self) -> bool:
        """True if the storage knows its leaves."""
        return True

    @property
    def open_engine(self) -> Engine | None:
        """The open handle that counts, flushes and records what is done here, or None."""
        return None

    def ring(self) -> Ring | None:
        """Order, words, tickets and priorities of the items; None where the storage has no ring."""
        return None

    @property
    def draws_natively(self) -> bool:
        """True if `draw` chooses, reads, validates and weighs in one native call."""
        return False

    @property
    def writes_natively(self) -> bool:
        """True if ``append`` writes a batch with its priorities, whole or not at all."""
        return False

    @property
    def shape(self) -> torch.Size | None:
        """``[slots, *lanes]``; RuntimeError where the storage does not say its lanes."""
        if self.ndim == 1:
            return torch.Size((self.max_size,))
        raise RuntimeError(
            f"a {type(self).__name__} of {self.ndim} dimensions does not say how large they are; "
            "give its class a property shape"
        )

    @property
    def tracks_generations(self) -> bool:
        """True if the ticket of an item tells whether it is still the same item."""
        return False

    # -- reading -------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """The item at an int, the batch of items at a sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no get()")

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """`get`, as a buffer asks for it: the item at an int; else what `collate` takes.

        Args:
            index: see `get`.
            dim_extend: the dimension along which batches are appended; the index follows it.
            views: False wants copies, True views; None is whatever is right here.
        """
        return self.get(index)

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """`fetch` of elements that a sampler has chosen; None if one is another item by now.

        Args:
            index: element indices int64 ``[n]``, or a tuple of coordinates.
            tickets: int64 ``[n]``, of the chosen items.
        """
        return self.get(index)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """Choose and read in one native call, where `draws_natively`.

        Args:
            count: elements.
            key: of the draw.
            beta: exponent of the weights; None draws uniformly, without weights.
        """
        raise NotImplementedError(f"a sampler draws from a {type(self).__name__}, by index")

    def collate(self, data: Any) -> Any:
        """A batch from what `fetch` gives for several items; by default as it is."""
        return data

    def uncollated(self, data: Any) -> Any:
        """The argument of a ``collate_fn``, and the result of `get` for several items."""
        return data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Iterate over all items in their order, as `fetch` gives ``chunk`` places at a time."""
        for start in range(0, len(self), chunk):
            yield self.fetch(slice(start, start + chunk))

    # -- writing -------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``: one item at an int, a batch at a sequence of them."""
        raise NotImplementedError(f"{type(self).__name__} has no set()")

    def prepare(self, data: Any, single: bool) -> None:
        """Make everything that writing ``data`` needs, and write nothing.

        So priorities can go with the first write. With ``single`` it is one item, not a batch.
        """

    def put(self, index: Any, data: Any, *, in_place: bool) -> None:
        """``set``; with ``in_place`` a change of items that are there, whose priorities stay."""
        self[index] = data

    def knows(self, path: tuple[str, ...]) -> bool:
        """True if items have this entry already; otherwise it would be a new column."""
        return True

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """Change the entry at ``path`` of some items, or with None all of them.

        Args:
            index: see `get`.
            value: as that entry of what `get` gives.
            path: of the entry.
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
        """True if `change_if_present` can tell whether an item is still the same."""
        return False

    def change_if_present(
        self, index: Any, generation: Any, patch: Any, *, dim_extend: int = 0
    ) -> Flags:
        """Change entries of items that have not been written over since.

        Args:
            index: of a sample.
            generation: of the same sample.
            patch: the entries, each ``[n, ...]``, or in the dimensions of the data that were
                written: ``[n, *lanes, ...]``, or those of an index of streams.
            dim_extend: dimension of such data along which the items are.

        Returns:
            bool ``[n]``: what was changed.

        Raises:
            RuntimeError: the storage keeps no generations.
        """
        raise RuntimeError(self._no_generations)

    def entry(self, index: Any, path: tuple[str, ...]) -> tuple[Ints, torch.Tensor, Ints]:
        """One entry of some items.

        Returns:
            Elements int64 ``[n]``; the numbers ``[n, ...]``; the tickets, -1 without an item.
        """
        raise RuntimeError(self._no_generations)

    @property
    def _no_generations(self) -> str:
        return (
            f"a {type(self).__name__} keeps no generations; use a LazyTensorStorage or a "
            "LazyMemmapStorage"
        )

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item; with ``keep_write_count`` go on counting what is written."""
        self._empty()

    # -- who uses it ---------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Have ``buffer.mark_update(index)`` called for every write, by any process.

        ``buffer`` is held weakly.
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
        """True if there is an item at ``item``; negative numbers count from the end."""
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
        """Have ``hook(data, path=path)`` change what is saved; see the checkpointer."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have ``hook(data, out=destination)`` change what is loaded; see the checkpointer."""
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

    def _flush_in_place(self, path: Path) -> None:
        checkpointer = self.checkpointer
        if not isinstance(checkpointer, RingStorageCheckpointer):
            raise RuntimeError(
                f"{path}: {type(checkpointer).__name__} cannot save a storage where it has its own "
                "files; save to another directory"
            )
        if checkpointer.has_hooks or not checkpointer.writes_snapshots(self):
            raise RuntimeError(
                f"{path}: is where the storage itself has its files, and "
                f"{type(checkpointer).__name__} with its hooks would write something else "
                "over them; save to another directory"
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
        """False if a buffer with this storage has to be saved in TorchRL's layout."""
        ask = getattr(self.checkpointer, "writes_snapshots", None)
        return ask is None or ask(self)

    @property
    def _is_saved_by_state(self) -> bool:
        """A storage of the user's that has no checkpointer."""
        return type(self.checkpointer) is StorageCheckpointerBase

    def flatten(self) -> Any:
        """Every item, as one batch with one dimension for the storage."""
        return self.get(slice(None))

    # -- saving and closing --------------------------------------------------------------------

    def cleanup(self) -> bool:
        """Remove the files of the storage. False: there were none, or they are gone already."""
        return False

    def close(self) -> None:
        """Give back what the storage holds beyond memory. Idempotent."""

    def state_dict(self) -> dict[str, Any]:
        """Everything in there, in memory."""
        raise NotImplementedError(f"{type(self).__name__} has no state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict")

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be emptied")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value)

    def __contains__(self, index: int) -> bool:
        return self.contains(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watchers": []}  # watchers are not attached in another process


def ring_of(storage: Any) -> Ring | None:
    """The ring of a storage that need not be a `Storage`; None where there is none (yet)."""
    return storage.ring() if isinstance(storage, Storage) else None
