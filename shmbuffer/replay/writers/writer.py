"""What every writer offers: a place for each item, and a count."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.replay.checkpoints import Checkpoints
from shmbuffer.replay.storages.indexing import tickets_at
from shmbuffer.replay.storages.storage import ring_of


class Writer(Checkpoints):
    """Who decides where the next item goes.

    A writer of your own needs ``add`` and ``extend``, which call ``self._storage.set(index,
    data)``; on a ring that is a placed write: whole or not at all, with the default priority.

    Args:
        compilable: accepted; `torch.compile` leaves the native calls alone either way.

    Source: ``torchrl.data.Writer``.
    """

    compilable = False
    _storage: Any = None
    _rng: Any = None

    def __init__(self, compilable: bool = False) -> None:
        self.compilable = bool(compilable)

    def register_storage(self, storage: Any) -> None:
        """Write into ``storage`` from now on."""
        self._storage = storage

    def add(self, data: Any) -> Any:
        """Write one item. Its index, or None where the writer does not take it."""
        raise NotImplementedError(f"{type(self).__name__} has no add()")

    def extend(self, data: Any) -> Any:
        """Write a batch. Its indices, int64 ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__} has no extend()")

    @property
    def tracks_generations(self) -> bool:
        """Whether samples say which write put an item there: where the storage is shared, they do.

        A `RoundRobinWriter` may be told to.
        """
        return bool(getattr(self._storage, "shared", False))

    def generations_of(self, index: Any) -> torch.Tensor:
        """Which write has put there what is there now, as ``index_generation`` of a sample says it.

        Args:
            index: slots ``[...]``, or one; or coordinates as a write returns them, ``[..., ndim]``
                or a tuple, of which the first counts.

        Returns:
            Tickets, int64 of the shape of the slots; -1 where there is no item, and everywhere
            unless `tracks_generations`.
        """
        slots = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
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
        """The storage was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """What the writer knows beyond its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
