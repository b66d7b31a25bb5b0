"""Makes samples wait for the rate limiter and for a minimum number of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from shmbuffer.items.indices import as_int
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.first_write import first_ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.layout import Side
from shmbuffer.memory.system import deadline
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS

Batch = TypeVar("Batch")

_NOT_TAKEN = -1  # ticket of an item that the queue has not returned


class Source(Protocol):
    """A source of samples: the storage of a buffer, or an object with the same methods."""

    @property
    def open_engine(self) -> Engine | None:
        """The engine if it is open, otherwise None."""

    def engine(self) -> Engine:
        """Opens the engine if necessary, and returns it."""

    def ring(self) -> Ring | None:
        """Returns the ring, or None before the first write."""


class Turn(NamedTuple):
    """Permission to draw a sample, which the rate limiter has already counted."""

    ring: Ring
    is_queue: bool
    version: int
    """Version of the rate limiter that admitted the sample."""
    counted: int
    """Number of elements that the rate limiter counted; 0 without a rate limiter."""

    def give_back(self) -> None:
        """Undoes the count, because the sample was not drawn."""
        self.ring.admission.cancel(self.counted, self.version)


class Limits:
    """Flow control for samples from one storage: rate limiter, minimum size and queue.

    Args:
        source: storage to sample from. None for a storage of another package, which has no limits.
        chooses: name of the part that selects the items, such as a sampler, for error messages. It
            is "" if there is none. A buffer with such a part cannot be a queue, because a queue
            always returns the oldest items.
    """

    __slots__ = ("_chooses", "_source", "ring", "version")

    def __init__(self, source: Source | None, chooses: str) -> None:
        self._source = source
        self._chooses = chooses
        # None before the first write and without limits.
        self.ring: Ring | None = None if source is None else source.ring()
        # Version of the rate limiter; ``[0]`` is 0 if no rate limiter was ever set.
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
        """Counts a draw of ``count`` items, unless it would have to wait.

        Returns True if the draw was counted.
        """
        return self.ring is not None and self.ring.admission.admit_now(count)

    def admits(self, count: int) -> bool:
        """True if a draw of ``count`` items need not wait at the moment. Does not count a draw."""
        if not self.hold:
            return True
        ring = self.ring
        return ring is not None and ring.admission.rate_status().why(Side.INSERTS, count) is None

    def cancel(self, count: int) -> None:
        """Undoes the count of a draw that was admitted but not carried out."""
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
        """Waits until the limits admit a draw of ``count`` items, and then draws them.

        Args:
            count: number of items.
            min_size: least number of items in the buffer, as in `sample`.
            timeout: longest wait in seconds, as in `sample`.
            draw: function that draws a sample of the given number of items.
            oldest: function that takes the given number of items from a queue. It returns None if
                the buffer is no longer a queue.
        """
        if min_size is None and timeout is None and (not self.version[0] or self.admit_now(count)):
            try:
                return draw(count)
            except BaseException:
                self.cancel(count)
                raise
        with deadline.limit_waits(timeout):
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
        """Waits until the limits allow ``count`` items to be sampled, and counts these items.

        Returns:
            A `Turn`, which can undo the count. None, without a wait, if there is no ring yet and no
            limit requires one.
        """
        if (min_size := as_int("min_size", min_size)) < 0:
            raise ValueError(f"min_size must be at least 0, got {min_size}")
        ring = self._first_ring(self._source, min_size) if self._source is not None else None
        if ring is None:
            return None
        is_queue, version = ring.admission.is_queue, int(ring.admission.version[0])
        if is_queue and self._chooses:
            raise ValueError(
                "the buffer is a queue (max_times_sampled), which returns items in first-in, "
                "first-out order at the time of the call, so it cannot be combined with "
                f"{self._chooses}"
            )
        return Turn(ring, is_queue, version, ring.admission.admit(count, min_size))

    def _first_ring(self, source: Source, min_size: int) -> Ring | None:
        """Returns the ring. Waits for the first write if the sample cannot be drawn before it."""
        ring = source.ring()
        if ring is not None or not (min_size or self.hold):
            return ring
        limiter = None if source.open_engine is None else source.open_engine.limiter
        first_ring(source.engine(), max(1, min_size, 1 if limiter is None else limiter.min_size))
        return source.ring()


def take_oldest(ring: Ring, count: int, read: Callable[[Ints, Ints], Batch | None]) -> Batch | None:
    """Removes the oldest ``count`` items from a queue, and reads them by index and ticket.

    Returns None if the buffer is no longer a queue.
    """
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
            # The buffer was emptied in the meantime.
        finally:
            # An interrupt can occur after `take` has removed items but before ``found`` is set. The
            # tickets then show that items were removed. No Python function is called before the
            # release, because CPython checks for interrupts after calls.
            if (found or (count and tickets[0] != _NOT_TAKEN)) and release(LOCK_TIMEOUT_NS) < 0:
                ring.admission.release()
