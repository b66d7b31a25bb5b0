"""Windows that are given once among all learners of a consumer: chosen here, claimed in the ledger.

windows, or what was given back ──▶ Consumer.claim ──▶ ours, under a lease
                                         ╰──▶ somebody's: asked for where windows are short
items in no window, half a lap old ──▶ Consumer.drop: writers do not wait for them
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.waiting import LOOK_S
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.ledger import DONE, LEASES, TO_GIVE, Taken
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.samplers.slicing.windows import Used, Windows

_EVERY_S = 1.0  # between two looks at what others have; earlier after a quarter of a lap
_SHORT_S = 0.02  # the same, where there are too few windows: at least so long, and so many times as
_RARELY = 20  # long as a look takes


class WindowItems(NamedTuple):
    """Items of windows, int64 ``[windows, steps]``."""

    elements: Ints
    tickets: Ints

    def some(self, which: Flags | slice) -> WindowItems:
        """Some of the windows."""
        return WindowItems(self.elements[which], self.tickets[which])

    def and_(self, more: WindowItems) -> WindowItems:
        """These, then others."""
        each = zip(self, more, strict=True)
        return WindowItems(*(np.concatenate(pair) for pair in each))


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
        self._back = WindowItems(none, none)  # to be given again
        self._given: list[WindowItems] = []  # that we or others were given, until they are done
        self._parts: list[tuple[Taken, WindowItems]] = []
        self._known = np.zeros(LEASES, np.uint64)  # leases of which what they had is back
        self._looked_s, self._looked_at, self._pause_s = 0.0, 0, _SHORT_S
        self._asked_s = 0.0  # when it was last asked which leases have ended

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
        """Whether so many are there, as far as is known, or no more can come."""
        there, steps = self._free(ring, consumer, table, count), self._windows.steps
        if there < count:
            self._search(ring, consumer, table)
            there = self._free(ring, consumer, table, count)
        return there >= count or consumer.cannot_grow(there * steps, count * steps)

    def _free(self, ring: Ring, consumer: Consumer, table: Trajectories, count: int) -> int:
        """How many of the next windows nobody else has; they are the first to be given again."""
        while len(self._back.elements) < count:
            chosen = self._chosen(ring, table, count - len(self._back.elements), again=False)
            if not len(chosen.elements):
                break
            self._back = self._back.and_(chosen)
        first, rest = self._back.some(slice(count)), self._back.some(slice(count, None))
        sizes = np.full(len(first.elements), self._windows.steps, np.int64)
        kept = consumer.could_claim(first.elements.ravel(), first.tickets.ravel(), sizes)
        if kept.all():
            return len(kept)
        self._given.append(first.some(~kept))
        self._back = first.some(kept).and_(rest)
        return self._free(ring, consumer, table, count)

    @property
    def _waiting(self) -> int:
        return self._windows.waiting + len(self._back.elements)

    def take(
        self,
        ring: Ring,
        consumer: Consumer,
        table: Trajectories,
        wanted: tuple[int, int],
        lease_s: float,
    ) -> Ints:
        """Claim the next windows.

        Args:
            ring: of the table.
            consumer: whose.
            table: of the windows.
            wanted: windows; and how many of them there have to be at least.
            lease_s: see `Consumer.take`.

        Returns:
            Their first rows, ``[n]``; fewer where the others cannot be written before these are
            done. `parts` has the leases.

        Raises:
            EmptyBufferError: there are fewer.
        """
        steps, (most, least) = self._windows.steps, wanted
        self.release(consumer)
        now_s, is_far = time.monotonic(), ring.head - self._looked_at >= ring.capacity // 4
        if is_far or now_s - self._looked_s >= _EVERY_S:
            self._look(ring, consumer, table)
        if now_s - self._asked_s >= LOOK_S:
            self._take_returned(consumer)
        while True:
            if self._waiting < most:
                self._search(ring, consumer, table)
            there = min(self._waiting, most)
            is_short = there < least and not consumer.is_stuck((most - there) * steps)
            if is_short or (most and not there):
                raise EmptyBufferError("there are too few windows")
            rows = self._take(ring, consumer, table, there, lease_s)
            if len(rows) == there:
                return rows
            self.release(consumer)  # what is left of the queue is ahead of us

    def _take(
        self, ring: Ring, consumer: Consumer, table: Trajectories, count: int, lease_s: float
    ) -> Ints:
        found = self._back.some(slice(0))
        while len(found.elements) < count:
            chosen = self._chosen(ring, table, count - len(found.elements))
            if not len(chosen.elements):
                break
            sizes = np.full(len(chosen.elements), self._windows.steps, np.int64)
            elements, tickets = chosen.elements.ravel(), chosen.tickets.ravel()
            self._given.append(chosen)
            kept, lease = consumer.claim(elements, tickets, sizes, lease_s)
            ours = chosen.some(kept)
            if lease:
                taken = Taken(ours.elements.ravel(), ours.tickets.ravel(), lease)
                self._parts.append((taken, ours))
            found = found.and_(ours)
            self._given[-1] = chosen.some(~kept)
        return table.rows_of(found.elements[:, 0])

    def parts(self) -> list[Taken]:
        """What the last `take` has claimed, for who has it from here on."""
        parts, self._parts = self._parts, []
        self._given += [ours for _, ours in parts]  # their leases may end
        return [taken for taken, _ in parts]

    def release(self, consumer: Consumer) -> None:
        """Give back what was claimed and not delivered: it comes first again."""
        while self._parts:
            taken, ours = self._parts.pop()
            consumer.give_back(taken.lease)
            self._known[taken.lease % LEASES] = taken.lease
            self._back = ours.and_(self._back)

    # -- inside --------------------------------------------------------------------------------

    def _chosen(
        self, ring: Ring, table: Trajectories, count: int, *, again: bool = True
    ) -> WindowItems:
        """The next ones that may be ours; ``again``: what came back before what is new."""
        if again and len(self._back.elements):
            chosen = self._back.some(slice(count))
            self._back = self._back.some(slice(count, None))
            return chosen
        firsts = table.rows_of(self._windows.take(count))
        rows = firsts[:, None] + np.arange(self._windows.steps)
        elements = table.elements_of(rows.ravel()).reshape(rows.shape)
        tickets = slot_words.tickets(ring.live.words[elements])
        # What was written over since the window was chosen has the ticket of an item to come.
        ours: Flags = np.all(tickets < (table.head or 0), axis=1)
        return WindowItems(elements, tickets).some(ours)

    def _search(self, ring: Ring, consumer: Consumer, table: Trajectories) -> None:
        """More windows: whose leases have ended; and, now and then, all that others do."""
        self._take_returned(consumer)
        if time.monotonic() - self._looked_s >= self._pause_s:
            self._look(ring, consumer, table)

    def _take_returned(self, consumer: Consumer) -> None:
        """Puts windows whose leases have ended before the others."""
        slots, tickets = consumer.returned(self._known)
        self._asked_s = time.monotonic()
        if len(slots):
            given = self._all_given()
            order = np.argsort(slots)
            at = np.searchsorted(slots, given.elements, sorter=order).clip(max=len(slots) - 1)
            found = slots[order[at]], tickets[order[at]]
            is_back = (found[0] == given.elements) & (found[1] == given.tickets)
            self._put_back(given, is_back.all(1))

    def _all_given(self) -> WindowItems:
        none = self._back.some(slice(0))
        return WindowItems(*map(np.concatenate, zip(none, *self._given, strict=True)))

    def _put_back(self, given: WindowItems, which: Flags) -> None:
        self._back = given.some(which).and_(self._back)
        self._given = [given.some(~which)]

    def _look(self, ring: Ring, consumer: Consumer, table: Trajectories) -> None:
        """What others have given back, or are done with; and what is in no window."""
        began_s = time.monotonic()
        self._windows.help()
        found = consumer.standings()
        given = self._all_given()
        elements, tickets = given
        is_same, states = found.tickets[elements] == tickets, found.states[elements]
        is_over = ~is_same.all(1) | (states == DONE).any(1)
        rest = is_over[:, None] & is_same & (states == TO_GIVE)
        if rest.any():  # of a window that was acknowledged in part
            consumer.drop(elements[rest], tickets[rest])
        self._put_back(given.some(~is_over), (states == TO_GIVE).all(1)[~is_over])
        # What was written since it was followed may be half a lap old by now, and in windows.
        is_old = found.tickets < self._windows.followed - ring.capacity // 2
        left = np.flatnonzero(is_old & (found.states == TO_GIVE))
        if len(left):
            # Not all that is used is in a window: a window may have lost its first items.
            in_windows = table.used(ring.elements, waiting=True) != table.used(ring.elements)
            for some in (self._back, *self._given):
                in_windows[some.elements] |= found.tickets[some.elements] == some.tickets
            left = left[~in_windows[left]]
        if len(left):
            consumer.drop(left, found.tickets[left])
            self._windows.use(left, int(found.tickets[left].max()) + 1)
        self._looked_s, self._looked_at = time.monotonic(), ring.head
        self._pause_s = max(_SHORT_S, _RARELY * (self._looked_s - began_s))
