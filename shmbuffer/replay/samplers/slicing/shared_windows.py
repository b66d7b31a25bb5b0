"""Windows that are given once among all learners of a consumer: chosen here, claimed in the ledger.

windows, or what was given back ──▶ Consumer.claim ──▶ ours, under a lease
                                         ╰──▶ somebody's: looked at once a second, and when
                                              windows are short
items in no window, half a lap old ──▶ Consumer.drop: writers do not wait for them
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import slots as slot_words
from shmbuffer.memory.ledger import DONE, HELD_HERE, TO_GIVE, Taken
from shmbuffer.replay.samplers.slicing.windows import Used, Windows

if TYPE_CHECKING:
    from shmbuffer.memory import Ring
    from shmbuffer.memory.consumers import Consumer
    from shmbuffer.numpy.arrays import Flags, Ints
    from shmbuffer.replay.samplers.slicing.trajectories import Trajectories

_EVERY_S = 1.0  # between two looks at what others have; earlier after a quarter of a lap
_SHORT_S = 0.02  # the same, where there are too few windows


class Items(NamedTuple):
    """Items of windows, int64 ``[windows, steps]``."""

    elements: Ints
    tickets: Ints

    def some(self, which: Flags | slice) -> Items:
        """Some of the windows."""
        return Items(self.elements[which], self.tickets[which])

    def and_(self, more: Items) -> Items:
        """These, then others."""
        each = zip(self, more, strict=True)
        return Items(*(np.concatenate(pair) for pair in each))


class SharedWindows:
    """What one learner of a consumer knows of its windows. The caller holds the lock.

    Args:
        windows: of this process.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self.forget()

    def forget(self) -> None:
        """Nothing is known of what others have."""
        none = np.zeros((0, self._windows.steps), np.int64)
        self._back = Items(none, none)  # to be given again
        self._given: list[Items] = []  # that we or others were given, until they are done
        self._parts: list[Taken] = []
        self._ends: dict[int, float] = {}  # of leases of our own
        self._looked_s, self._looked_at = 0.0, 0

    def begin(self, consumer: Consumer) -> None:
        """Before the first item is followed: what is done comes in no window."""
        if self._windows.is_begun:
            return
        self.forget()
        found = consumer.standings()
        done = np.flatnonzero(found.states == DONE)
        below = int(found.tickets[done].max(initial=-1)) + 1  # not what is stored there next
        self._windows.load(Used(done, below))

    def has(self, ring: Ring, consumer: Consumer, table: Trajectories, count: int) -> bool:
        """Whether so many are there, as far as is known."""
        if self._waiting < count and time.monotonic() - self._looked_s >= _SHORT_S:
            self._look(ring, consumer, table)
        there, steps = self._waiting, self._windows.steps
        return there >= count or (there > 0 and consumer.is_stuck((count - there) * steps))

    @property
    def _waiting(self) -> int:
        return self._windows.waiting + len(self._back.elements)

    def take(
        self, ring: Ring, consumer: Consumer, table: Trajectories, count: int, lease_s: float
    ) -> Ints:
        """Claim the next windows.

        Returns:
            Their first rows, ``[n]``; fewer than ``count`` where the others cannot be written
            before these are done. `parts` has the leases.

        Raises:
            EmptyBufferError: there are fewer.
        """
        steps = self._windows.steps
        rows = self._take(ring, consumer, table, count, lease_s)
        there = len(rows)
        if 0 < there < count:  # they must not be ours while it is asked who has them
            self.release(consumer)
            if consumer.is_stuck((count - there) * steps):
                rows = self._take(ring, consumer, table, there, lease_s)
                if len(rows):
                    return rows
        if there < count:
            raise EmptyBufferError(
                f"{count} windows of {steps} steps are wanted, and {there} are complete that "
                f"consumer {consumer.name!r} has not been given; write more first, or draw fewer"
            )
        return rows

    def _take(
        self, ring: Ring, consumer: Consumer, table: Trajectories, count: int, lease_s: float
    ) -> Ints:
        self.release(consumer)
        is_far = ring.head - self._looked_at >= ring.capacity // 4
        if is_far or time.monotonic() - self._looked_s >= _EVERY_S:
            self._look(ring, consumer, table)
        found, has_looked = self._back.some(slice(0)), False
        while len(found.elements) < count:
            chosen = self._chosen(ring, table, count - len(found.elements))
            if not len(chosen.elements):
                if has_looked or time.monotonic() - self._looked_s < _SHORT_S:
                    break
                has_looked = True
                self._look(ring, consumer, table)
                continue
            sizes = np.full(len(chosen.elements), self._windows.steps, np.int64)
            elements, tickets = chosen.elements.ravel(), chosen.tickets.ravel()
            kept, lease = consumer.claim(elements, tickets, sizes, lease_s)
            ours = chosen.some(kept)
            if lease:
                self._parts.append(Taken(ours.elements.ravel(), ours.tickets.ravel(), lease))
                if lease_s < math.inf:
                    self._ends[lease] = time.monotonic() + lease_s
            found = found.and_(ours)
            self._given.append(chosen)  # ours too: their lease may end
        return table.rows_of(found.elements[:, 0])

    def parts(self) -> list[Taken]:
        """What the last `take` has claimed, for who has it from here on."""
        parts, self._parts = self._parts, []
        return parts

    def release(self, consumer: Consumer) -> None:
        """Give back what was claimed and not delivered: it comes first again."""
        for part in self.parts():
            consumer.give_back(part.lease)
            self._looked_s = 0.0

    # -- inside --------------------------------------------------------------------------------

    def _chosen(self, ring: Ring, table: Trajectories, count: int) -> Items:
        """The next ones that may be ours."""
        if len(self._back.elements):
            chosen = self._back.some(slice(count))
            self._back = self._back.some(slice(count, None))
            return chosen
        firsts = table.rows_of(self._windows.take(count))
        rows = firsts[:, None] + np.arange(self._windows.steps)
        elements = table.elements_of(rows.ravel()).reshape(rows.shape)
        return Items(elements, slot_words.tickets(ring.live.words[elements]))

    def _look(self, ring: Ring, consumer: Consumer, table: Trajectories) -> None:
        """What others have given back, or are done with; and what is in no window."""
        self._windows.help()
        found = consumer.standings()
        self._looked_s, self._looked_at = time.monotonic(), ring.head
        given = Items(
            *map(np.concatenate, zip(self._back.some(slice(0)), *self._given, strict=True))
        )
        elements, tickets = given
        is_same, states = found.tickets[elements] == tickets, found.states[elements]
        is_over = ~is_same.all(1) | (states == DONE).any(1)
        held = {*np.unique(found.leases[found.states == HELD_HERE]).tolist()} if self._ends else {}
        self._ends = {lease: end for lease, end in self._ends.items() if lease in held}
        ended = [lease for lease, end in self._ends.items() if end <= self._looked_s]
        is_lapsed = (states == HELD_HERE) & np.isin(
            found.leases[elements], np.array(ended, np.uint64)
        )
        is_free = ~is_over & ((states == TO_GIVE) | is_lapsed).all(1)
        self._back = given.some(is_free).and_(self._back)
        rest = is_over[:, None] & is_same & (states == TO_GIVE)
        if rest.any():  # of a window that was acknowledged in part
            consumer.drop(elements[rest], tickets[rest])
        self._given = [given.some(~(is_over | is_free))]
        # What was written since it was followed may be half a lap old by now, and in windows.
        is_old = found.tickets < self._windows.followed - ring.capacity // 2
        left = np.flatnonzero(is_old & (found.states == TO_GIVE))
        if len(left):
            in_windows = table.used(ring.elements, waiting=True)
            left = left[in_windows[left] != found.tickets[left]]
        if len(left):
            consumer.drop(left, found.tickets[left])
            self._windows.use(left, int(found.tickets[left].max()) + 1)
