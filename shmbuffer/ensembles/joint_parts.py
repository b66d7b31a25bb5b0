"""TorchRL's storage and writer for several buffers: `StorageEnsemble` and `WriterEnsemble`.

`SamplerEnsemble` is in `sampler_ensemble.py`. Each of the three classes is a `JointPart`, which
contains several *members*: storages, writers or samplers. In an ensemble of buffers, the members
are always the current ones of the buffers. If one buffer gets a new storage, for example, the
ensemble uses the new storage, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from shmbuffer.ensembles.joint_rows import BUFFER_IDS, routes, storage_index
from shmbuffer.memory.format.key_names import is_number
from shmbuffer.saves.checkpointers.checkpointer import StorageCheckpointerBase
from shmbuffer.saves.checkpoints import (
    apply_part,
    dump_part,
    export_storage,
    read_part,
    save_part,
    saved_part,
)
from shmbuffer.saves.safe_files import make_folders
from shmbuffer.saves.values import read_json, reading, write_json
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.buffer_files import load_plainly, save_plainly
from shmbuffer.writers.immutable import ImmutableDatasetWriter
from shmbuffer.writers.writer import Writer, write_count_of

_METADATA = "metadata.json"


class PartsOf(Sequence[Any]):
    """A sequence of the current storage, sampler or writer of each buffer.

    Args:
        buffers: the buffers.
        name: attribute of the buffers, such as ``"_storage"``.
    """

    def __init__(self, buffers: Sequence[Any], name: str) -> None:
        self.buffers, self._name = buffers, name

    def __getitem__(self, at: Any) -> Any:
        return getattr(self.buffers[at], self._name)

    def __len__(self) -> int:
        return len(self.buffers)

    def __reduce__(self) -> Any:
        return list, (list(self),)  # pickles the members, but not their buffers


class JointPart:
    """Base class for `StorageEnsemble`, `SamplerEnsemble` and `WriterEnsemble`.

    The state of each member is saved under the member's number.
    """

    _what: ClassVar[str]  # "storage", "sampler" or "writer", for messages
    _members: Sequence[Any]

    def __getitem__(self, index: Any) -> Any:
        return select(self, index)

    def _subset(self, found: list[int]) -> Any:
        """Returns an ensemble of the members with the given numbers."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Returns the number of members."""
        return len(self._members)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._members))})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each member, keyed by the member's number."""
        return {str(at): member.state_dict() for at, member in enumerate(self._members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` has returned."""
        for at, member in enumerate(self._members):
            member.load_state_dict(state_dict[str(at)])

    def _dump(self, directory: Path, moment: Any) -> Any:
        make_folders(directory)
        for at, member in enumerate(self._members):
            dump_part(member, directory / str(at), None if moment is None else moment[at])

    def _saved(self, moment: Any, folder: Path) -> Any:
        of_each = [None] * len(self._members) if moment is None else moment
        return [
            save_part(member, folder.with_name(f"{folder.name}-{at}"), one)
            for at, (member, one) in enumerate(zip(self._members, of_each, strict=True))
        ]

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        return [
            saved_part(member, one, folder.with_name(f"{folder.name}-{at}"))
            for at, (member, one) in enumerate(zip(self._members, saved, strict=True))
        ]

    def _read(self, directory: Path) -> Any:
        return [read_part(member, directory / str(at)) for at, member in enumerate(self._members)]

    def _apply(self, saved: Any, loaded: Any) -> Any:
        for at, (member, one) in enumerate(zip(self._members, saved, strict=True)):
            apply_part(member, one, None if loaded is None else loaded[at])


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Saves each storage of a `StorageEnsemble` with its own checkpointer.

        <path>/metadata.json           the numbers of the empty storages, which are not saved
        <path>/<number>/               a storage
        <path>/<number>_transform.pt   the state of the storage's transform, if it has one

    Source: ``torchrl.data.StorageEnsembleCheckpointer``.
    """

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Saves each storage in a directory of its own.

        Returns:
            For each storage the result of its checkpointer, or None if the storage is empty.
        """
        return self._dumps(storage, Path(path), dump_part)

    def _export(self, storage: Any, path: Path) -> list[Any]:
        """Writes each storage in TorchRL's file layout. Returns the same list as `dumps`."""
        return self._dumps(storage, path, export_storage)

    def _dumps(self, storage: Any, path: Path, write: Callable[[Any, Path], Any]) -> list[Any]:
        """Calls ``write`` with each storage and its directory, and saves the transforms."""
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
        """True if every storage can be saved as a buffer directory."""
        return all(member.saves_snapshots for member in storage._members)

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> list[Any]:
        """Loads each storage. Empties the storages that were empty when they were saved.

        Returns:
            For each storage the result of its checkpointer, or None if the storage was empty.

        Raises:
            ValueError: the checkpoint has another number of storages. Nothing was changed.
        """
        return self.loads_beside(storage, Path(path), None)

    def loads_beside(self, storage: Any, path: Path, written: list[Any] | None) -> list[Any]:
        """Loads each storage; see `StorageCheckpointerBase.loads_beside`."""
        members = storage._members
        file = path / _METADATA
        with reading(file):
            found = read_json(file)["empty_members"] if file.exists() else []
            empty = {int(member) for member in found}
        saved = {int(each.name) for each in path.iterdir() if is_number(each.name)} | empty
        if saved != set(range(len(members))):
            raise ValueError(
                f"{path} contains the storages {sorted(saved)} of an ensemble, but this ensemble "
                f"has {len(members)} storages; nothing was changed"
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


class StorageEnsemble(JointPart, Storage):
    """The storages of the buffers in a `ReplayBufferEnsemble`.

    ``storages[i]`` returns a storage, ``storages[i, index]`` reads from it, and ``storages[:,
    index]`` returns a list with one batch per storage. Any other index returns an ensemble of the
    selected storages. The length is the number of storages.

    Args:
        *storages: one storage per buffer.
        transforms: for each storage, a transform that is called with the items read from it, or
            None.

    Raises:
        ValueError: there are no storages.
        TypeError: the number of transforms differs from the number of storages.

    Source: ``torchrl.data.StorageEnsemble``.
    """

    _what = "storage"
    _default_checkpointer = StorageEnsembleCheckpointer
    # Implemented by the checkpointer.
    _dump, _read, _apply = Storage._dump, Storage._read, Storage._apply

    def __init__(
        self, *storages: Storage, transforms: Sequence[Callable[[Any], Any] | None] | None = None
    ) -> None:
        if not storages:
            raise ValueError("an ensemble needs at least one storage")
        if transforms is not None and len(transforms) != len(storages):
            raise TypeError(
                f"transforms must have one transform or None for each storage, got "
                f"{len(transforms)} for {len(storages)} storages"
            )
        self._members = list(storages)
        self._transforms = None if transforms is None else list(transforms)
        super().__init__(sum(storage.max_size for storage in storages))

    @property
    def max_size(self) -> int:
        """Sum of the capacities of all storages, in elements."""
        return sum(storage.max_size for storage in self._members)

    @property
    def shared(self) -> bool:
        """True if any of the storages is shared."""
        return any(storage.shared for storage in self._members)

    @property
    def initialized(self) -> bool:
        """True if every storage has a schema."""
        return all(storage.initialized for storage in self._members)

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Reads the rows of a sample.

        Args:
            index: index of the sample, as returned by `SamplerEnsemble.sample`.

        Returns:
            The storage number and the batch of each row.

        Raises:
            TypeError: the index is not such a TensorDict.
        """
        if not hasattr(index, "get") or index.get("buffer_ids", None) is None:
            raise TypeError(
                "an index of a StorageEnsemble must be a TensorDict with the entries 'buffer_ids' "
                f"and 'index', got {type(index).__name__}; use ensemble[i].get(index) for one "
                "storage"
            )
        found = []
        for row in index.unbind(0):
            at = int(row.get("buffer_ids"))
            data = self._members[at].get(storage_index(row.get("index"), self._members[at]))
            transform = None if self._transforms is None else self._transforms[at]
            found.append((at, data if transform is None else transform(data)))
        return found

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """Returns ``index``, because in an ensemble of buffers each buffer reads its own rows."""
        return index

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Raises RuntimeError. Data must be written to one of the storages instead."""
        raise RuntimeError(
            "a StorageEnsemble cannot choose a storage for the data; write to one of its storages "
            "with ensemble[i].set(index, data)"
        )

    def add(self, data: Any) -> NoReturn:
        """Raises RuntimeError. Data must be written to one of the storages instead."""
        self.set(0, data)

    def extend(self, data: Any) -> NoReturn:
        """Raises RuntimeError. Data must be written to one of the storages instead."""
        self.set(0, data)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` has returned.

        Raises:
            ValueError: the state has another number of storages. Nothing was changed.
        """
        if sorted(state_dict) != sorted(str(at) for at in range(len(self))):
            raise ValueError(
                f"the state has the storages {sorted(state_dict)}, but this ensemble has "
                f"{len(self)} storages. Nothing was changed"
            )
        super().load_state_dict(state_dict)

    def _has_files_in(self, path: Path) -> bool:
        """Raises RuntimeError if a save to ``path`` would replace files of a storage."""
        for at, member in enumerate(self._members):
            if member._has_files_in(path) or member._has_files_in(path / str(at)):
                raise RuntimeError(
                    f"{path} contains the files of storage {at} of the ensemble, which a save "
                    "would replace; save to another directory. Nothing was changed"
                )
        return False

    def cleanup(self) -> bool:
        """Removes the files of all storages. Returns True if there were any files."""
        return bool(sum(storage.cleanup() for storage in self._members))

    def close(self) -> None:
        """Closes each storage."""
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

    def _subset(self, found: list[int]) -> StorageEnsemble:
        transforms = self._transforms
        return StorageEnsemble(
            *(self._members[at] for at in found),
            transforms=None if transforms is None else [transforms[at] for at in found],
        )


class WriterEnsemble(JointPart, Writer):
    """The writers of the buffers in a `ReplayBufferEnsemble`.

    ``writers[i]`` returns a writer; any other index returns an ensemble of the selected writers.

    Args:
        *writers: one writer per buffer.

    Source: ``torchrl.data.WriterEnsemble``.
    """

    _what = "writer"

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self._members = list(writers)

    def register_storage(self, storage: Any) -> None:
        """Registers each writer with the storage of the same number in a `StorageEnsemble`."""
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(
                f"a WriterEnsemble needs a StorageEnsemble, got {type(storage).__name__}"
            )
        if len(storage) != len(self):
            raise ValueError(f"got {len(self)} writers for {len(storage)} storages")
        super().register_storage(storage)
        for writer, member in zip(self._members, storage._members, strict=True):
            writer.register_storage(member)

    def add(self, data: Any) -> NoReturn:
        """Raises RuntimeError. Data must be written to one of the buffers instead."""
        raise RuntimeError(refusal("an item was given to the ensemble"))

    def extend(self, data: Any) -> NoReturn:
        """Raises RuntimeError. Data must be written to one of the buffers instead."""
        raise RuntimeError(refusal("a batch was given to the ensemble"))

    @property
    def tracks_generations(self) -> bool:
        """True if all writers track generations."""
        return all(writer.tracks_generations for writer in self._members)

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the generations of items, int64 ``[n]``; see `Writer.generations_of`.

        Args:
            index: index of a sample, or the result of a write to the ensemble.
        """
        found = cpu.full(index.get(BUFFER_IDS).shape, -1, dtype=torch.int64).reshape(-1)
        for part in routes(index, self._storage, {}):
            found[part.rows] = self._members[part.at].generations_of(part.where)
        return found

    @property
    def write_count(self) -> int:
        """Total number of elements that were written to the buffers."""
        return sum(map(write_count_of, self._members))

    _write_count = write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        self.require_no_data_set()
        for writer in self._members:
            writer._empty(empty_write_count)

    def require_no_data_set(self) -> None:
        """Raises RuntimeError if one of the writers is an `ImmutableDatasetWriter`."""
        for writer in self._members:
            if isinstance(writer, ImmutableDatasetWriter):
                writer._empty()

    def _subset(self, found: list[int]) -> WriterEnsemble:
        return WriterEnsemble(*(self._members[at] for at in found))


def select(joint: Any, index: Any) -> Any:
    """Returns one member of an ensemble, or an ensemble of several members.

    Args:
        joint: the ensemble of buffers, storages, samplers or writers.
        index: an integer for one member. Any other index selects several members.
    """
    if isinstance(index, tuple):
        if len(index) != 1:
            raise IndexError(
                f"an index of {joint._what}s must not have several dimensions, got {index!r}"
            )
        index = index[0]
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return joint
    found = member_numbers(index, len(joint._members), joint._what)
    return joint._members[found] if isinstance(found, int) else joint._subset(found)


def member_numbers(index: Any, count: int, what: str) -> int | list[int]:
    """Returns the numbers of the members that an index selects.

    Args:
        index: an int, a slice, Ellipsis, or a list, range, array or tensor of ints or bools.
        count: number of members.
        what: name of a member, such as "buffer", for messages.

    Returns:
        The number of one member for an int, or a list of numbers for any other index.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    if not isinstance(index, (int, np.integer, list, range, np.ndarray)):
        raise IndexError(
            f"{index!r} does not select a {what}; use an int, a slice, Ellipsis, or a list, range, "
            "array or tensor of ints"
        )
    numbers = np.asarray(index)
    if numbers.ndim > 1:
        raise RuntimeError(
            f"an index of {what}s must have one dimension, got an index with {numbers.ndim} "
            "dimensions"
        )
    if numbers.dtype == np.bool_ and numbers.shape == (count,):
        numbers = np.nonzero(numbers)[0]
    if not np.issubdtype(numbers.dtype, np.integer) and numbers.size:
        raise TypeError(f"an index of {what}s must be integers, got {numbers.dtype} in {index!r}")
    beyond = numbers[(numbers < -count) | (numbers >= count)]
    if beyond.size:
        raise IndexError(
            f"there is no {what} {int(beyond.flat[0])}; this ensemble has {count} {what}s"
        )
    return (numbers.astype(np.int64) % count).tolist()  # type: ignore[no-any-return]


def refusal(what: str) -> str:
    """Returns the message for a write to an ensemble that cannot choose a buffer.

    Args:
        what: first part of the message, such as "a batch was given to the ensemble".
    """
    return (
        f"{what}, which cannot choose a buffer for the data; write to one of the buffers with "
        "ensemble[i].extend(data)"
    )
