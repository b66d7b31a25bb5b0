"""What samples of one buffer wait for: its rate limiter, and items that have to be there first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmbuffer.memory.first_write import first_ring
from shmbuffer.replay.storages.ring_backed import RingBacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmbuffer.memory import Ring
    from shmbuffer.replay.storages import Storage


class Turn(NamedTuple):
    """A sample that may be made, and counts."""

    ring: Ring
    is_queue: bool
    version: int
    """Of the limiter that was asked."""
    counted: int
    """Elements; 0 where nothing counts them."""

    def give_back(self) -> None:
        """It was not made."""
        self.ring.flow.cancel(self.counted, self.version)


class Limits:
    """The flow control of a storage, as its samples meet it.

    Args:
        storage: one of somebody else's limits nothing.
        chooses: who decides what a sample has, in words; empty where any item is as good as
            another. Out of a queue come the oldest items, and nobody else can choose.

    Attributes:
        ring: whose flow counts; None before the first write, and where nothing is limited.
        version: of the limiter; ``[0]`` is 0 where nothing was ever limited.
    """

    __slots__ = ("_chooses", "_storage", "ring", "version")

    def __init__(self, storage: Storage, chooses: str) -> None:
        self._storage = storage
        self._chooses = chooses
        self.ring: Ring | None = storage.ring() if isinstance(storage, RingBacked) else None
        self.version: Sequence[int] = (int(isinstance(storage, RingBacked)),)
        if self.ring is not None:
            self.version = self.ring.flow.version

    @property
    def hold(self) -> bool:
        """Whether samples may have to wait for writes."""
        if not self.version[0]:
            return False
        if self.ring is not None:
            return self.ring.flow.limits != 0
        engine = self._storage.open_engine
        return engine is not None and not engine.closed and engine.limiter is not None

    def admit_now(self, count: int) -> bool:
        """Whether a draw may be made without waiting; it counts then."""
        return self.ring is not None and self.ring.flow.admit_now(count)

    def cancel(self, count: int) -> None:
        """A draw that was admitted, where anything is limited, was not made."""
        if self.ring is not None and self.version[0]:
            self.ring.flow.cancel(count)

    def turn(self, count: int, min_size: int = 0) -> Turn | None:
        """Wait until so many items may be drawn, which count as drawn then; None: no limits."""
        ring = self._first_ring(min_size) if isinstance(self._storage, RingBacked) else None
        if ring is None:
            return None
        is_queue, version = ring.flow.is_queue, int(ring.flow.version[0])
        if is_queue and self._chooses:
            raise ValueError(
                "the buffer is a queue (max_times_sampled), which hands items out first in, first "
                f"out, when they are asked for; {self._chooses} cannot be had with it"
            )
        return Turn(ring, is_queue, version, ring.flow.admit(count, min_size))

    def _first_ring(self, min_size: int) -> Ring | None:
        """The ring; waited for, where there has to be something in it and nobody has written."""
        storage = self._storage
        assert isinstance(storage, RingBacked)
        ring = storage.ring()
        if ring is not None or not (min_size or self.hold):
            return ring
        limiter = None if storage.open_engine is None else storage.open_engine.limiter
        first_ring(storage.engine(), max(1, min_size, 1 if limiter is None else limiter.min_size))
        return storage.ring()
