"""Priorities on their way to several shards, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.distributed.shards.batches import Batches
from shmbuffer.distributed.shards.members import Member, Members, told

MAX_SENT = 64
"""Messages with priorities that may be on their way to one shard."""


class ShardedUpdate:
    """How many priorities were applied, were stale, and were lost.

    They are on their way to the shards of other nodes when it is given out. To read a number waits
    for the answers, at most as long as a shard may take to answer.
    """

    def __init__(
        self, members: Members, known: tuple[int, int, int], sent: list[tuple[Member, Any, int]]
    ) -> None:
        self._members, self._known, self._sent = members, known, sent

    @property
    def applied(self) -> int:
        """Items whose priority was set."""
        return self._settled()[0]

    @property
    def stale(self) -> int:
        """Items that had been written over since they were sampled; theirs was dropped."""
        return self._settled()[1]

    @property
    def lost(self) -> int:
        """Items of shards that are not there, or did not answer. It does no harm to repeat them."""
        return self._settled()[2]

    def _settled(self) -> tuple[int, int, int]:
        sent, self._sent = self._sent, []
        counts = {ref: count for _, ref, count in sent}
        applied, stale, lost = self._known
        lost += sum(counts.values())
        for member, ref, message in self._members.answers((one, ref) for one, ref, _ in sent):
            (more, dropped, gone), totals = told(message)
            member.learn(totals, None)
            applied, stale, lost = applied + more, stale + dropped, lost + gone - counts[ref]
        self._known = applied, stale, lost
        return self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._settled())

    def __repr__(self) -> str:
        applied, stale, lost = self._settled()
        return f"{type(self).__name__}(applied={applied}, stale={stale}, lost={lost})"


class Updates:
    """Gives each shard the priorities of its own items."""

    def __init__(self, members: Members, batches: Batches) -> None:
        self._members, self._batches = members, batches

    def send(
        self,
        shards: NDArray[np.int64],
        index: NDArray[np.int64],
        raw: NDArray[np.float64],
        tickets: NDArray[np.int64] | None,
    ) -> ShardedUpdate:
        """Set priorities: at once on the own node, by one message to each other shard."""
        if len(raw):
            self._batches.largest = max(self._batches.largest, float(raw.max()))
        members, sent = self._members.by_identity(), []
        applied = stale = lost = 0
        for number in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == number)
            member = members.get(number)
            if member is None or not member.lives:
                lost += len(rows)
                continue
            generation = None if tickets is None else tickets[rows]
            found = member.update(number, index[rows], raw[rows], generation)
            if found is None:
                sent.append((member, member.updates[-1], len(rows)))
                self._members.bound_updates(member, MAX_SENT)
            else:
                applied, stale = applied + found[0], stale + found[1]
        return ShardedUpdate(self._members, (applied, stale, lost), sent)
