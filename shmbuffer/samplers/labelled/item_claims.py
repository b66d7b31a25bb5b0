"""What is chosen out of an index, for a consumer: each item is given once among all its learners.

    index ──choose──▶ items ──Consumer.claim──▶ those that nobody else has
      ▲                                              │ the others are out of the index
      ├──returned, where it is short: what ended leases have given back
      └──standings, once a second at most: what others were given, too

What cannot be given any more is acknowledged without a delivery, so that writers do not wait for
it: items of lost groups, the rest of a group of which somebody has acknowledged a part, and what is
too stale. So is a group that holds writers up and can never be whole (`Claims.unblock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer, Oldest
from shmbuffer.memory.flow.sides import ALONE_S
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.ledger import DONE, HELD_HERE, LEASES, TO_GIVE, Taken
from shmbuffer.samplers.labelled.index import LabelIndex

_EVERY_S = 1.0  # between two looks at what others have: at least so long, and so many times as
_RARELY = 5  # long as a look takes


class ItemClaims:
    """The index of a sampler, as one consumer's learner sees it; while the index's lock is held.

    Args:
        index: of the sampler.
        whole: items are of groups, each of which is taken whole.
    """

    def __init__(self, index: LabelIndex, *, whole: bool) -> None:
        self._index, self._whole = index, whole
        self._table: Any = None
        self._next_s = 0.0
        self._known = np.zeros(LEASES, np.uint64)  # leases whose items are in the index again
        self._held_up: tuple[int, float] | None = None  # the head, and since when it stands

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "_held_up": None}

    def follow(self, ring: Ring, consumer: Consumer, *, now: bool = False) -> None:
        """Leaves out of the index what was given; behind each look of it.

        Args:
            ring: of the index.
            consumer: whose.
            now: also what came back just before.
        """
        table = self._index.table
        if self._whole:
            lost = np.frombuffer(table.lost(), np.int64)
            if len(lost):
                self.drop(ring, consumer, lost)
        is_new = table is not self._table
        if is_new:
            self._known[:] = 0
        began_s = time.monotonic()
        if is_new or began_s >= self._next_s:
            self._look(ring, consumer, is_new=is_new)
            ended_s = time.monotonic()
            self._next_s = ended_s + max(_EVERY_S, _RARELY * (ended_s - began_s))
        elif not now:
            return
        slots, tickets = consumer.returned(self._known)
        self._put_back(ring, slots[tickets < self._index.head])

    def _look(self, ring: Ring, consumer: Consumer, *, is_new: bool) -> None:
        """At every item: what others were given, and what nobody has."""
        table, standings = self._index.table, consumer.standings()
        self._table = table
        # Of items that the index has not been told of yet, nothing follows for it.
        known, states = standings.tickets < self._index.head, standings.states
        # What this learner holds was left out when it was taken, and comes back with its lease.
        here = states == HELD_HERE
        free = np.flatnonzero(known & (states == TO_GIVE))
        given = np.flatnonzero(known & (states > TO_GIVE) & (is_new | ~here))
        if not is_new:  # a new table has all of them
            self._put_back(ring, free)
        if not self._whole:
            self._drop_of_index(given[self._index.kins(given) >= 0])
            return
        table.take(address(given), len(given), True)
        done = self._index.kins(given[states[given] == DONE])
        done = done[done >= 0]
        rest = free[np.isin(self._index.kins(free), done)] if len(done) else done
        if len(rest):
            consumer.drop(rest, standings.tickets[rest])

    def _put_back(self, ring: Ring, slots: Ints) -> None:
        """Items of these slots may be chosen again."""
        if self._whole:
            self._index.table.take(address(slots), len(slots), False)
        elif len(back := slots[self._index.kins(slots) < 0]):
            self._index.tell(ring, back)

    def unblock(self, storage: Any, ring: Ring, consumer: Consumer) -> bool:
        """Gives up the group of the oldest item, where it can never be whole.

        Its other items have no room before that one is done; or everybody who writes waits for it,
        for long enough that a writer which died would be there again. Whether it has given one up.
        """
        oldest = consumer.oldest_to_give()
        if oldest is None:
            self._held_up = None
            return False
        self._index.look(storage)  # what was committed until then
        missing = self._index.table.missing(oldest.slot)
        if not missing or self._index.head != oldest.head:
            return False
        if missing <= oldest.room and not self._is_held_up(consumer, oldest):
            return False
        self._index.table.give_up_one(oldest.slot)
        self.follow(ring, consumer)
        return True

    def _is_held_up(self, consumer: Consumer, oldest: Oldest) -> bool:
        if not (oldest.waits and consumer.all_writers_wait()):
            self._held_up = None
            return False
        now_s = time.monotonic()
        if self._held_up is None or self._held_up[0] != oldest.head:
            self._held_up = oldest.head, now_s
        return now_s - self._held_up[1] >= ALONE_S

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
        wanted: tuple[int, int],
        counted: Callable[[], int],
        choose: Callable[[int], Ints],
        lease_s: float,
        size: int = 1,
    ) -> list[Taken]:
        """Takes what ``choose`` chooses.

        Args:
            ring: of the index.
            consumer: whose.
            wanted: items, or groups; and how many of them there have to be at least.
            counted: how many may be chosen.
            choose: elements of so many, ``[n]`` or ``[n, size]``.
            lease_s: see `Consumer.take`.
            size: items of a group.

        Returns:
            Each part under its lease: none where there are too few, and others can be written
            before these are done.
        """
        most, least = wanted
        while True:
            if counted() < most:
                self.follow(ring, consumer, now=True)
            there = min(counted(), most)
            if not there or (there < least and not consumer.is_stuck((most - there) * size)):
                return []
            found = self._take(ring, consumer, there, choose, lease_s)
            if sum(len(part.slots) for part in found) == there * size:
                return found
            self.give_back(ring, consumer, found)  # the index knows by now what others have

    def count(
        self, ring: Ring, consumer: Consumer, wanted: int, choose: Callable[[int], Ints]
    ) -> int:
        """How many `take` would find now, up to what is wanted; for arguments see there."""
        self.follow(ring, consumer, now=True)
        while len(elements := choose(wanted)):
            groups = elements if self._whole else elements[:, None]
            kept = self._claimed(ring, groups, consumer.could_claim)
            if kept.all():
                return len(groups)
            self._leave_out(groups[~kept])
        return 0

    def _take(
        self,
        ring: Ring,
        consumer: Consumer,
        wanted: int,
        choose: Callable[[int], Ints],
        lease_s: float,
    ) -> list[Taken]:
        found: list[Taken] = []

        def claim(elements: Ints, tickets: Ints, sizes: Ints) -> Flags:
            kept, lease = consumer.claim(elements, tickets, sizes, lease_s)
            if lease:
                ours = kept.repeat(sizes)
                found.append(Taken(elements[ours], tickets[ours], lease))
            return kept

        try:
            while wanted and len(elements := choose(wanted)):
                groups = elements if self._whole else elements[:, None]
                wanted -= int(self._claimed(ring, groups, claim).sum())
                self._leave_out(groups)
        except BaseException:
            self.give_back(ring, consumer, found)
            raise
        return found

    def _claimed(
        self, ring: Ring, groups: Ints, claim: Callable[[Ints, Ints, Ints], Flags]
    ) -> Flags:
        """Which groups are there, and claimed; ``[groups, size]``."""
        tickets, there = self._tickets(ring, groups)
        whole, kept = there.all(1), np.zeros(len(groups), np.bool_)
        if whole.any():
            sizes = np.full(int(whole.sum()), groups.shape[1], np.int64)
            flat = np.ascontiguousarray(groups[whole].reshape(-1))
            theirs = np.ascontiguousarray(tickets[whole].reshape(-1))
            kept[whole] = claim(flat, theirs, sizes)
        return kept

    def _leave_out(self, groups: Ints) -> None:
        """They are somebody's."""
        first = np.ascontiguousarray(groups[:, 0])
        if self._whole:
            self._index.table.take(address(first), len(first), True)
        else:
            self._drop_of_index(first)

    def give_back(self, ring: Ring, consumer: Consumer, parts: list[Taken]) -> None:
        """What was taken is given to others at once, or to this learner again."""
        for part in parts:
            consumer.give_back(part.lease)
            self._known[part.lease % LEASES] = part.lease
            self._put_back(ring, part.slots)

    def _drop_of_index(self, elements: Ints) -> None:
        elements = np.ascontiguousarray(elements)
        self._index.table.drop(address(elements), len(elements))
        self._index.settle()

    def _tickets(self, ring: Ring, elements: Ints) -> tuple[Ints, Flags]:
        """Tickets, and whether that is the item of the index."""
        words = ring.live.words[elements]
        tickets = slot_words.tickets(words)
        return tickets, slot_words.committed(words) & (tickets < self._index.head)
