"""Batches that are made ahead, delivered in the order in which they were drawn.

                                   ┌─ at once, in the caller's thread ─┐
    sample()  ◀── oldest batch ◀── ┤ gather, collate, transform        ├ ◀── draw, in the
                                   └─ in a worker ─────────────────────┘     caller's thread

`HandOver` measures which way is faster. The way changes neither draws nor saves:

  * A call orders batches until ``depth`` of them wait besides the one that it delivers, and it
    draws each when it orders it. So a batch is drawn at the same call in both ways: from the same
    state of the generator and of the sampler's pass, and with the same priorities. A batch that is
    made at once is therefore not newer than one from a worker.
  * A save takes the batches that wait, and the positions before and after each draw. These are the
    same in both ways. A batch that failed waits as well, and its error is raised when it is due.
  * A resumed run thus begins with the same batches as the run that was not interrupted, and draws
    the next one at the same call. The times that they measure have no part in this.

The only difference is when the items of a drawn batch are read: at once, or soon after. This
matters only for items that are overwritten in between.

Orders stop at the end of a pass, so that items written before the next pass are part of it. Draws
that were never delivered can be taken back: a checkpoint, or another sampler, starts from the last
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

    position: Any  # of the sampler; see `Sampler._position`
    generator: torch.Generator | None
    state: torch.Tensor | None  # of the generator


class Order(NamedTuple):
    """A batch that was drawn."""

    make: Callable[[], Batch]  # gathers and transforms it; called once, in any thread
    ends_pass: bool
    before: Draws  # to go back to if this order and later ones are dropped


class Made(NamedTuple):
    """A batch that was made ahead; or its error, or the future of a worker that makes it."""

    batch: Batch | Exception | Future[Batch]
    ends_pass: bool
    before: Draws

    def result(self) -> Batch:
        """The batch, once it is made; raises its error."""
        if isinstance(self.batch, Future):
            return self.batch.result()
        if isinstance(self.batch, Exception):
            raise self.batch
        return self.batch

    def error(self) -> BaseException | None:
        """Why the batch could not be made, once a worker has tried."""
        if isinstance(self.batch, Future):
            return self.batch.exception()
        return self.batch if isinstance(self.batch, Exception) else None


def _in_child(prefetcher: Prefetcher, _: bool) -> None:
    """Note that threads and batches are the parent's."""
    prefetcher._is_inherited = True


class Prefetcher:
    """A queue of ``depth`` batches, made at once or in as many threads."""

    _lock = ForkLock(_in_child)
    _is_inherited = False  # by a child that has not used it yet

    #: Held while the sampler draws: a worker may draw again while the next batch is drawn.
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
        self._change: Future[Any] | None = None  # the last one, which new orders wait for
        self.ran_out = False  # the last delivered batch has ended a pass

    def next(self, order: Callable[[bool], Order]) -> Batch:
        """Orders the next batches, at once or for a worker, then waits for the oldest one."""
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
        """`next`, where one native call draws and makes a batch at once; None: call `next`.

        It is the same without the intermediate objects, for samplers without a position.
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
        """Makes a change after the batches ordered so far; later ones wait, and raise its error."""
        self._own()
        with self._lock:
            before = self._futures()
            before += [] if self._change is None else [self._change]
            # The threads take calls in order: the futures that it waits for have begun before it.
            self._change = self._threads().submit(_behind, before, change)
            return self._change

    def wait_for_changes(self) -> None:
        """Returns when submitted changes are done."""
        self._own()
        with self._lock:
            wait([] if self._change is None else [self._change])

    def settle(self) -> None:
        """Returns when all batches and changes are done; raises their errors."""
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
        """Drops batches that were not delivered; returns when no worker makes one."""
        self._own()
        with self._lock:
            wait([future for future in self._futures() if not future.cancel()])
            self.wait_for_changes()
            self._forget(0)
            self.ran_out = False

    @contextmanager
    def waiting(self) -> Iterator[list[Made]]:
        """Holds orders and deliveries; yields the next batches, up to one that has failed."""
        self._own()
        with self._lock:
            for at, made in enumerate(self._queue):
                if made.error() is not None:
                    self._forget(at)
                    break
            yield [made._replace(batch=made.result()) for made in self._queue]

    def put_back(self, made: list[Made]) -> None:
        """Deliver these batches next; there are no orders."""
        self._own()
        with self._lock:
            self._queue.extend(made)

    def close(self) -> None:
        """Drops everything and ends the threads. The next batch would start them again."""
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
        if self._is_inherited:
            self._executor, self._change, self._is_inherited = None, None, False
            self._forget(0)

    def _forget(self, first: int) -> None:
        """Takes back the orders from ``first`` on."""
        if len(self._queue) > first:
            self._go_to(self._queue[first].before)
        while len(self._queue) > first:
            self._queue.pop()

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="shmbuffer-sample")
        return self._executor

    def _futures(self) -> list[Future[Any]]:
        """The futures of the batches that workers make."""
        return [one.batch for one in self._queue if isinstance(one.batch, Future)]

    def _fill(self, order: Callable[[bool], Order]) -> int:
        """Order the batches that are missing; returns how many."""
        change, self._change = self._change, None
        if change is not None:
            change.result()
        if not self.hand_over.at_once:
            return self._ordered(order, at_once=False)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self._ordered(order, at_once=True)
        # A later call delivers the batch, perhaps in another mode. Workers have the default one.
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
        except BaseException:  # Ctrl-C belongs to this call
            self._go_to(order.before)
            raise
        return Made(made, order.ends_pass, order.before)


def _behind(before: list[Future[Any]], change: Callable[[], Any]) -> Any:
    wait(before)
    return change()
