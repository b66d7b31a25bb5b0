"""Sources from which a learner of a consumer chooses groups or items by label; see `Claims`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Oldest
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Bytes, Flags, Ints
from shmbuffer.memory.format.ledger import COMPLETE, DELIVERABLE, LEASED_HERE, ItemStates
from shmbuffer.samplers.claiming import Source, Units
from shmbuffer.samplers.labelled.index import LabelIndex
from shmbuffer.samplers.sampler import Sampler, draw_key


class LabelSource(Source):
    """Base class for sources that choose from a `LabelIndex` as of its last update."""

    def __init__(self, index: LabelIndex, ring: Ring, size: int) -> None:
        self._index, self.ring, self.size, self.table = index, ring, size, index.table

    def with_tickets(self, elements: Ints) -> Units:
        """Returns units with the given elements, int64 ``[units, size]``, and their tickets.

        The ticket is -1 if the item is no longer the one in the index.
        """
        words = self.ring.live.words[elements]
        tickets = slot_words.tickets(words)
        tickets[~(slot_words.committed(words) & (tickets < self._index.head))] = -1
        return Units(elements, tickets)

    def put_back(self, slots: Ints, tickets: Ints) -> None:
        """Allows items to be chosen again, because their leases have ended.

        Args:
            slots: slots of the items, int64 ``[n]``.
            tickets: tickets of the items, int64 ``[n]``.
        """
        self.add(slots[tickets < self._index.head])

    def look(self, item_states: ItemStates, *, is_new: bool) -> Ints:
        """Updates the source from the ledger.

        Removes the items that other learners hold, and allows returned items to be chosen again.
        Returns the slots of items that no learner holds and that can never be delivered.
        """
        # Items that the index has not read yet are ignored.
        known, states = item_states.tickets < self._index.head, item_states.states
        # This learner's items were removed when they were claimed. `put_back` returns them when
        # their leases end.
        here = states == LEASED_HERE
        free = np.flatnonzero(known & (states == DELIVERABLE))
        claimed = np.flatnonzero(known & (states > DELIVERABLE) & (is_new | ~here))
        if not is_new:  # a new table contains all items
            self.add(free)
        return self.remove_taken(claimed, free, states)

    @abstractmethod
    def add(self, elements: Ints) -> None:
        """Allows the items at ``elements`` to be chosen again."""

    @abstractmethod
    def remove_taken(self, claimed: Ints, free: Ints, states: Bytes) -> Ints:
        """Removes items that learners hold or have acknowledged.

        Args:
            claimed: elements of the items to remove, int64 ``[n]``.
            free: elements of items that no learner holds, int64 ``[m]``.
            states: state of the item in each slot, according to the consumer's ledger.

        Returns:
            The elements of ``free`` that can never be delivered.
        """


class WholeGroups(LabelSource):
    """Source of complete groups for a `PromptGroupSampler`."""

    def __init__(self, sampler: Sampler, index: LabelIndex, storage: Any, ring: Ring) -> None:
        super().__init__(index, ring, index.limit)
        self._sampler, self._storage = sampler, storage

    def count(self) -> int:
        """Returns the number of groups that can be chosen."""
        return int(self.table.marked)

    def choose(self, most: int) -> Units:
        """Returns up to ``most`` groups. They stay in the source until `leave_out` is called."""
        key = draw_key(self._sampler, self._storage)
        return self.with_tickets(self._index.groups(key, most, self.size))

    def leave_out(self, chosen: Units, which: Flags) -> None:
        """Removes the chosen groups that are True in ``which``, because a learner holds them."""
        self._take(chosen.elements[which, 0], are_taken=True)

    def lost(self) -> Units | None:
        """Returns the items of groups that lost an item or were abandoned since the last call."""
        lost = np.frombuffer(self.table.take_lost(), np.int64)
        return self.with_tickets(lost[:, None]) if len(lost) else None

    def missing(self, oldest: Oldest) -> int:
        """Returns how many items the group of the oldest item still lacks.

        Returns 0 if items were committed in the meantime, because they could belong to the group.
        """
        self._index.update(self._storage)  # adds items that were committed since the last update
        missing = int(self.table.count_missing(oldest.slot))
        return missing if self._index.head == oldest.head else 0

    def give_up(self, oldest: Oldest) -> None:
        """Abandons the group of the oldest item. All items in the group become `lost`."""
        self.table.give_up_one(oldest.slot)

    def add(self, elements: Ints) -> None:
        """Allows the groups of the items at ``elements`` to be chosen again."""
        self._take(elements, are_taken=False)

    def remove_taken(self, claimed: Ints, free: Ints, states: Bytes) -> Ints:
        """Removes the groups of items that learners hold or have acknowledged.

        Returns the free items of groups in which another item was acknowledged. They can never be
        delivered, because a group is only delivered as a whole.
        """
        self._take(claimed, are_taken=True)
        done = self._index.find_groups(claimed[states[claimed] == COMPLETE])
        done = done[done >= 0]
        return free[np.isin(self._index.find_groups(free), done)] if len(done) else free[:0]

    def _take(self, elements: Ints, *, are_taken: bool) -> None:
        elements = np.ascontiguousarray(elements)
        self.table.mark_claimed(address(elements), len(elements), are_taken)
