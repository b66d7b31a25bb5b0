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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch

Batch = tuple[Any, dict[str, Any]]


class Draws(NamedTuple):
    """Where the draws of a buffer stand."""

    position: Any
    """The sampler's; see `Sampler._position`."""
    generator: torch.Generator | None
    """The buffer's."""
    state: torch.Tensor | None
    """The generator's."""


class Order(NamedTuple):
    """A batch that was drawn."""

    make: Callable[[], Batch]
    """Gathers and transforms it; called once, in any thread."""
    ends_pass: bool
    """Whether the sampler has run out with it."""
    before: Draws
    """Where a drop of it, and of what was ordered later, goes back to."""


class Made(NamedTuple):
    """A batch that was made ahead."""

    batch: Batch
    order: Order


class Prefetcher:
    """A queue of batches that are being made: ``depth`` ahead, in as many threads."""

    def __init__(
        self, depth: int, order: Callable[[], Order], go_to: Callable[[Draws], None]
    ) -> None:
        self.depth = depth
        self._order = order
        self._go_to = go_to
        self._lock = RLock()
        #: Held while the sampler is asked: a worker may do so again while the next batch is drawn.
        self.choosing = RLock()
        self._queue: deque[tuple[Order, Future[Batch]]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._change: Future[Any] | None = None  # the last one: what is ordered now waits for it
        self.ran_out = False  # the batch that was delivered last has ended a pass

    def next(self) -> Batch:
        """The oldest batch; the next ones are ordered before it is waited for."""
        self._own()
        with self._lock:
            self._fill()
            order, future = self._queue.popleft()
            self.ran_out = order.ends_pass
        return future.result()

    def submit(self, change: Callable[[], Any]) -> Future[Any]:
        """Have something done behind the batches that were ordered so far.

        Those that are ordered later wait for it, and raise what it raises.
        """
        self._own()
        with self._lock:
            before = [future for _, future in self._queue]
            before += [] if self._change is None else [self._change]
            # The threads take one call after the other: what it waits for has begun before it.
            self._change = self._threads().submit(_behind, before, change)
            return self._change

    def wait_for_changes(self) -> None:
        """Return when what was submitted is done."""
        self._own()
        with self._lock:
            wait([] if self._change is None else [self._change])

    def settle(self) -> None:
        """Return when everything is made and done; raises what one of them has raised."""
        self._own()
        with self._lock:
            futures = [future for _, future in self._queue]
            futures += [] if self._change is None else [self._change]
            self._change = None
            wait(futures)
            for future in futures:
                future.result()

    def drop(self) -> None:
        """Forgets what was ordered and not delivered; returns when no worker is at it any more."""
        self._own()
        with self._lock:
            futures = [future for _, future in self._queue]
            wait([future for future in futures if not future.cancel()])
            self.wait_for_changes()
            self._forget(0)
            self.ran_out = False

    @contextmanager
    def waiting(self) -> Iterator[list[Made]]:
        """Nothing is ordered or delivered meanwhile.

        Yields:
            What was made ahead, and is delivered next. If making one of them has failed, it and
            what was ordered later are forgotten.
        """
        self._own()
        with self._lock:
            for at, (_, future) in enumerate(self._queue):
                if future.exception() is not None:
                    self._forget(at)
                    break
            yield [Made(future.result(), order) for order, future in self._queue]

    def put_back(self, made: list[Made]) -> None:
        """Delivers these next; nothing was ordered."""
        self._own()
        with self._lock:
            for batch, order in made:
                future: Future[Batch] = Future()
                future.set_result(batch)
                self._queue.append((order, future))

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
            self._executor, self._change, self._pid = None, None, os.getpid()
            self._forget(0)

    def _forget(self, first: int) -> None:
        """Takes back what was ordered from there on."""
        if len(self._queue) > first:
            self._go_to(self._queue[first][0].before)
        while len(self._queue) > first:
            self._queue.pop()

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="shmbuffer-sample")
        return self._executor

    def _fill(self) -> None:
        threads = self._threads()
        change, self._change = self._change, None
        if change is not None:
            change.result()
        while len(self._queue) <= self.depth:
            if self._queue and self._queue[-1][0].ends_pass:
                return
            order = self._order()
            self._queue.append((order, threads.submit(order.make)))


def _behind(before: list[Future[Any]], change: Callable[[], Any]) -> Any:
    wait(before)
    return change()
