"""Base class for writers, which choose a slot for each item and count the writes."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.saves.checkpoints import Checkpoints
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu


class Writer(Checkpoints):
    """Base class for writers, which choose the slots of new items.

    A custom writer must define ``add`` and ``extend``, which call
    ``self._storage.set(index, data)``. If the storage has a ring, this call writes a batch
    completely or not at all, with the default priority.

    Args:
        compilable: has no effect, because `torch.compile` never compiles the native calls.

    Source: ``torchrl.data.Writer``.
    """

    compilable = False
    _kind = "writer"
    _storage: Any = None
    _rng: Any = None

    def __init__(self, compilable: bool = False) -> None:
        self.compilable = bool(compilable)

    def register_storage(self, storage: Any) -> None:
        """Sets the storage to which the writer writes."""
        self._storage = storage

    def add(self, data: Any) -> Any:
        """Writes one item. Returns its index, or None if the writer rejects it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement add()")

    def extend(self, data: Any) -> Any:
        """Writes a batch. Returns the indices of its items, int64 ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement extend()")

    @property
    def tracks_generations(self) -> bool:
        """True if samples have the entry ``index_generation``, because the storage is shared."""
        return bool(getattr(self._storage, "shared", False))

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the current ``index_generation`` of slots.

        Args:
            index: slots ``[...]`` or an int. Also accepts the index of a write with several
                dimensions, ``[..., ndim]`` or a tuple, of which only the first coordinate is used.

        Returns:
            The tickets of the slots' items, int64 ``[...]``. The value is -1 for a slot without an
                item, and for all slots if `tracks_generations` is False.
        """
        slots = cpu.as_tensor(index[0] if isinstance(index, tuple) else index)
        ndim = getattr(self._storage, "ndim", 1)
        if ndim > 1 and slots.dim() > 1 and slots.shape[-1] == ndim:
            slots = slots[..., 0]
        found = torch.full_like(slots, -1, dtype=torch.int64)
        ring = ring_of(self._storage)
        if self.tracks_generations and ring is not None:
            inside = (slots >= 0) & (slots < ring.capacity)
            tickets = tickets_at(ring, slots[inside].cpu().numpy())
            found[inside] = torch.from_numpy(tickets).to(found.device)
        return found

    def _empty(self, empty_write_count: bool = True) -> None:
        """Resets the cursor and the write count after the storage has been emptied."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the writer, without the arguments of its constructor."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""


def write_count_of(writer: Any) -> int:
    """Returns the number of elements that a writer of this package or of TorchRL has written."""
    return int(getattr(writer, "write_count", getattr(writer, "_write_count", 0)))
