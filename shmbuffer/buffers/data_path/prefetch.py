"""Prefetches batches and delivers them in the order in which they were drawn.

                                   ┌─ at once, in the caller's thread ─┐
    sample()  ◀── oldest batch ◀── ┤ gather, collate, transform        ├ ◀── draw, in the
                                   └─ in a worker ─────────────────────┘     caller's thread

`HandOver` measures which mode is faster. The mode affects neither draws nor saves:

  * A call orders batches until ``depth`` batches wait in addition to the batch that it delivers.
    Each batch is drawn when it is ordered. In both modes, a batch is therefore drawn during the
    same call, from the same state of generator and sampler and with the same priorities. A batch
    that is made at once is not newer than a batch from a worker.
  * A save contains the waiting batches and the positions before and after each draw. Both are
    independent of the mode. A batch that failed also waits, and its exception is raised when the
    batch is due.
  * A resumed run thus begins with the same batches as an uninterrupted run, and draws the next
    batch during the same call. Measured times have no effect on this.

The modes differ only in when the items of a drawn batch are read: immediately or shortly
afterwards. This matters only for items that are overwritten in between.

No batches are ordered beyond the end of a pass, so that the next pass includes all items that are
written before it starts. Draws that were never delivered can be reverted: a checkpoint or a new
sampler starts from the last delivered batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shmbuffer.buffers.data_path.hand_over import HandOver
from shmbuffer.memory.system.fork_lock import ForkLock

Batch = tuple[Any, dict[str, Any]]


class Draws(NamedTuple):
    """The positions of a buffer's sampler and generator between two draws."""

    position: Any  # position of the sampler; see `Sampler._position`
    generator: torch.Generator | None
    state: torch.Tensor | None  # state of the generator


class Order(NamedTuple):
    """A batch whose items were drawn but not read."""

    make: Callable[[], Batch]  # gathers and transforms the batch; called once, in any thread
    ends_pass: bool
    before: Draws  # positions to restore if this order is discarded


class Made(NamedTuple):
    """A prefetched batch, the exception that it raised, or the future of a worker."""

    batch: Batch | Exception | Future[Batch]
    ends_pass: bool
    before: Draws

    def result(self) -> Batch:
        """Waits for the worker, if any, and returns the batch or raises its exception."""
        if isinstance(self.batch, Future):
            return self.batch.result()
        if isinstance(self.batch, Exception):
            raise self.batch
        return self.batch

    def error(self) -> BaseException | None:
        """Waits for the worker, if any, and returns the exception of the batch or None."""
        if isinstance(self.batch, Future):
            return self.batch.exception()
        return self.batch if isinstance(self.batch, Exception) else None


def _in_child(prefetcher: Prefetcher, _: bool) -> None:
    """Records in a forked child that threads and batches belong to the parent process."""
    prefetcher._is_inherited = True


class Prefetcher:
    """A queue of batches, which are made in the caller's thread or in other threads.

    Args:
        depth: number of waiting batches, and maximum number of threads.
        draws: function that returns the current positions of sampler and generator.
        go_to: function that restores earlier positions.
    """

    _lock = ForkLock(_in_child)
    _is_inherited = False  # True in a forked child until it uses the prefetcher

    #: Must be held during a draw, because a worker can draw again at the same time.
    choosing = ForkLock()

    def __init__(
        self,
        depth: int,
        draws: Callable[[], Draws],
        go_to: Callable[[Draws], None],
    ) -> None:
        self.depth = depth
        self.hand_over = HandOver(depth)
        self._draws = draws
        self._go_to = go_to
        self._queue: deque[Made] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._change: Future[Any] | None = None  # the last change, for which new orders wait
        self._began = self.hand_over.clock()  # start of the previous call
        self.ran_out = False  # True if the last delivered batch ended a pass

    def next(self, order: Callable[[bool], Order]) -> Batch:
        """Orders batches until the queue is full, and returns the oldest batch.

        Args:
            order: function that draws a batch. Its argument is True if the caller's thread makes
                the batch.
        """
        self._own()
        hand_over = self.hand_over
        began = hand_over.clock()
        with self._lock:
            orders = self._fill(order)
            oldest = self._queue.popleft()
            self.ran_out = oldest.ends_pass
        batch = oldest.result()
        with self._lock:
            self._count(began, orders)
        return batch

    def next_of_one_call(self, draw: Callable[[int], Batch | None], count: int) -> Batch | None:
        """Does the same as `next` if one native call draws and makes a batch.

        This is faster than `next`, because it creates no intermediate objects.

        Args:
            draw: function that makes a batch of a given size, or returns None.
            count: batch size.

        Returns:
            The oldest batch, or None if `next` must be called instead.
        """
        hand_over, queue = self.hand_over, self._queue
        if not hand_over.at_once or self._is_inherited or not torch.is_grad_enabled():
            return None
        began = hand_over.clock()
        with self._lock:
            if len(queue) != self.depth or queue[-1].ends_pass or self._change is not None:
                return None
            oldest = queue[0].batch
            if not isinstance(oldest, tuple):
                return None
            before = self._draws()
            batch = draw(count)
            if batch is None:
                self._go_to(before)
                return None
            queue.append(Made(batch, False, before))
            queue.popleft()
            self._count(began, 1)
        return oldest

    def submit(self, change: Callable[[], Any]) -> Future[Any]:
        """Calls ``change`` in a worker after the batches that were ordered so far.

        Batches that are ordered later wait for the change, and raise its exception.
        """
        self._own()
        with self._lock:
            before = self._futures()
            before += [] if self._change is None else [self._change]
            # Threads start calls in order. All calls for which this one waits have therefore been
            # started, so it cannot block the last free thread.
            self._change = self._threads().submit(_behind, before, change)
            return self._change

    def wait_for_changes(self) -> None:
        """Waits until all submitted changes are complete."""
        self._own()
        with self._lock:
            wait([] if self._change is None else [self._change])

    def settle(self) -> None:
        """Waits until all batches and changes are complete, and raises their exceptions."""
        self._own()
        with self._lock:
            change, self._change = self._change, None
            changes = [] if change is None else [change]
            wait(self._futures() + changes)
            for made in self._queue:
                made.result()
            for change in changes:
                change.result()

    def drop(self) -> None:
        """Discards undelivered batches, and waits until all workers have finished."""
        self._own()
        with self._lock:
            wait([future for future in self._futures() if not future.cancel()])
            self.wait_for_changes()
            self._forget(0)
            self.ran_out = False

    @contextmanager
    def waiting(self) -> Iterator[list[Made]]:
        """Yields the waiting batches, and blocks orders and deliveries while the block runs.

        If a batch has failed, this batch and all later batches are discarded.
        """
        self._own()
        with self._lock:
            for at, made in enumerate(self._queue):
                if made.error() is not None:
                    self._forget(at)
                    break
            yield [made._replace(batch=made.result()) for made in self._queue]

    def put_back(self, made: list[Made]) -> None:
        """Queues loaded batches, which are delivered next. The queue must be empty."""
        self._own()
        with self._lock:
            self._queue.extend(made)

    def close(self) -> None:
        """Discards all batches, and ends the threads. A later order would start new threads."""
        self.drop()
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __len__(self) -> int:
        """Returns the number of batches that are waiting or being made."""
        return len(self._queue)

    def _count(self, began: int, orders: int) -> None:
        """Records a call that began at ``began`` on the clock and ordered ``orders`` batches."""
        self.hand_over.took(self.hand_over.clock() - began, orders, began - self._began)
        self._began = began

    def _own(self) -> None:
        """Discards the threads and batches of the parent process, if this is a forked child."""
        if self._is_inherited:
            self._executor, self._change, self._is_inherited = None, None, False
            self._forget(0)

    def _forget(self, first: int) -> None:
        """Discards the batches from position ``first`` on, and reverts their draws."""
        if len(self._queue) > first:
            self._go_to(self._queue[first].before)
        while len(self._queue) > first:
            self._queue.pop()

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="shmbuffer-sample")
        return self._executor

    def _futures(self) -> list[Future[Any]]:
        """Returns the futures of the batches that workers are making."""
        return [one.batch for one in self._queue if isinstance(one.batch, Future)]

    def _fill(self, order: Callable[[bool], Order]) -> int:
        """Orders batches until the queue is full, and returns their number."""
        change, self._change = self._change, None
        if change is not None:
            change.result()
        if not self.hand_over.at_once:
            return self._ordered(order, at_once=False)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self._ordered(order, at_once=True)
        # A later call delivers the batch, possibly in another gradient mode. Batches are therefore
        # made in torch's default mode, which workers also use.
        with torch.inference_mode(False), torch.enable_grad():
            return self._ordered(order, at_once=True)

    def _ordered(self, order: Callable[[bool], Order], *, at_once: bool) -> int:
        make = self._at_once if at_once else self._by_a_worker
        before = len(self._queue)
        while len(self._queue) <= self.depth:
            if self._queue and self._queue[-1].ends_pass:
                break
            self._queue.append(make(order(at_once)))
        return len(self._queue) - before

    def _by_a_worker(self, order: Order) -> Made:
        return Made(self._threads().submit(order.make), order.ends_pass, order.before)

    def _at_once(self, order: Order) -> Made:
        try:
            made: Batch | Exception = order.make()
        except Exception as error:
            made = error
        except BaseException:  # such as Ctrl-C, which this call must raise immediately
            self._go_to(order.before)
            raise
        return Made(made, order.ends_pass, order.before)


def _behind(before: list[Future[Any]], change: Callable[[], Any]) -> Any:
    wait(before)
    return change()
