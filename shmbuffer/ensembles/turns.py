"""Applies the rate limiters of several buffers, each to the rows of its own buffer.

    rows ──▶ each waits until its buffer admits it, and counts
         ──▶ all are drawn; rows of queues come out of their queue ──▶ the sample

A sample that fails is not counted. Items that it has already removed from a queue are kept for the
next sample of this handle.
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
"""The rows of a sample in order, as pairs of a buffer number and its number of items."""

Row = tuple[int, Any, dict[Any, Any]]
"""A buffer number, items of that buffer, and their info."""


class _Taken(NamedTuple):
    """Items that were removed from a queue."""

    share: int
    batch: Batch


class Turns:
    """Draws samples from several buffers when each buffer admits its rows."""

    def __init__(self, buffers: Sequence[ReplayBuffer]) -> None:
        self._buffers = buffers
        #: Rows that were kept after a failure, by process and buffer, oldest first.
        self._kept: dict[tuple[int, int], deque[_Taken]] = {}

    def are_needed(self) -> bool:
        """True if one of the buffers is limited."""
        return any(rb.plan.limits.hold for rb in self._buffers)

    def sample(
        self,
        shares: Shares,
        draw: Callable[[int, int], Row],
        join: Callable[[list[Row]], Batch],
        least: Mapping[int, int],
    ) -> Batch:
        """Waits until all rows are admitted, then draws and joins them.

        Args:
            shares: the rows.
            draw: draws a row that does not come from a queue.
            join: joins the rows to a sample.
            least: for some buffers, the number of items to wait for.
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
        """Returns a row, kept or new; None if the buffer is no longer a queue."""
        kept = self._kept.get((os.getpid(), at), deque())
        try:
            first = kept.popleft()  # several threads may share this queue
        except IndexError:
            return drawing.take_batch(self._buffers[at].plan, ring, share)
        if first.share == share:
            return first.batch
        kept.appendleft(first)
        raise RuntimeError(
            f"a failed sample has already taken {first.share} items out of the queue of buffer "
            f"{at}. They are kept for the next sample, but this one needs {share}; sample with the "
            "earlier batch size first"
        )

    def forget(self) -> None:
        """Discards the kept items, because the buffers were emptied."""
        self._kept.clear()

    def __reduce__(self) -> Any:
        return Turns, (self._buffers,)
