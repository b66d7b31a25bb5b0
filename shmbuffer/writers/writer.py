"""Base class of writers, which choose a slot for each item and count the writes."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.saves.checkpoints import Checkpoints
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu


class Writer(Checkpoints):
    """Base class of writers, which choose the slots of new items.

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
        """Sets the storage to write to."""
        self._storage = storage

    def add(self, data: Any) -> Any:
        """Writes one item. Returns its index, or None if the writer rejects it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement add()")

    def extend(self, data: Any) -> Any:
        """Writes a batch. Returns its indices, int64 ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement extend()")

    @property
    def tracks_generations(self) -> bool:
        """True if samples have ``index_generation``: with a shared storage, or on request."""
        return bool(getattr(self._storage, "shared", False))

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the current ``index_generation`` of slots.

        Args:
            index: one slot or slots ``[...]``, or the coordinates of a write, ``[..., ndim]`` or a
                tuple. Only the first coordinate is used.

        Returns:
            Tickets, int64 in the shape of the slots. A slot without an item has -1. If
                `tracks_generations` is False, all slots have -1.
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
        """Records that the storage was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the writer without its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state."""


def write_count_of(writer: Any) -> int:
    """Returns the number of written elements, possibly from TorchRL's private attribute."""
    return int(getattr(writer, "write_count", getattr(writer, "_write_count", 0)))
