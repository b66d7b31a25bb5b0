"""What samples of one buffer wait for: its rate limiter, and items that have to be there first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from shmbuffer.memory.first_write import first_ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmbuffer.memory import Engine, Ring


class Source(Protocol):
    """Where samples come from: the storage of a buffer, or what stands for it."""

    @property
    def open_engine(self) -> Engine | None:
        """The handle, if there is one."""

    def engine(self) -> Engine:
        """The handle; opened where it was not."""

    def ring(self) -> Ring | None:
        """The ring; None before the first write."""


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
        source: where samples come from; None, a storage of somebody else's, limits nothing.
        chooses: who decides what a sample has, in words; empty where any item is as good as
            another. Out of a queue come the oldest items, and nobody else can choose.
    """

    __slots__ = ("_chooses", "_source", "ring", "version")

    def __init__(self, source: Source | None, chooses: str) -> None:
        self._source = source
        self._chooses = chooses
        # whose flow counts; None before the first write, and where nothing is limited
        self.ring: Ring | None = None if source is None else source.ring()
        # of the limiter; ``[0]`` is 0 where nothing was ever limited
        self.version: Sequence[int] = (int(source is not None),)
        if self.ring is not None:
            self.version = self.ring.flow.version

    @property
    def hold(self) -> bool:
        """Whether samples may have to wait for writes."""
        if not self.version[0]:
            return False
        if self.ring is not None:
            return self.ring.flow.limits != 0
        engine = None if self._source is None else self._source.open_engine
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
        ring = self._first_ring(self._source, min_size) if self._source is not None else None
        if ring is None:
            return None
        is_queue, version = ring.flow.is_queue, int(ring.flow.version[0])
        if is_queue and self._chooses:
            raise ValueError(
                "the buffer is a queue (max_times_sampled), which hands items out first in, first "
                f"out, when they are asked for; {self._chooses} cannot be had with it"
            )
        return Turn(ring, is_queue, version, ring.flow.admit(count, min_size))

    def _first_ring(self, source: Source, min_size: int) -> Ring | None:
        """The ring; waited for, where there has to be something in it and nobody has written."""
        ring = source.ring()
        if ring is not None or not (min_size or self.hold):
            return ring
        limiter = None if source.open_engine is None else source.open_engine.limiter
        first_ring(source.engine(), max(1, min_size, 1 if limiter is None else limiter.min_size))
        return source.ring()
