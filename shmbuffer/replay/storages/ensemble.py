"""Several storages as one: for reading, by number of the storage and index in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from shmbuffer.replay.checkpointers.ensemble import StorageEnsembleCheckpointer
from shmbuffer.replay.members import is_everything, members
from shmbuffer.replay.storages.storage import Storage


class StorageEnsemble(Storage):
    """The storages of the buffers of a `ReplayBufferEnsemble`.

    Args:
        *storages: one for each buffer.
        transforms: one for each storage, called with what is read from it, or None for none.

    ``storages[i]`` is the i-th, ``storages[i, index]`` reads from it, ``storages[:, index]`` gives
    a list with a batch of each; any other index gives an ensemble of those that it names. Its
    ``len`` is their number.

    Raises:
        TypeError: another number of transforms than of storages.

    Source: ``torchrl.data.StorageEnsemble``.
    """

    _default_checkpointer = StorageEnsembleCheckpointer

    def __init__(
        self, *storages: Storage, transforms: Sequence[Callable[[Any], Any] | None] | None = None
    ) -> None:
        if not storages:
            raise ValueError("an ensemble has at least one storage")
        if transforms is not None and len(transforms) != len(storages):
            raise TypeError(
                f"transforms are one for each storage, got {len(transforms)} for {len(storages)}"
            )
        self._storages = list(storages)
        self._transforms = None if transforms is None else list(transforms)
        super().__init__(sum(storage.max_size for storage in storages))

    @property
    def max_size(self) -> int:
        """Capacity of all storages together, in elements."""
        return sum(storage.max_size for storage in self._storages)

    @property
    def shared(self) -> bool:
        """Whether one of them is shared."""
        return any(storage.shared for storage in self._storages)

    @property
    def initialized(self) -> bool:
        """Whether each of them knows its leaves."""
        return all(storage.initialized for storage in self._storages)

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """What a sampler of the ensemble has chosen.

        Args:
            index: a TensorDict ``[rows]`` with ``"buffer_ids"`` int64 ``[rows]`` and ``"index"``
                int64 ``[rows, n]`` (``[rows, n, ndim]``).

        Returns:
            For each row the number of its storage, and the batch from there, transformed.

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
            data = self._storages[at].get(local(row, self._storages[at]))
            transform = None if self._transforms is None else self._transforms[at]
            found.append((at, data if transform is None else transform(data)))
        return found

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """RuntimeError: say which storage."""
        raise RuntimeError(
            "a StorageEnsemble does not know for which of its storages the data are: write into "
            "one of them, ensemble[i].set(index, data)"
        )

    def add(self, data: Any) -> NoReturn:
        """RuntimeError, as `set`."""
        self.set(0, data)

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError, as `set`."""
        self.set(0, data)

    def state_dict(self) -> dict[str, Any]:
        """Each storage's state, under its number."""
        return {str(at): storage.state_dict() for at, storage in enumerate(self._storages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave.

        Raises:
            ValueError: it is of another number of storages; nothing was changed.
        """
        if sorted(state_dict) != sorted(str(at) for at in range(len(self._storages))):
            raise ValueError(
                f"the state is of storages {sorted(state_dict)}, this ensemble has "
                f"{len(self._storages)}"
            )
        for at, storage in enumerate(self._storages):
            storage.load_state_dict(state_dict[str(at)])

    def cleanup(self) -> bool:
        """Remove the files of all storages; whether there were any."""
        return sum(storage.cleanup() for storage in self._storages) > 0

    def close(self) -> None:
        """Close each of them."""
        for storage in self._storages:
            storage.close()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            chosen = self[index[0]]
            rest = index[1:] if len(index) > 2 else index[1] if len(index) == 2 else None
            if rest is None:
                return chosen
            if isinstance(chosen, StorageEnsemble):
                return [storage[rest] for storage in chosen._storages]
            return chosen[rest]
        if is_everything(index):
            return self
        found = members(index, len(self._storages), "storage")
        if isinstance(found, int):
            return self._storages[found]
        transforms = self._transforms
        return StorageEnsemble(
            *(self._storages[at] for at in found),
            transforms=None if transforms is None else [transforms[at] for at in found],
        )

    def __len__(self) -> int:
        """How many storages there are."""
        return len(self._storages)

    def __repr__(self) -> str:
        return f"StorageEnsemble({', '.join(map(repr, self._storages))})"


def local(row: Any, storage: Any) -> Any:
    """The index of one row of a sample, as the storage of its buffer takes it.

    Args:
        row: a TensorDict with ``"index"``: int64 ``[n]``, or ``[n, ndim]`` where there are lanes.
        storage: of the buffer.

    Returns:
        int64 ``[n]``, or a tuple of ``ndim`` of them.
    """
    index: torch.Tensor = row.get("index")
    return tuple(index.unbind(-1)) if getattr(storage, "ndim", 1) > 1 else index
