"""Applies the rate limiter of each buffer to the rows of a sample that come from this buffer.

    for each row:  wait until the rate limiter of its buffer admits the row, and count it
    then:          draw all rows, or take them out of the buffer's queue ──▶ the sample

A sample that fails is not counted. Items that it has already taken out of a queue are kept for the
next sample of the same handle.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.items.limits import Turn
from shmbuffer.memory import Ring

Shares = Sequence[tuple[int, int]]
"""The rows of a sample in order, as pairs of a buffer number and the row's number of items."""

Row = tuple[int, Any, dict[Any, Any]]
"""A buffer number, items of that buffer, and their info."""


class _Taken(NamedTuple):
    """Items that were taken out of a queue."""

    share: int  # number of items
    batch: Batch


class Turns:
    """Draws samples from several buffers once the rate limiters of all buffers admit them."""

    def __init__(self, buffers: Sequence[ReplayBuffer]) -> None:
        self._buffers = buffers
        #: Items of failed samples, oldest first, keyed by pid and buffer number.
        self._kept: dict[tuple[int, int], deque[_Taken]] = {}

    def are_needed(self) -> bool:
        """True if at least one of the buffers has a rate limiter or a queue."""
        return any(rb.plan.limits.hold for rb in self._buffers)

    def sample(
        self,
        shares: Shares,
        draw: Callable[[int, int], Row],
        join: Callable[[list[Row]], Batch],
        least: Mapping[int, int],
    ) -> Batch:
        """Waits until all rows are admitted, then draws and joins the rows.

        Args:
            shares: buffer and number of items of each row.
            draw: function that draws a row from a buffer that is not a queue.
            join: function that joins the rows into a sample.
            least: number of items that a buffer must contain, keyed by buffer number.
        """
        turns: list[Turn | None] = []
        taken: list[tuple[int, _Taken]] = []
        try:
            for at, share in shares:
                turns.append(self._buffers[at].plan.limits.turn(share, least.get(at, 0)))
            queues = {row: turn.ring for row, turn in enumerate(turns) if turn and turn.is_queue}
            found = dict[int, Row]()
            # Rows of queues are drawn last, because they cannot be put back.
            for row in sorted(range(len(shares)), key=queues.__contains__):
                at, share = shares[row]
                batch = self._out_of_queue(at, queues[row], share) if row in queues else None
                if batch is not None:
                    taken.append((at, _Taken(share, batch)))
                found[row] = draw(at, share) if batch is None else (at, *batch)
            return join([found[row] for row in range(len(shares))])
        except BaseException:
            for at, one in reversed(taken):
                self._kept.setdefault((os.getpid(), at), deque()).appendleft(one)
            for turn in turns:
                if turn is not None:
                    turn.give_back()
            raise

    def _out_of_queue(self, at: int, ring: Ring, share: int) -> Batch | None:
        """Returns a row from a queue, and uses the items of a failed sample first.

        Args:
            at: number of the buffer.
            ring: ring of the buffer.
            share: number of items.

        Returns:
            The row, or None if the buffer is no longer a queue.

        Raises:
            RuntimeError: a failed sample has taken a different number of items.
        """
        kept = self._kept.get((os.getpid(), at), deque())
        try:
            first = kept.popleft()  # no check before, because another thread may pop the last item
        except IndexError:
            return drawing.take_batch(self._buffers[at].plan, ring, share)
        if first.share == share:
            return first.batch
        kept.appendleft(first)
        raise RuntimeError(
            f"an earlier sample() failed after it took {first.share} items from the queue of "
            f"buffer {at}; the next sample must use exactly these items, but this one needs "
            f"{share}; call sample() with the batch size of the failed call"
        )

    def forget(self) -> None:
        """Discards the items of failed samples, because the buffers were emptied."""
        self._kept.clear()

    def __reduce__(self) -> Any:
        return Turns, (self._buffers,)
