"""The units that a learner chooses from an index of labels; see `Claims`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Oldest
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Bytes, Flags, Ints
from shmbuffer.memory.format.ledger import DONE, HELD_HERE, TO_GIVE, Standings
from shmbuffer.samplers.claiming import Source, Units
from shmbuffer.samplers.labelled.index import LabelIndex
from shmbuffer.samplers.sampler import Sampler, draw_key


class LabelSource(Source):
    """Units of an index, at one look of it."""

    def __init__(self, index: LabelIndex, ring: Ring, size: int) -> None:
        self._index, self.ring, self.size, self.table = index, ring, size, index.table

    def with_tickets(self, elements: Ints) -> Units:
        """Units of these elements, with the tickets of items that the index knows."""
        words = self.ring.live.words[elements]
        tickets = slot_words.tickets(words)
        tickets[~(slot_words.committed(words) & (tickets < self._index.head))] = -1
        return Units(elements, tickets)

    def put_back(self, slots: Ints, tickets: Ints) -> None:
        """See `Source.put_back`."""
        self.add(slots[tickets < self._index.head])

    def look(self, standings: Standings, *, is_new: bool) -> Ints:
        """See `Source.look`."""
        # Nothing follows for items that the index has not read yet.
        known, states = standings.tickets < self._index.head, standings.states
        # What this learner holds was left out when it was taken, and comes back with its lease.
        here = states == HELD_HERE
        free = np.flatnonzero(known & (states == TO_GIVE))
        given = np.flatnonzero(known & (states > TO_GIVE) & (is_new | ~here))
        if not is_new:  # a new table has all of them
            self.add(free)
        return self.remove_taken(given, free, states)

    @abstractmethod
    def add(self, elements: Ints) -> None:
        """Lets items be chosen again."""

    @abstractmethod
    def remove_taken(self, given: Ints, free: Ints, states: Bytes) -> Ints:
        """Removes items that learners have or had.

        Args:
            given: these items.
            free: items that no learner has.
            states: what each slot's item is to the consumer.

        Returns:
            Those of ``free`` that can never be given.
        """


class WholeGroups(LabelSource):
    """Groups that are complete."""

    def __init__(self, sampler: Sampler, index: LabelIndex, storage: Any, ring: Ring) -> None:
        super().__init__(index, ring, index.limit)
        self._sampler, self._storage = sampler, storage

    def count(self) -> int:
        """See `Source.count`."""
        return int(self.table.marked)

    def choose(self, most: int) -> Units:
        """See `Source.choose`."""
        key = draw_key(self._sampler, self._storage)
        return self.with_tickets(self._index.groups(key, most, self.size))

    def leave_out(self, chosen: Units, which: Flags) -> None:
        """See `Source.leave_out`."""
        self._take(chosen.elements[which, 0], are_taken=True)

    def lost(self) -> Units | None:
        """See `Source.lost`: items of groups that lost an item, or were given up."""
        lost = np.frombuffer(self.table.lost(), np.int64)
        return self.with_tickets(lost[:, None]) if len(lost) else None

    def missing(self, oldest: Oldest) -> int:
        """See `Source.missing`."""
        self._index.look(self._storage)  # what was committed until then
        missing = int(self.table.missing(oldest.slot))
        return missing if self._index.head == oldest.head else 0

    def give_up(self, oldest: Oldest) -> None:
        """See `Source.give_up`."""
        self.table.give_up_one(oldest.slot)

    def add(self, elements: Ints) -> None:
        """See `LabelSource.add`."""
        self._take(elements, are_taken=False)

    def remove_taken(self, given: Ints, free: Ints, states: Bytes) -> Ints:
        """See `LabelSource.remove_taken`: what is left of groups that are acknowledged in part."""
        self._take(given, are_taken=True)
        done = self._index.kins(given[states[given] == DONE])
        done = done[done >= 0]
        return free[np.isin(self._index.kins(free), done)] if len(done) else free[:0]

    def _take(self, elements: Ints, *, are_taken: bool) -> None:
        elements = np.ascontiguousarray(elements)
        self.table.mark_claimed(address(elements), len(elements), are_taken)
