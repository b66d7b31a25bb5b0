"""Waiting before a sample: for the rate limiter, and for a least number of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from shmbuffer.items.indices import as_int
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.first_write import first_ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.system import deadline
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS

Batch = TypeVar("Batch")

_NOT_TAKEN = -1  # for a ticket: nothing came out of the queue


class Source(Protocol):
    """Where samples come from: the storage of a buffer, or its substitute."""

    @property
    def open_engine(self) -> Engine | None:
        """The engine, if it is open."""

    def engine(self) -> Engine:
        """The engine, opened if need be."""

    def ring(self) -> Ring | None:
        """The ring; None before the first write."""


class Turn(NamedTuple):
    """A sample that may be drawn, and is counted."""

    ring: Ring
    is_queue: bool
    version: int
    """Of the limiter that was asked."""
    counted: int
    """Elements; 0 where nothing counts them."""

    def give_back(self) -> None:
        """It was not drawn."""
        self.ring.admission.cancel(self.counted, self.version)


class Limits:
    """The flow control of a storage, for its samples.

    Without a ``source``, a storage of another package, nothing is limited. ``chooses`` names the
    part that chooses items, if one does: this excludes a queue, which hands out the oldest.
    """

    __slots__ = ("_chooses", "_source", "ring", "version")

    def __init__(self, source: Source | None, chooses: str) -> None:
        self._source = source
        self._chooses = chooses
        # None before the first write, and where nothing is limited
        self.ring: Ring | None = None if source is None else source.ring()
        # of the limiter; ``[0]`` is 0 if there never was one
        self.version: Sequence[int] = (int(source is not None),)
        if self.ring is not None:
            self.version = self.ring.admission.version

    @property
    def hold(self) -> bool:
        """True if samples may have to wait for writes."""
        if not self.version[0]:
            return False
        if self.ring is not None:
            return self.ring.admission.limits != 0
        engine = None if self._source is None else self._source.open_engine
        return engine is not None and not engine.closed and engine.limiter is not None

    def admit_now(self, count: int) -> bool:
        """Count a draw and return True, unless it has to wait."""
        return self.ring is not None and self.ring.admission.admit_now(count)

    def cancel(self, count: int) -> None:
        """An admitted draw was not made."""
        if self.ring is not None and self.version[0]:
            self.ring.admission.cancel(count)

    def in_turn(
        self,
        count: int,
        min_size: int | None,
        timeout: float | None,
        draw: Callable[[int], Batch],
        oldest: Callable[[Ring, int], Batch | None],
    ) -> Batch:
        """Waits until ``count`` items may be drawn, and draws them.

        Args:
            count: the number of items.
            min_size: as the user gave it to `sample`.
            timeout: as the user gave it to `sample`.
            draw: draws the sample.
            oldest: takes the sample out of a queue; returns None if it is not a queue any more.
        """
        if min_size is None and timeout is None and (not self.version[0] or self.admit_now(count)):
            try:
                return draw(count)
            except BaseException:
                self.cancel(count)
                raise
        if min_size is not None and (min_size := as_int("min_size", min_size)) < 0:
            raise ValueError(f"min_size has to be at least 0, got {min_size}")
        with deadline.within(timeout):
            turn = self.turn(count, min_size or 0)
            if turn is None:
                return draw(count)
            try:
                batch = oldest(turn.ring, count) if turn.is_queue else None
                return draw(count) if batch is None else batch
            except BaseException:
                turn.give_back()
                raise

    def turn(self, count: int, min_size: int = 0) -> Turn | None:
        """Waits until so many items may be drawn, and counts them as drawn; None: no limits."""
        ring = self._first_ring(self._source, min_size) if self._source is not None else None
        if ring is None:
            return None
        is_queue, version = ring.admission.is_queue, int(ring.admission.version[0])
        if is_queue and self._chooses:
            raise ValueError(
                "the buffer is a queue (max_times_sampled), which hands items out first in, first "
                f"out, when they are asked for; {self._chooses} cannot be had with it"
            )
        return Turn(ring, is_queue, version, ring.admission.admit(count, min_size))

    def _first_ring(self, source: Source, min_size: int) -> Ring | None:
        """The ring; waits for the first write if the sample needs items."""
        ring = source.ring()
        if ring is not None or not (min_size or self.hold):
            return ring
        limiter = None if source.open_engine is None else source.open_engine.limiter
        first_ring(source.engine(), max(1, min_size, 1 if limiter is None else limiter.min_size))
        return source.ring()


def taken(ring: Ring, count: int, read: Callable[[Ints, Ints], Batch | None]) -> Batch | None:
    """The oldest items of a queue, read by index and ticket; None if it is not a queue any more."""
    index = np.empty(count, np.int64)
    tickets = np.full(count, _NOT_TAKEN, np.int64)
    release = ring.seat.native.release
    while True:
        found = False
        try:
            found = ring.admission.take(index, tickets)
            if not found:
                return None
            batch = read(index, tickets)
            if batch is not None:
                return batch
            # The buffer was emptied meanwhile.
        finally:
            # An interrupt may come between the two calls: the tickets show what was taken. Until it
            # is released there is no call here, behind which CPython would look for another one.
            if (found or (count and tickets[0] != _NOT_TAKEN)) and release(LOCK_TIMEOUT_NS) < 0:
                ring.admission.release()
