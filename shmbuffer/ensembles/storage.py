"""Several storages as one: read by number of the storage and index in it, saved one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from shmbuffer.ensembles.members import Ensemble
from shmbuffer.memory.format.names import is_number
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.saves.checkpoints import apply_part, dump_part, export_storage, read_part
from shmbuffer.saves.safe_files import make_folders
from shmbuffer.saves.values import read_json, reading, write_json
from shmbuffer.storages import Storage
from shmbuffer.torchrl.compat.buffers import load_plainly, save_plainly

_METADATA = "metadata.json"


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Saves the members of a `StorageEnsemble` one after the other, by their own checkpointers.

        <path>/metadata.json           the numbers of empty members, which are not saved
        <path>/<number>/               a member
        <path>/<number>_transform.pt   the state of its transform, if any

    Source: ``torchrl.data.StorageEnsembleCheckpointer``.
    """

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Saves each member; returns the results of their checkpointers, None for empty ones."""
        return self._dumps(storage, Path(path), dump_part)

    def _export(self, storage: Any, path: Path) -> list[Any]:
        """Writes each member in TorchRL's layout; returns as `dumps` does."""
        return self._dumps(storage, path, export_storage)

    def _dumps(self, storage: Any, path: Path, write: Callable[[Any, Path], Any]) -> list[Any]:
        make_folders(path)
        members = storage._members
        empty = [at for at, member in enumerate(members) if not len(member)]
        write_json(path / _METADATA, {"empty_members": empty})
        moments = [
            None if at in empty else write(member, path / str(at))
            for at, member in enumerate(members)
        ]
        for at, transform in enumerate(storage._transforms or ()):
            if hasattr(transform, "state_dict"):
                save_plainly(transform.state_dict(), path / f"{at}_transform.pt")
        return moments

    def writes_snapshots(self, storage: Any) -> bool:
        """True if every member can be saved as a buffer directory."""
        return all(member.saves_snapshots for member in storage._members)

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Load each member, and empty those that were empty; what became of each.

        Raises:
            ValueError: the checkpoint has another number of members; nothing was changed.
        """
        return self.loads_beside(storage, Path(path), None)

    def loads_beside(self, storage: Any, path: Path, written: list[Any] | None) -> list[Any]:
        """See `StorageCheckpointerBase.loads_beside`."""
        members = storage._members
        file = path / _METADATA
        with reading(file):
            found = read_json(file)["empty_members"] if file.exists() else []
            empty = {int(member) for member in found}
        saved = {int(each.name) for each in path.iterdir() if is_number(each.name)} | empty
        if saved != set(range(len(members))):
            raise ValueError(
                f"{path}: has the storages {sorted(saved)} of an ensemble, this one has "
                f"{len(members)}; nothing was changed"
            )
        if written is None or len(written) != len(members):
            written = [None] * len(members)
        states = {
            at: load_plainly(path / f"{at}_transform.pt")
            for at, transform in enumerate(storage._transforms or ())
            if hasattr(transform, "load_state_dict") and (path / f"{at}_transform.pt").exists()
        }
        loaded: list[Any] = []
        for at, (member, beside) in enumerate(zip(members, written, strict=True)):
            if at in empty:
                member.forget(keep_write_count=False)
                member.notify_emptied()
                loaded.append(None)
            else:
                loaded.append(apply_part(member, read_part(member, path / str(at)), beside))
        for at, state in states.items():
            with reading(path / f"{at}_transform.pt"):
                storage._transforms[at].load_state_dict(state)
        return loaded


class StorageEnsemble(Ensemble, Storage):
    """The storages of the buffers of a `ReplayBufferEnsemble`.

    Args:
        *storages: one for each buffer.
        transforms: one for each storage, called with items read from it, or None.

    ``storages[i]`` is the i-th, ``storages[i, index]`` reads from it, ``storages[:, index]`` gives
    a list with a batch of each; any other index gives an ensemble. Its ``len`` is their number.

    Raises:
        TypeError: another number of transforms than of storages.

    Source: ``torchrl.data.StorageEnsemble``.
    """

    _what = "storage"
    _default_checkpointer = StorageEnsembleCheckpointer
    _dump, _read, _apply = Storage._dump, Storage._read, Storage._apply  # by the checkpointer

    def __init__(
        self, *storages: Storage, transforms: Sequence[Callable[[Any], Any] | None] | None = None
    ) -> None:
        if not storages:
            raise ValueError("an ensemble has at least one storage")
        if transforms is not None and len(transforms) != len(storages):
            raise TypeError(
                f"transforms are one for each storage, got {len(transforms)} for {len(storages)}"
            )
        self._members = list(storages)
        self._transforms = None if transforms is None else list(transforms)
        super().__init__(sum(storage.max_size for storage in storages))

    @property
    def max_size(self) -> int:
        """Capacity of all storages together, in elements."""
        return sum(storage.max_size for storage in self._members)

    @property
    def shared(self) -> bool:
        """True if any of them is shared."""
        return any(storage.shared for storage in self._members)

    @property
    def initialized(self) -> bool:
        """True if each of them knows its leaves."""
        return all(storage.initialized for storage in self._members)

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """For each row of an index of `SamplerEnsemble` its storage's number and the batch.

        Raises:
            TypeError: another kind of index.
        """
        if not hasattr(index, "get") or index.get("buffer_ids", None) is None:
            raise TypeError(
                "a StorageEnsemble is read by a TensorDict with the entries 'buffer_ids' and "
                f"'index', got {type(index).__name__}; use ensemble[i].get(index) for one storage"
            )
        found = []
        for row in index.unbind(0):
            at = int(row.get("buffer_ids"))
            data = self._members[at].get(local(row.get("index"), self._members[at]))
            transform = None if self._transforms is None else self._transforms[at]
            found.append((at, data if transform is None else transform(data)))
        return found

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """RuntimeError: say which storage."""
        raise RuntimeError(
            "a StorageEnsemble cannot choose the storage for the data: write into one of them, "
            "ensemble[i].set(index, data)"
        )

    def add(self, data: Any) -> NoReturn:
        """RuntimeError, as `set`."""
        self.set(0, data)

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError, as `set`."""
        self.set(0, data)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; ValueError: it has another number of storages, nothing was changed."""
        if sorted(state_dict) != sorted(str(at) for at in range(len(self))):
            raise ValueError(
                f"the state is of storages {sorted(state_dict)}, this ensemble has {len(self)}"
            )
        super().load_state_dict(state_dict)

    def _has_files_in(self, path: Path) -> bool:
        for at, member in enumerate(self._members):
            if member._has_files_in(path) or member._has_files_in(path / str(at)):
                raise RuntimeError(
                    f"{path}: storage {at} of the ensemble has its own files there, which a save "
                    "would replace; save to another directory. Nothing was changed"
                )
        return False

    def cleanup(self) -> bool:
        """Remove the files of all storages; whether there were any."""
        return bool(sum(storage.cleanup() for storage in self._members))

    def close(self) -> None:
        """Close each of them."""
        for storage in self._members:
            storage.close()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, tuple) or len(index) == 1:
            return super().__getitem__(index)
        chosen = self[index[0]]
        rest = index[1] if len(index) == 2 else index[1:]
        if isinstance(chosen, StorageEnsemble):
            return [storage[rest] for storage in chosen._members]
        return chosen[rest]

    def _some(self, found: list[int]) -> StorageEnsemble:
        transforms = self._transforms
        return StorageEnsemble(
            *(self._members[at] for at in found),
            transforms=None if transforms is None else [transforms[at] for at in found],
        )


def local(index: torch.Tensor, storage: Any) -> Any:
    """The index of a row for its storage: int64 ``[n]``, or a tuple of ``ndim`` of them."""
    return tuple(index.unbind(-1)) if getattr(storage, "ndim", 1) > 1 else index
