"""What limits the buffers of an ensemble limits its samples, each row by its own buffer's limiter.

    which buffers ──▶ every row waits until it may be drawn, and counts
                  ──▶ rows are drawn ──▶ those of queues are taken ──▶ the sample

A sample is made as a whole or counts for nothing. What was taken out of a queue for a sample that
then fails is kept for the next one of this handle.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from shmbuffer.replay.buffers.drawing import Turn
from shmbuffer.replay.buffers.prefetch import Batch
from shmbuffer.replay.buffers.routing import RoutedWrites
from shmbuffer.replay.storages.ensemble import local

if TYPE_CHECKING:
    from shmbuffer.memory import Ring

Row = tuple[int, Any, dict[Any, Any]]
"""The number of a buffer, items of it, and what is known about them."""


class _Taken(NamedTuple):
    """So many items of a queue, which nobody else gets any more."""

    share: int
    batch: Batch


class Turns(RoutedWrites):
    """Samples of several buffers, each in its turn."""

    #: Rows by process and buffer, the oldest first.
    _kept: dict[tuple[int, int], deque[_Taken]]

    def _joined(self, rows: list[Row]) -> Batch:
        """A sample of these rows."""
        raise NotImplementedError

    def _next(self, count: int) -> Batch:
        """The next batch; where one of the buffers is limited it is not made ahead."""
        if not any(rb._limiter_version[0] and rb._limited for rb in self._rbs):
            return super()._next(count)
        self._drop_prefetched()
        chosen = self._sampler.shares(self._storage, count)
        share, turns = count // len(chosen), list[Turn | None]()
        try:
            for at in chosen:
                turns.append(self._rbs[at]._turn(share))
            return self._in_turns(chosen, turns, share)
        except BaseException:
            for turn in turns:
                if turn is not None:
                    turn.give_back()
            raise

    def _in_turns(self, chosen: list[int], turns: list[Turn | None], share: int) -> Batch:
        """Rows of queues come last: nobody can put them back."""
        queues = {row: turn.ring for row, turn in enumerate(turns) if turn and turn.is_queue}
        found, taken = dict[int, Batch](), list[tuple[int, Batch]]()
        try:
            for row in sorted(range(len(chosen)), key=queues.__contains__):
                at = chosen[row]
                batch = self._out_of_queue(at, queues[row], share) if row in queues else None
                if batch is not None:
                    taken.append((at, batch))
                found[row] = self._drawn(at, share) if batch is None else batch
            return self._joined([(at, *found[row]) for row, at in enumerate(chosen)])
        except BaseException:
            for at, batch in reversed(taken):
                kept = self._kept.setdefault((os.getpid(), at), deque())
                kept.appendleft(_Taken(share, batch))
            raise

    def _out_of_queue(self, at: int, ring: Ring, share: int) -> Batch | None:
        """A row, of what was kept if there is some; None if it is no queue any more."""
        kept = self._kept.get((os.getpid(), at), deque())
        try:
            first = kept.popleft()  # threads may share it
        except IndexError:
            return self._rbs[at]._taken(ring, share)
        if first.share == share:
            return first.batch
        kept.appendleft(first)
        raise RuntimeError(
            f"a sample that failed has taken {first.share} items out of the queue of buffer {at}, "
            f"which are kept for the next sample, and {share} are wanted of it; sample with the "
            "earlier batch size first"
        )

    def _drawn(self, at: int, share: int) -> Batch:
        """A row as the sampler of its buffer chooses it."""
        storage = self._rbs[at]._storage
        index, known = self._sampler._draw(at, storage, share)
        return self._rbs[at]._chosen(local({"index": index}, storage), dict(known))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget the items of every buffer; see `ReplayBuffer.empty`.

        Raises:
            RuntimeError: the writer of one is an `ImmutableDatasetWriter`; nothing was changed.
        """
        super().empty(empty_write_count)
        self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": {}}
