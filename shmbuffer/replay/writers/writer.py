"""What every writer offers: a place for each item, and a count."""

from __future__ import annotations

from typing import Any

from shmbuffer.replay.checkpoints import Checkpoints


class Writer(Checkpoints):
    """Who decides where the next item goes.

    A writer of your own needs ``add`` and ``extend``, which call ``self._storage.set(index,
    data)``; on a ring that is a placed write: whole or not at all, with the default priority.

    Source: ``torchrl.data.Writer``.
    """

    _storage: Any = None
    _rng: Any = None

    def register_storage(self, storage: Any) -> None:
        """Write into ``storage`` from now on."""
        self._storage = storage

    def add(self, data: Any) -> Any:
        """Write one item. Its index, or None where the writer does not take it."""
        raise NotImplementedError(f"{type(self).__name__} has no add()")

    def extend(self, data: Any) -> Any:
        """Write a batch. Its indices, int64 ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__} has no extend()")

    def _empty(self, empty_write_count: bool = True) -> None:
        """The storage was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """What the writer knows beyond its arguments."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
