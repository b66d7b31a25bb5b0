"""Admits the writes and samples of a ring, as the flow control allows.

The C core checks the limits under the mutex (``_native/core/flow.c``). If a call must wait, the
module `waiting` does so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shmbuffer._native import _core
from shmbuffer.memory.flow.rate_status import RateStatus, rate_status
from shmbuffer.memory.flow.waiting import COUNTS, PASSES, Calls
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.layout import Limit
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS

_NO_QUEUE = 1  # the result of a call to take from a ring without a queue


class Admission:
    """Flow control of one handle's ring. Available as `Ring.admission`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seat = calls.seat
        # ``[0]`` is 0 if no limiter was ever set, which hot calls check first
        self.version = calls.seat.control.limiter_version

    @property
    def limits(self) -> int:
        """Flags of the active limits; 0 if there is no limit."""
        return int(self._seat.native.limits)

    @property
    def is_queue(self) -> bool:
        """True if items are returned first in, first out, each a limited number of times."""
        return bool(self.limits & Limit.QUEUE)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Admits this thread's writes in the ``with`` block without checking or counting them."""
        self._seat.native.bypass(PASSES)
        try:
            yield
        finally:
            self._seat.native.bypass(COUNTS)

    def rate_status(self) -> RateStatus:
        """Returns the current state of both sides."""
        schema = self._calls.schema
        runtime = self._seat.control.runtime[0]
        return rate_status(runtime, width=schema.width, capacity=schema.capacity)

    def admit_now(self, count: int) -> bool:
        """Admits a sample of ``count`` elements if the sampler need not wait. Cost: 0.3 µs."""
        self._calls.sides.draws_here()
        found: int = self._seat.native.admit_sample(count, 0, True, LOCK_TIMEOUT_NS)
        return found >= 0

    def admit(self, count: int, min_size: int = 0) -> int:
        """Waits until ``count`` elements can be sampled; returns the number counted as sampled."""
        self._calls.sides.draws_here()
        return self._calls.ask("admit_sample", count, min_size, False, what="sample")

    def cancel(self, counted: int, version: int = 0) -> None:
        """Cancels an admission, because the items were not sampled."""
        if counted:
            self._calls.ask("cancel_draw", counted, version, what="sample")

    def take(self, index: Ints, tickets: Ints) -> bool:
        """Takes the oldest elements of a queue; their slots are not reused until `release`.

        Returns False if the buffer is no longer a queue; then there is nothing to release. Raises
        the errors of `admit`.
        """
        count = len(index)
        self._calls.sides.draws_here()
        at, whose = index.ctypes.data, tickets.ctypes.data

        def call() -> int:
            result = int(self._seat.native.dequeue(count, at, whose, LOCK_TIMEOUT_NS))
            return _NO_QUEUE if result == -_core.NOTHING else result

        return self._calls.run(call, "sample") != _NO_QUEUE

    def release(self) -> None:
        """Releases the items that this thread has taken and read."""
        self._calls.run(lambda: int(self._seat.native.release(LOCK_TIMEOUT_NS)), "sample")
