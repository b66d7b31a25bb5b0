"""Batches that threads make ahead, delivered in the order in which they were drawn.

    sample()  ◀── oldest batch ◀── gather, collate, transform ◀── draw
                                   in a worker                    in the caller's thread

The caller's thread draws when a batch is ordered, so a seed gives the same batches with and without
prefetching. Orders stop at the end of a pass, so that items written before the next pass are part
of it. Draws that were never delivered can be taken back: a checkpoint, or another sampler, starts
from the last delivered batch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shmbuffer.memory.system.fork_lock import ForkLock

Batch = tuple[Any, dict[str, Any]]


class Draws(NamedTuple):
    """The position of a buffer's draws."""

    position: Any  # of the sampler; see `Sampler._position`
    generator: torch.Generator | None
    state: torch.Tensor | None  # of the generator


class Order(NamedTuple):
    """A batch that was drawn."""

    make: Callable[[], Batch]  # gathers and transforms it; called once, in any thread
    ends_pass: bool
    before: Draws  # to go back to if this order and later ones are dropped


class Made(NamedTuple):
    """A batch that was made ahead."""

    batch: Batch
    order: Order


class Prefetcher:
    """A queue of ``depth`` batches that are being made, in as many threads."""

    _lock = ForkLock()

    #: Held while the sampler draws: a worker may draw again while the next batch is drawn.
    choosing = ForkLock()

    def __init__(
        self, depth: int, order: Callable[[], Order], go_to: Callable[[Draws], None]
    ) -> None:
        self.depth = depth
        self._order = order
        self._go_to = go_to
        self._queue: deque[tuple[Order, Future[Batch]]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._change: Future[Any] | None = None  # the last one, which new orders wait for
        self.ran_out = False  # the last delivered batch has ended a pass

    def next(self) -> Batch:
        """Order the next batches, then wait for the oldest one."""
        self._own()
        with self._lock:
            self._fill()
            order, future = self._queue.popleft()
            self.ran_out = order.ends_pass
        return future.result()

    def submit(self, change: Callable[[], Any]) -> Future[Any]:
        """Make a change after the batches ordered so far; later ones wait, and raise its error."""
        self._own()
        with self._lock:
            before = [future for _, future in self._queue]
            before += [] if self._change is None else [self._change]
            # The threads take calls in order: the futures that it waits for have begun before it.
            self._change = self._threads().submit(_behind, before, change)
            return self._change

    def wait_for_changes(self) -> None:
        """Return when submitted changes are done."""
        self._own()
        with self._lock:
            wait([] if self._change is None else [self._change])

    def settle(self) -> None:
        """Return when all batches and changes are done; raises their errors."""
        self._own()
        with self._lock:
            futures = [future for _, future in self._queue]
            futures += [] if self._change is None else [self._change]
            self._change = None
            wait(futures)
            for future in futures:
                future.result()

    def drop(self) -> None:
        """Drop batches that were not delivered; returns when no worker makes one."""
        self._own()
        with self._lock:
            futures = [future for _, future in self._queue]
            wait([future for future in futures if not future.cancel()])
            self.wait_for_changes()
            self._forget(0)
            self.ran_out = False

    @contextmanager
    def waiting(self) -> Iterator[list[Made]]:
        """Hold orders and deliveries; yields the next batches, up to one that has failed."""
        self._own()
        with self._lock:
            for at, (_, future) in enumerate(self._queue):
                if future.exception() is not None:
                    self._forget(at)
                    break
            yield [Made(future.result(), order) for order, future in self._queue]

    def put_back(self, made: list[Made]) -> None:
        """Deliver these batches next; there are no orders."""
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
        """Batches that are being made or wait."""
        return len(self._queue)

    def _own(self) -> None:
        """After a fork, begin without the threads and batches, which are the parent's."""
        if self._pid != os.getpid():
            self._executor, self._change, self._pid = None, None, os.getpid()
            self._forget(0)

    def _forget(self, first: int) -> None:
        """Take back the orders from ``first`` on."""
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
