"""Batches that are made ahead, in threads, and come in the order in which they were drawn.

    sample()  ◀── oldest batch ◀── gather, collate, transform ◀── draw
                                   in a worker                    in the caller's thread

The thread that samples draws when a batch is ordered, so a seed gives the same batches with and
without prefetching, and a pass without replacement is one pass. Orders stop at its end: what is
written before the next pass is part of that. Draws that were never delivered can be taken back, so
that a checkpoint, or another sampler, finds the state of what the caller has seen.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import RLock
from typing import Any, NamedTuple

Batch = tuple[Any, dict[str, Any]]


class Order(NamedTuple):
    """A batch that was drawn."""

    make: Callable[[], Batch]
    """Gathers and transforms it; called once, in any thread."""
    ends_pass: bool
    """Whether the sampler has run out with it."""
    undo: Callable[[], None]
    """Takes the draw back; the latest first."""


class Prefetcher:
    """A queue of batches that are being made: ``depth`` ahead, in as many threads."""

    def __init__(self, depth: int, order: Callable[[], Order]) -> None:
        self.depth = depth
        self._order = order
        self._lock = RLock()
        #: Held while the sampler is asked: a worker may do so again while the next batch is drawn.
        self.choosing = RLock()
        self._queue: deque[tuple[Order, Future[Batch]]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self.ran_out = False  # the batch that was delivered last has ended a pass

    def next(self) -> Batch:
        """The oldest batch; the next ones are ordered before it is waited for."""
        self._own()
        with self._lock:
            self._fill()
            order, future = self._queue.popleft()
            self.ran_out = order.ends_pass
        return future.result()

    def drop(self) -> None:
        """Forgets what was ordered and not delivered; returns when no worker is at it any more."""
        self._own()
        with self._lock:
            futures = [future for _, future in self._queue]
            wait([future for future in futures if not future.cancel()])
            while self._queue:
                self._queue.pop()[0].undo()
            self.ran_out = False

    def close(self) -> None:
        """Drop everything and end the threads. The next batch would start them again."""
        self.drop()
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __len__(self) -> int:
        """Batches that are being made, or wait."""
        return len(self._queue)

    def _own(self) -> None:
        """Threads do not survive a fork: what they make is the parent's."""
        if self._pid != os.getpid():
            self._lock, self.choosing = RLock(), RLock()
            self._executor, self._pid = None, os.getpid()
            while self._queue:
                self._queue.pop()[0].undo()

    def _fill(self) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="shmbuffer-sample")
        while len(self._queue) <= self.depth:
            if self._queue and self._queue[-1][0].ends_pass:
                return
            order = self._order()
            self._queue.append((order, self._executor.submit(order.make)))
