"""Policy versions: those of the items, and the version of the learners who sample them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from shmbuffer.memory import consumer_version
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.item_entries import Column
from shmbuffer.storages.ring_backed import RingBacked


def versions_of(column: Column) -> Ints:
    """Converts the versions of items to int64 ``[n]``.

    Raises TypeError unless each item has a single number as its version, and ValueError unless the
    number is an integer below 2**62 in absolute value.
    """
    if not isinstance(column, np.ndarray) or column.shape[1] != 1:
        what = (
            f"{column.shape[1]} numbers"
            if isinstance(column, np.ndarray)
            else type(next(iter(column), None)).__name__
        )
        raise TypeError(
            f"the entry with the version must be one integer per item, got {what}; choose another "
            "version_key"
        )
    flat = column[:, 0]
    if flat.dtype.kind == "f":
        if not (np.isfinite(flat) & (flat == np.rint(flat)) & (np.abs(flat) < 2.0**53)).all():
            raise ValueError(
                "versions must be integers, but the entry has other numbers; choose another "
                "version_key"
            )
        return flat.astype(np.int64)
    if len(flat) and not -consumer_version.LIMIT < int(flat.min()) <= int(flat.max()) < (
        consumer_version.LIMIT
    ):
        raise ValueError(
            f"versions must be smaller than 2**62, got values from {flat.min()} to {flat.max()}"
        )
    return flat.astype(np.int64)


class ConsumerVersion:
    """The policy version of the learners, which is stored in the buffer's shared memory.

    Before the sampler has a buffer, or if the storage does not belong to this package, this object
    stores the version itself.
    """

    def __init__(self) -> None:
        self._own: int | None = None  # version that was set before the sampler had a buffer
        self._storage: weakref.ref[Any] | None = None

    def bind(self, storage: Any) -> None:
        """Uses the version that is stored with ``storage`` from now on."""
        if self._storage is None or self._storage() is not storage:
            self._storage = weakref.ref(storage)

    def read(self) -> int:
        """Returns the current version, which is 0 until a version is set."""
        seat = self._seat()
        if seat is None:
            return self._own or 0
        return consumer_version.read(seat)

    def store(self, version: Any) -> None:
        """Sets the version for all processes that use the buffer.

        Raises TypeError or ValueError if ``version`` is invalid.
        """
        version, seat = consumer_version.require_version(version), self._seat()
        if seat is None:
            self._own = version
        else:
            consumer_version.store(seat, version)

    def increment(self) -> None:
        """Adds 1 to the version atomically."""
        seat = self._seat()
        if seat is None:
            self._own = (self._own or 0) + 1
        else:
            consumer_version.increment(seat)

    def _seat(self) -> Seat | None:
        storage = None if self._storage is None else self._storage()
        if not isinstance(storage, RingBacked):
            return None
        engine = storage.engine() if storage.shared else storage.open_engine
        if engine is None:
            return None
        own, self._own = self._own, None
        if own is not None:
            consumer_version.store(engine.seat, own)
        return engine.seat

    def __getstate__(self) -> dict[str, Any]:
        storage = None if self._storage is None else self._storage()
        alone = not isinstance(storage, RingBacked) or storage.open_engine is None
        return {"_own": self._own if alone else None, "_storage": None}
