"""What is chosen out of an index, for a consumer: each item is given once among all its learners.

    index ──choose──▶ items ──Consumer.claim──▶ those that nobody else has
      ▲                                              │ the others are out of the index
      └──standings, once a second and when it is short: what ended leases have given back

What cannot be given any more is acknowledged without a delivery, so that writers do not wait for
it: items of lost groups, the rest of a group of which somebody has acknowledged a part, and what is
too stale.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuffer.memory import slots as slot_words
from shmbuffer.memory.ledger import DONE, HELD_HERE, TO_GIVE, Taken

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmbuffer.memory import Ring
    from shmbuffer.memory.consumers import Consumer
    from shmbuffer.memory.ledger import Standings
    from shmbuffer.numpy.arrays import Flags, Ints
    from shmbuffer.replay.samplers.labelled.index import LabelIndex

_EVERY_S = 1.0  # between two looks at what others have given back


class Claims:
    """The index of a sampler, as one consumer's learner sees it; while the index's lock is held.

    Args:
        index: of the sampler.
        whole: items are of groups, each of which is taken whole.
    """

    def __init__(self, index: LabelIndex, *, whole: bool) -> None:
        self._index, self._whole = index, whole
        self._table: Any = None
        self._next_s = 0.0
        self._ends: dict[int, float] = {}  # of leases of our own that end

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "_ends": {}}

    def follow(self, ring: Ring, consumer: Consumer, *, now: bool = False) -> None:
        """Leaves out of the index what was given; behind each look of it.

        Args:
            ring: of the index.
            consumer: whose.
            now: also where that was done just before.
        """
        table = self._index.table
        if self._whole:
            lost = np.frombuffer(table.lost(), np.int64)
            if len(lost):
                self.drop(ring, consumer, lost)
        if not now and table is self._table and time.monotonic() < self._next_s:
            return
        standings = consumer.standings()
        self._table, self._next_s = table, time.monotonic() + _EVERY_S
        # Of items that the index has not been told of yet, nothing follows for it.
        known = standings.tickets < self._index.head
        over = self._ended(standings)
        free = np.flatnonzero(known & ((standings.states == TO_GIVE) | over))
        given = np.flatnonzero(known & (standings.states > TO_GIVE) & ~over)
        if not self._whole:
            self._drop_of_index(given[self._index.kins(given) >= 0])
            back = free[self._index.kins(free) < 0]
            if len(back):
                self._index.tell(ring, back)
            return
        table.take(free.ctypes.data, len(free), False)
        table.take(given.ctypes.data, len(given), True)
        done = self._index.kins(given[standings.states[given] == DONE])
        rest = free[np.isin(self._index.kins(free), done[done >= 0])]
        if len(rest):
            consumer.drop(rest, standings.tickets[rest])

    def _ended(self, standings: Standings) -> Flags:
        """Slots that this learner holds, under a lease that has ended."""
        here, now_s = standings.states == HELD_HERE, time.monotonic()
        held = {*standings.leases[here].tolist()} if self._ends else set()
        self._ends = {lease: end_s for lease, end_s in self._ends.items() if lease in held}
        ended = [lease for lease, end_s in self._ends.items() if end_s <= now_s]
        over: Flags = here & np.isin(standings.leases, np.array(ended, np.uint64))
        return over

    def drop(self, ring: Ring, consumer: Consumer, elements: Ints) -> None:
        """Has them acknowledged without a delivery."""
        tickets, there = self._tickets(ring, elements)
        if there.any():
            consumer.drop(elements[there], tickets[there])
        if not self._whole:
            self._drop_of_index(elements)

    def take(
        self,
        ring: Ring,
        consumer: Consumer,
        wanted: int,
        choose: Callable[[int], Ints],
        lease_s: float,
        size: int = 1,
    ) -> tuple[list[Taken], int]:
        """Takes what ``choose`` chooses, until it has what is wanted.

        Args:
            ring: of the index.
            consumer: whose.
            wanted: items, or groups.
            choose: elements of so many more, ``[n]`` or ``[n, size]``; fewer: there are no more.
            lease_s: see `Consumer.take`.
            size: items of a group.

        Returns:
            Each part under its lease, and how many were there. Where those are fewer, no parts,
            unless the others cannot be written before these are done.
        """
        given = ring, consumer
        found = self._take(*given, wanted, choose, lease_s)
        there = sum(len(part.slots) for part in found) // size
        if there < wanted:  # they must not be ours while it is asked who has them
            self.give_back(*given, found)
            is_stuck = there > 0 and consumer.is_stuck((wanted - there) * size)
            found = self._take(*given, there, choose, lease_s) if is_stuck else []
        return found, there

    def _take(
        self,
        ring: Ring,
        consumer: Consumer,
        wanted: int,
        choose: Callable[[int], Ints],
        lease_s: float,
    ) -> list[Taken]:
        found: list[Taken] = []
        tried_again = False
        try:
            while wanted:
                elements = choose(wanted)
                if not len(elements):
                    if tried_again:
                        break
                    tried_again = True
                    self.follow(ring, consumer, now=True)
                    continue
                groups = elements if self._whole else elements[:, None]
                tickets, there = self._tickets(ring, groups)
                whole = there.all(1)
                kept = np.zeros(len(groups), np.bool_)
                if whole.any():
                    sizes = np.full(int(whole.sum()), groups.shape[1], np.int64)
                    flat = np.ascontiguousarray(groups[whole].reshape(-1))
                    theirs = np.ascontiguousarray(tickets[whole].reshape(-1))
                    taken, lease = consumer.claim(flat, theirs, sizes, lease_s)
                    kept[whole] = taken
                    if lease:
                        items = groups[kept].reshape(-1), tickets[kept].reshape(-1)
                        found.append(Taken(*items, lease))
                        if lease_s < math.inf:
                            self._ends[lease] = time.monotonic() + lease_s
                if self._whole:
                    first = np.ascontiguousarray(groups[:, 0])
                    self._index.table.take(first.ctypes.data, len(first), True)
                else:
                    self._drop_of_index(np.ascontiguousarray(elements))
                wanted -= int(kept.sum())
        except BaseException:
            self.give_back(ring, consumer, found)
            raise
        return found

    def give_back(self, ring: Ring, consumer: Consumer, parts: list[Taken]) -> None:
        """What was taken is given to others at once, or to this learner again."""
        for part in parts:
            consumer.give_back(part.lease)
            if self._whole:
                self._index.table.take(part.slots.ctypes.data, len(part.slots), False)
            else:
                self._index.tell(ring, part.slots)

    def _drop_of_index(self, elements: Ints) -> None:
        elements = np.ascontiguousarray(elements)
        self._index.table.drop(elements.ctypes.data, len(elements))
        self._index.settle()

    def _tickets(self, ring: Ring, elements: Ints) -> tuple[Ints, Flags]:
        """Tickets, and whether that is the item of the index."""
        words = ring.live.words[elements]
        tickets = slot_words.tickets(words)
        return tickets, slot_words.committed(words) & (tickets < self._index.head)


def together(parts: list[Taken]) -> tuple[Ints, Ints, Ints]:
    """Slots, tickets and leases of all items, int64 ``[n]`` each."""
    none = [np.empty(0, np.int64)]
    return (
        np.concatenate([part.slots for part in parts] or none),
        np.concatenate([part.tickets for part in parts] or none),
        np.concatenate([np.full(len(part.slots), part.lease) for part in parts] or none),
    )
