"""What limits the buffers of an ensemble limits its samples, each row by its own buffer's limiter.

    which buffers ──▶ every row waits until it may be drawn, and counts
                  ──▶ rows out of queues are taken, the others drawn ──▶ the sample

A sample is made as a whole or counts for nothing. What was taken out of one queue while another
one had not enough is kept for the next sample of this handle.
"""

from __future__ import annotations

import os
from typing import Any

from shmbuffer.replay.buffers.drawing import Turn
from shmbuffer.replay.buffers.prefetch import Batch
from shmbuffer.replay.buffers.routing import RoutedWrites
from shmbuffer.replay.storages.ensemble import local

Row = tuple[int, Any, dict[Any, Any]]
"""The number of a buffer, items of it, and what is known about them."""


class Turns(RoutedWrites):
    """Samples of several buffers, each in its turn."""

    #: By process, buffer and number of items.
    _kept: dict[tuple[int, int, int], list[Batch]]

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
            return self._joined(self._in_turns(chosen, turns, share))
        except BaseException:
            for turn in turns:
                if turn is not None:
                    turn.give_back()
            raise

    def _in_turns(self, chosen: list[int], turns: list[Turn | None], share: int) -> list[Row]:
        """Those of queues come first: they may have to be waited for."""
        found: dict[int, Batch] = {}
        try:
            for row, (at, turn) in enumerate(zip(chosen, turns, strict=True)):
                if turn is not None and turn.is_queue:
                    kept = self._kept.get((os.getpid(), at, share))
                    batch = kept.pop(0) if kept else self._rbs[at]._taken(turn.ring, share)
                    if batch is not None:
                        found[row] = batch
            drawn = {
                row: self._drawn(at, share) for row, at in enumerate(chosen) if row not in found
            }
        except BaseException:
            for row, batch in found.items():
                self._kept.setdefault((os.getpid(), chosen[row], share), []).append(batch)
            raise
        both = found | drawn
        return [(at, *both[row]) for row, at in enumerate(chosen)]

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
