"""Flow control: admits the writes and samples of a ring.

The core decides what is allowed, under the mutex (``_native/core/flow.c``). `waiting` waits.
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
        """The limits for which a call may have to wait; 0 if there are none."""
        return int(self._seat.native.limits)

    @property
    def is_queue(self) -> bool:
        """True if items are handed out first in, first out, each a limited number of times."""
        return bool(self.limits & Limit.QUEUE)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Admits this thread's writes in the body whatever the ratio, without counting them."""
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
        """Admits a sampler's draw of ``count`` elements if it need not wait. Cost: 0.3 µs."""
        self._calls.sides.draws_here()
        found: int = self._seat.native.admit_sample(count, 0, True, LOCK_TIMEOUT_NS)
        return found >= 0

    def admit(self, count: int, min_size: int = 0) -> int:
        """Waits until ``count`` elements may be drawn; returns how many were counted as drawn."""
        self._calls.sides.draws_here()
        return self._calls.ask("admit_sample", count, min_size, False, what="sample")

    def cancel(self, counted: int, version: int = 0) -> None:
        """Cancels an admission, because the items were not drawn."""
        if counted:
            self._calls.ask("cancel_draw", counted, version, what="sample")

    def take(self, index: Ints, tickets: Ints) -> bool:
        """Takes the oldest elements out of a queue; their slots are not reused until `release`.

        Returns False if there is no queue any more, and nothing to release. Raises like `admit`.
        """
        count = len(index)
        self._calls.sides.draws_here()
        at, whose = index.ctypes.data, tickets.ctypes.data

        def call() -> int:
            result = int(self._seat.native.dequeue(count, at, whose, LOCK_TIMEOUT_NS))
            return _NO_QUEUE if result == -_core.NOTHING else result

        return self._calls.run(call, "sample") != _NO_QUEUE

    def release(self) -> None:
        """Releases the items that this thread took, after they were read."""
        self._calls.run(lambda: int(self._seat.native.release(LOCK_TIMEOUT_NS)), "sample")
