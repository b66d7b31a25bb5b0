"""The rate limiters of an ensemble's buffers, each applied to the rows of its buffer.

    chosen buffers ──▶ every row waits until it may be drawn, and counts
                   ──▶ rows are drawn ──▶ those of queues are taken ──▶ the sample

A sample that fails does not count. Items that it has taken out of a queue are kept for the next
sample of this handle.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmbuffer.buffers import ReplayBuffer
from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.items.limits import Turn
from shmbuffer.memory import Ring

Row = tuple[int, Any, dict[Any, Any]]
"""The number of a buffer, items of it, and their info."""


class _Taken(NamedTuple):
    """Items taken out of a queue."""

    share: int
    batch: Batch


class Turns:
    """Samples of several buffers, once each buffer admits its rows."""

    def __init__(self, buffers: Sequence[ReplayBuffer]) -> None:
        self._buffers = buffers
        #: Kept rows by process and buffer, oldest first.
        self._kept: dict[tuple[int, int], deque[_Taken]] = {}

    def are_needed(self) -> bool:
        """True if one of the buffers is limited."""
        return any(rb.plan.limits.hold for rb in self._buffers)

    def sample(
        self,
        chosen: list[int],
        share: int,
        draw: Callable[[int], Row],
        join: Callable[[list[Row]], Batch],
    ) -> Batch:
        """A sample, once all of its rows are admitted."""
        turns: list[Turn | None] = []
        taken: list[tuple[int, Batch]] = []
        try:
            for at in chosen:
                turns.append(self._buffers[at].plan.limits.turn(share))
            queues = {row: turn.ring for row, turn in enumerate(turns) if turn and turn.is_queue}
            found = dict[int, Row]()
            # Rows of queues come last: they cannot be put back.
            for row in sorted(range(len(chosen)), key=queues.__contains__):
                at = chosen[row]
                batch = self._out_of_queue(at, queues[row], share) if row in queues else None
                if batch is not None:
                    taken.append((at, batch))
                found[row] = draw(at) if batch is None else (at, *batch)
            return join([found[row] for row in range(len(chosen))])
        except BaseException:
            for at, batch in reversed(taken):
                kept = self._kept.setdefault((os.getpid(), at), deque())
                kept.appendleft(_Taken(share, batch))
            for turn in turns:
                if turn is not None:
                    turn.give_back()
            raise

    def _out_of_queue(self, at: int, ring: Ring, share: int) -> Batch | None:
        """A row, kept or new; None if it is no queue any more."""
        kept = self._kept.get((os.getpid(), at), deque())
        try:
            first = kept.popleft()  # threads may share it
        except IndexError:
            return drawing.taken(self._buffers[at].plan, ring, share)
        if first.share == share:
            return first.batch
        kept.appendleft(first)
        raise RuntimeError(
            f"a sample that failed has taken {first.share} items out of the queue of buffer {at}, "
            f"which are kept for the next sample, and this one needs {share}; sample with the "
            "earlier batch size first"
        )

    def forget(self) -> None:
        """The buffers were emptied."""
        self._kept.clear()

    def __reduce__(self) -> Any:
        return Turns, (self._buffers,)
