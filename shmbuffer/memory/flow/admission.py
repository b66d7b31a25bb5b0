"""Admits samples and writes of a ring when the flow control allows them.

The C core checks the limits under the mutex (``_native/core/flow.c``). The module `waiting`
implements the waits.
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

_NO_QUEUE = 1  # result of `Admission.take` if the ring is not a queue


class Admission:
    """The flow control of one handle's ring. Available as `Ring.admission`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seat = calls.seat
        # ``[0]`` is 0 if no limiter was ever set; samples check this first, because it is fast
        self.version = calls.seat.control.limiter_version

    @property
    def limits(self) -> int:
        """Flags of the active limits; 0 if there is no limit."""
        return int(self._seat.native.limits)

    @property
    def is_queue(self) -> bool:
        """True if the ring is a queue: items leave it in order, each after a number of samples."""
        return bool(self.limits & Limit.QUEUE)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Admits this thread's writes in the ``with`` block regardless of the limits.

        The writes do not wait for samples, consumers or policy versions, and are not counted.
        """
        self._seat.native.bypass(PASSES)
        try:
            yield
        finally:
            self._seat.native.bypass(COUNTS)

    def rate_status(self) -> RateStatus:
        """Reads the current state of the limits and of both sides."""
        schema = self._calls.schema
        runtime = self._seat.control.runtime[0]
        return rate_status(runtime, width=schema.width, capacity=schema.capacity)

    def admit_now(self, count: int) -> bool:
        """Admits a sample of ``count`` elements if it does not have to wait. Cost: 0.3 µs.

        Returns True if the sample was admitted.
        """
        self._calls.sides.note_sampler()
        found: int = self._seat.native.admit_sample(count, 0, True, LOCK_TIMEOUT_NS)
        return found >= 0

    def admit(self, count: int, min_size: int = 0) -> int:
        """Waits until ``count`` elements can be sampled.

        Returns the number of elements that were counted as sampled, for `cancel`.
        """
        self._calls.sides.note_sampler()
        return self._calls.ask("admit_sample", count, min_size, False, what="sample")

    def cancel(self, counted: int, version: int = 0) -> None:
        """Subtracts ``counted`` elements from the number of samples, because they were not sampled.

        ``version`` is the version of the limiter that admitted the sample. 0 means the version that
        admitted the last sample of this thread.
        """
        if counted:
            self._calls.ask("cancel_draw", counted, version, what="sample")

    def take(self, index: Ints, tickets: Ints) -> bool:
        """Takes the oldest elements of a queue. Their slots are not reused until `release`.

        Waits like `admit`, and raises the same errors. Returns False if the ring is no longer a
        queue. In that case there is nothing to release.

        Args:
            index: Array that receives the indices of the elements.
            tickets: Array of the same length that receives their tickets.
        """
        count = len(index)
        self._calls.sides.note_sampler()
        addresses = index.ctypes.data, tickets.ctypes.data

        def call() -> int:
            result = int(self._seat.native.dequeue(count, *addresses, LOCK_TIMEOUT_NS))
            return _NO_QUEUE if result == -_core.NOTHING else result

        return self._calls.run(call, "sample") != _NO_QUEUE

    def release(self) -> None:
        """Releases the slots of the elements that this thread has taken from a queue and read."""
        self._calls.run(lambda: int(self._seat.native.release(LOCK_TIMEOUT_NS)), "sample")
