"""Lets a learner choose units and claim them for a consumer, so that no other learner gets them.

    Source ──choose──▶ units ──Consumer.claim──▶ units that no other learner holds
      ▲                                              ╰──▶ leave_out: all chosen units
      ├── put_back    items whose leases have ended
      ├── look        other learners' units: once per second, and if too few units are left
      └── lost        items that can never be delivered, for example if their group lost an item

A unit is an item, a group or a window. Items that can never be delivered are acknowledged without a
delivery, so that writers do not wait for them. This includes the items of a group that blocks all
writers and can never be complete.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.keys import GENERATION, LEASE
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer, Leases, Oldest
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.flow.sides import ALONE_S
from shmbuffer.memory.flow.waiting import CHECK_INTERVAL_S
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.ledger import LEASES, ItemStates, LeasedItems
from shmbuffer.samplers.taking import Consumes, Taking

_EVERY_S = 1.0  # seconds between two updates of a source from the ledger
_SHORT_S = 0.02  # seconds between two updates if a source has too few units
_RARELY = 20  # updates take at most 1 / _RARELY of a learner's time


Under = tuple[float, Leases]  # duration of leases in seconds, and the list that records them


class Units(NamedTuple):
    """Units (items, groups or windows). The arrays are int64 ``[units, size]``."""

    elements: Ints
    """Elements of the items."""
    tickets: Ints
    """Tickets of the items, or -1 for an item that is no longer in the source."""

    def select(self, which: Flags | slice) -> Units:
        """Returns the units that a mask or slice selects."""
        return Units(self.elements[which], self.tickets[which])

    def join(self, more: Units) -> Units:
        """Returns these units followed by ``more``."""
        return Units(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))


class Source(ABC):
    """Base class for sources: sets of units from which one learner chooses.

    The caller of each method holds the sampler's lock.

    Attributes:
        ring: the ring of the items.
        size: number of items in a unit.
        table: table of the units. It is replaced by a new object when all items are read again.
        laps: number of times that the ring can be overwritten completely before the source must be
            updated.
    """

    ring: Ring
    size: int
    table: Any
    laps: float = math.inf

    @abstractmethod
    def count(self) -> int:
        """Returns the number of units that can be chosen."""

    @abstractmethod
    def choose(self, most: int) -> Units:
        """Chooses up to ``most`` units, which stay in the source until `leave_out` is called."""

    @abstractmethod
    def leave_out(self, chosen: Units, which: Flags) -> None:
        """Removes units from the source, because a learner holds them.

        Args:
            chosen: the result of the last call of `choose`.
            which: True for each unit to remove.
        """

    @abstractmethod
    def put_back(self, slots: Ints, tickets: Ints) -> None:
        """Adds items to the source again, because their leases have ended."""

    @abstractmethod
    def look(self, item_states: ItemStates, *, is_new: bool) -> Ints:
        """Updates the source from the ledger of the consumer.

        Removes items that other learners hold, and adds items that they have returned.

        Args:
            item_states: states of all items in the ledger.
            is_new: True if the table of the source is new since the last update.

        Returns:
            Slots of items that no learner holds and that can never be delivered.
        """

    def lost(self) -> Units | None:
        """Returns items that became undeliverable since the last call, as units of one item.

        None means that there are no such items.
        """
        return None

    def missing(self, oldest: Oldest) -> int:
        """Returns the number of items that are missing in the group of the oldest item.

        The number is 0 if the item belongs to no incomplete group.
        """
        return 0

    def give_up(self, oldest: Oldest) -> None:
        """Abandons the group of the oldest item. `lost` then returns all items of the group."""
        raise NotImplementedError

    def facts(self, elements: Ints) -> dict[Any, torch.Tensor]:
        """Returns additional entries for a sample with these elements."""
        return {}


class Claims:
    """Claims units for one learner. The caller of each method holds the sampler's lock."""

    def __init__(self) -> None:
        self._table: Any = None  # table of the source at the last update
        self._known = np.zeros(LEASES, np.uint64)  # ended leases whose items were put back
        self._asked_s = 0.0  # time of the last request for ended leases
        # Time of the last update of the source, head of the ring at this time, and its duration.
        self._looked_s, self._looked_at, self._took_s = 0.0, 0, 0.0
        self._held_up: tuple[int, float] | None = None  # a head that is blocked, and since when

    def __reduce__(self) -> Any:
        return Claims, ()  # the state belongs to one handle

    def take(
        self, source: Source, consumer: Consumer, wanted: tuple[int, int], under: Under
    ) -> list[LeasedItems]:
        """Claims units.

        Args:
            source: source from which units are chosen.
            consumer: consumer for which units are claimed.
            wanted: requested number of units, and the minimum number.
            under: duration of the leases in seconds, and the list that records them; see
                `Consumer.claim`.

        Returns:
            The claimed items, for each lease. If the source has fewer than the minimum number of
            units, the list is empty. It is not empty if no more units can be written before the
            present units are acknowledged.
        """
        most, least = wanted
        self._follow(source, consumer)
        while True:
            if source.count() < most:
                self._follow(source, consumer, is_short=True)
            there = min(source.count(), most)
            if there and (there >= least or consumer.is_stuck((most - there) * source.size)):
                taken = self._claim(source, consumer, there, under)
                if sum(len(part.slots) for part in taken) == there * source.size:
                    return taken
                # Other learners held some of the units, which the source has now left out.
                for part in taken:
                    consumer.give_back(part.lease)
            elif not self._unblock(source, consumer):
                return []

    def can_take(self, source: Source, consumer: Consumer, wanted: int) -> bool:
        """True if `take` would return units now.

        Fewer than ``wanted`` units suffice if no more units can be written.
        """
        self._follow(source, consumer, is_short=True)
        while True:
            there = self._free(source, consumer, wanted)
            if there or not self._unblock(source, consumer):
                break
        size = source.size
        return there >= wanted or consumer.cannot_grow(there * size, wanted * size)

    # -- updates of the source -----------------------------------------------------------------

    def _follow(self, source: Source, consumer: Consumer, *, is_short: bool = False) -> None:
        """Updates the source from the ledger, if this is due.

        Args:
            source: the source.
            consumer: the consumer of the ledger.
            is_short: True if the source has too few units, so that updates are due more often.
        """
        if (lost := source.lost()) is not None:
            there = lost.tickets >= 0
            consumer.drop(lost.elements[there], lost.tickets[there])
        now_s, is_new = time.monotonic(), source.table is not self._table
        if is_new:
            self._known[:] = 0
        pause_s = max(_SHORT_S if is_short else _EVERY_S, _RARELY * self._took_s)
        is_far = source.ring.head - self._looked_at >= source.laps * source.ring.capacity
        if is_new or is_far or now_s - self._looked_s >= pause_s:
            self._look(source, consumer, is_new=is_new)
        elif not is_short and now_s - self._asked_s < CHECK_INTERVAL_S:
            return
        source.put_back(*consumer.returned(self._known))
        self._asked_s = now_s

    def _look(self, source: Source, consumer: Consumer, *, is_new: bool) -> None:
        """Updates the source from the states of all items, and drops undeliverable items."""
        began_s = time.monotonic()
        item_states = consumer.item_states()
        slots = source.look(item_states, is_new=is_new)
        if len(slots):
            consumer.drop(slots, item_states.tickets[slots])
        self._table, self._looked_at = source.table, source.ring.head
        self._looked_s = time.monotonic()
        self._took_s = self._looked_s - began_s

    def _claim(
        self, source: Source, consumer: Consumer, wanted: int, under: Under
    ) -> list[LeasedItems]:
        """Chooses and claims up to ``wanted`` units, and returns the items of each lease."""
        taken: list[LeasedItems] = []

        def claim(elements: Ints, tickets: Ints, sizes: Ints) -> Flags:
            kept, lease = consumer.claim(elements, tickets, sizes, *under)
            if lease:
                ours = kept.repeat(source.size)
                taken.append(LeasedItems(elements[ours], tickets[ours], lease))
            return kept

        while wanted and len((chosen := source.choose(wanted)).elements):
            wanted -= int(_claimed(chosen, claim).sum())
            source.leave_out(chosen, np.ones(len(chosen.elements), np.bool_))
        return taken

    def _free(self, source: Source, consumer: Consumer, wanted: int) -> int:
        """Returns the number of units that could be claimed, up to ``wanted``."""
        while len((chosen := source.choose(wanted)).elements):
            kept = _claimed(chosen, consumer.could_claim)
            if kept.all():
                return len(kept)
            source.leave_out(chosen, ~kept)
        return 0

    def _unblock(self, source: Source, consumer: Consumer) -> bool:
        """Abandons the group of the oldest item, if this group can never be complete.

        A group can never be complete if its other items do not fit into the ring before the oldest
        item is acknowledged. This is also assumed if all writers have been waiting for `ALONE_S`
        seconds, because a dead writer would have been restarted by then.

        Returns:
            True if a group was abandoned.
        """
        oldest = consumer.oldest_to_give()
        if oldest is None:
            self._held_up = None
            return False
        missing = source.missing(oldest)
        if not missing:
            return False
        if missing <= oldest.room and not self._is_held_up(consumer, oldest):
            return False
        source.give_up(oldest)
        self._follow(source, consumer)
        return True

    def _is_held_up(self, consumer: Consumer, oldest: Oldest) -> bool:
        """True if all writers have been waiting for the oldest item for `ALONE_S` seconds."""
        if not (oldest.waits and consumer.all_writers_wait()):
            self._held_up = None
            return False
        now_s = time.monotonic()
        if self._held_up is None or self._held_up[0] != oldest.head:
            self._held_up = oldest.head, now_s
        return now_s - self._held_up[1] >= ALONE_S


def _claimed(chosen: Units, claim: Callable[[Ints, Ints, Ints], Flags]) -> Flags:
    """Claims those chosen units whose items are all still in the source.

    Args:
        chosen: the units.
        claim: function that claims units, given the elements, the tickets and the size of each
            unit. Returns True for each claimed unit.

    Returns:
        True for each unit that was claimed.
    """
    there = chosen.tickets >= 0
    if not there.all():
        kept: Flags = np.all(there, axis=1)
        if kept.any():
            kept[kept] = _claimed(chosen.select(kept), claim)
        return kept
    sizes = np.full(len(chosen.elements), chosen.elements.shape[1], np.int64)
    return claim(chosen.elements.ravel(), chosen.tickets.ravel(), sizes)


class ClaimingSampler(Consumes):
    """Base class for samplers that choose units for a consumer, which delivers each unit once.

    Args:
        consumer: name of the consumer, or None.
        start: first item of a new consumer.
    """

    def __init__(self, consumer: str | None, start: Start) -> None:
        super().__init__(consumer, 1, start)
        self._claims = Claims()

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        """The lock that protects the source."""
        raise NotImplementedError

    def _source(self, storage: Any, consumer: Consumer) -> Source:
        """Returns the source of a storage's units. Raises EmptyBufferError if it has no items."""
        raise NotImplementedError

    def _exhausted(self) -> str:
        """Describes which items were delivered, for the error that is raised if no units remain."""
        raise NotImplementedError

    def _claimed(
        self, storage: Any, wanted: int, size: int, taking: Taking | None
    ) -> tuple[Any, dict[Any, Any]]:
        """Claims units, and waits until there are enough units; see `Consumer.wait_for`.

        Args:
            storage: the storage.
            wanted: number of units.
            size: number of items per unit.
            taking: the `sample` call of the buffer. If None, the items are acknowledged
                immediately.

        Returns:
            The elements of the items, int64 ``[wanted * size]``, and entries for the sample.
        """
        if taking is None:
            return self._acknowledged(storage, wanted * size)
        consumer = self.opened(storage)
        parts: list[LeasedItems] = []
        facts: dict[Any, Any] = {}

        def attempt(least: int) -> int:
            with self._lock:
                try:
                    source = self._source(storage, consumer)
                except EmptyBufferError:
                    return 0
                parts[:] = self._claims.take(source, consumer, (wanted, least), taking.under)
                if not parts and wanted:
                    return 0
                facts.update(source.facts(_joined([part.slots for part in parts])))
            return sum(len(part.slots) for part in parts) // size

        if wanted:
            consumer.wait_for(attempt, wanted, size, self._exhausted)
        else:
            attempt(0)
        taking.taken += [(consumer, part) for part in parts]
        elements, tickets = (_joined([part[at] for part in parts]) for at in (0, 1))
        facts[GENERATION] = torch.from_numpy(tickets)
        if taking.lease_s is not None:
            leases = _joined([np.full(len(part.slots), part.lease) for part in parts])
            facts[LEASE] = torch.from_numpy(leases)
        return torch.from_numpy(elements), facts

    def _can_claim(self, storage: Any, consumer: Consumer, wanted: int) -> bool:
        """True if `_claimed` would return ``wanted`` units without waiting."""
        with self._lock:
            try:
                source = self._source(storage, consumer)
            except EmptyBufferError:
                return False
            return self._claims.can_take(source, consumer, wanted)


def _joined(parts: list[Any]) -> Ints:
    """Concatenates arrays. The result for an empty list is an empty array."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
