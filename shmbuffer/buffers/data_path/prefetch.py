"""Prefetches batches and delivers them in the order in which they were drawn.

                                   ┌─ at once, in the caller's thread ─┐
    sample()  ◀── oldest batch ◀── ┤ gather, collate, transform        ├ ◀── draw, in the
                                   └─ in a worker ─────────────────────┘     caller's thread

`HandOver` measures which mode is faster. The mode affects neither draws nor saves:

  * A call orders batches until ``depth`` of them wait in addition to the one that it delivers. Each
    batch is drawn when it is ordered. The same call therefore draws a batch in both modes, from
    the same state of generator and sampler and with the same priorities. A batch that is made at
    once is not newer than one from a worker.
  * A save contains the waiting batches and the positions before and after each draw. Both are
    independent of the mode. A batch that failed also waits, and its error is raised when the
    batch is due.
  * A resumed run thus begins with the same batches as an uninterrupted run, and draws the next
    batch at the same call. Measured times have no effect on this.

The modes differ only in when the items of a drawn batch are read: at once or shortly afterwards.
This matters only for items that are overwritten in between.

Orders stop at the end of a pass, so that items written before the next pass are included in it.
Draws that were never delivered can be reverted: a checkpoint or a new sampler starts from the last
delivered batch.
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
    """The position of a buffer's draws."""

    position: Any  # position of the sampler; see `Sampler._position`
    generator: torch.Generator | None
    state: torch.Tensor | None  # state of the generator


class Order(NamedTuple):
    """A batch whose items were drawn."""

    make: Callable[[], Batch]  # gathers and transforms the batch; called once, in any thread
    ends_pass: bool
    before: Draws  # position to return to if this and later orders are discarded


class Made(NamedTuple):
    """A prefetched batch, its error, or the future of the worker that makes it."""

    batch: Batch | Exception | Future[Batch]
    ends_pass: bool
    before: Draws

    def result(self) -> Batch:
        """Returns the batch once it is complete; raises its error."""
        if isinstance(self.batch, Future):
            return self.batch.result()
        if isinstance(self.batch, Exception):
            raise self.batch
        return self.batch

    def error(self) -> BaseException | None:
        """Waits for the worker, if any, and returns the error of the batch or None."""
        if isinstance(self.batch, Future):
            return self.batch.exception()
        return self.batch if isinstance(self.batch, Exception) else None


def _in_child(prefetcher: Prefetcher, _: bool) -> None:
    """Notes after a fork that threads and batches belong to the parent process."""
    prefetcher._is_inherited = True


class Prefetcher:
    """A queue of ``depth`` batches, made in the caller's thread or in ``depth`` threads."""

    _lock = ForkLock(_in_child)
    _is_inherited = False  # True in a child process that has not used it yet

    #: Held while the sampler draws, because a worker may draw again at the same time.
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
        self._change: Future[Any] | None = None  # the last change; new orders wait for it
        self.ran_out = False  # whether the last delivered batch ended a pass

    def next(self, order: Callable[[bool], Order]) -> Batch:
        """Orders the next batches, at once or from workers, then waits for the oldest batch."""
        self._own()
        hand_over = self.hand_over
        began = hand_over.clock()
        with self._lock:
            orders = self._fill(order)
            oldest = self._queue.popleft()
            self.ran_out = oldest.ends_pass
        batch = oldest.result()
        with self._lock:
            hand_over.took(hand_over.clock() - began, orders)
        return batch

    def next_of_one_call(self, draw: Callable[[int], Batch | None], count: int) -> Batch | None:
        """Does the same as `next` with one native call that draws and makes a batch at once.

        Returns None if `next` must be called instead. This method creates no intermediate objects
        and is intended for samplers without a position.
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
            hand_over.took(hand_over.clock() - began, 1)
        return oldest

    def submit(self, change: Callable[[], Any]) -> Future[Any]:
        """Applies a change after the batches that have been ordered so far.

        Batches that are ordered later wait for the change and raise its error.
        """
        self._own()
        with self._lock:
            before = self._futures()
            before += [] if self._change is None else [self._change]
            # Threads start calls in order, so all futures that this call waits for have started.
            self._change = self._threads().submit(_behind, before, change)
            return self._change

    def wait_for_changes(self) -> None:
        """Waits until all submitted changes are complete."""
        self._own()
        with self._lock:
            wait([] if self._change is None else [self._change])

    def settle(self) -> None:
        """Waits until all batches and changes are complete, and raises their errors."""
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
        """Discards undelivered batches, and waits until no worker is making one."""
        self._own()
        with self._lock:
            wait([future for future in self._futures() if not future.cancel()])
            self.wait_for_changes()
            self._forget(0)
            self.ran_out = False

    @contextmanager
    def waiting(self) -> Iterator[list[Made]]:
        """Blocks orders and deliveries; yields the next batches up to a failed one."""
        self._own()
        with self._lock:
            for at, made in enumerate(self._queue):
                if made.error() is not None:
                    self._forget(at)
                    break
            yield [made._replace(batch=made.result()) for made in self._queue]

    def put_back(self, made: list[Made]) -> None:
        """Queues these batches to be delivered next. There must be no orders."""
        self._own()
        with self._lock:
            self._queue.extend(made)

    def close(self) -> None:
        """Discards everything and ends the threads. The next batch would start them again."""
        self.drop()
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __len__(self) -> int:
        """Returns the number of batches that are being made or waiting."""
        return len(self._queue)

    def _own(self) -> None:
        """Discards the threads and batches of the parent process after a fork."""
        if self._is_inherited:
            self._executor, self._change, self._is_inherited = None, None, False
            self._forget(0)

    def _forget(self, first: int) -> None:
        """Reverts the orders with index ``first`` and later."""
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
        """Orders the missing batches; returns their number."""
        change, self._change = self._change, None
        if change is not None:
            change.result()
        if not self.hand_over.at_once:
            return self._ordered(order, at_once=False)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self._ordered(order, at_once=True)
        # A later call, possibly in another mode, delivers the batch. Workers use the default mode.
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
        except BaseException:  # such as Ctrl-C, which belongs to this call
            self._go_to(order.before)
            raise
        return Made(made, order.ends_pass, order.before)


def _behind(before: list[Future[Any]], change: Callable[[], Any]) -> Any:
    wait(before)
    return change()
