"""Windows that a learner of a consumer can claim; see `Claims`.

windows.c, or returned windows ──▶ choose ──▶ windows that a learner holds: `_given`
items in no window after half a ring of newer items ──▶ acknowledged, so that no writer waits
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.format import slots as slot_words
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.ledger import COMPLETE, DELIVERABLE, ItemStates
from shmbuffer.samplers.claiming import Source, Units
from shmbuffer.samplers.slicing.boundaries import Found
from shmbuffer.samplers.slicing.cuts import Marks, window_rows
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.samplers.slicing.windows import Used, Windows


class WindowSource(Source):
    """Source of one sampler's windows.

    Args:
        windows: windows that this process has found.
        marks: paths of the entries that mark first and last steps.
        pad: True if samples have a mask.
    """

    laps = 0.25
    _bounds: Found

    def __init__(self, windows: Windows, marks: Marks, *, pad: bool) -> None:
        self._windows, self._marks, self._pad = windows, marks, pad
        self.size = windows.steps
        self.forget()

    def forget(self) -> None:
        """Discards the record of returned windows and of windows that learners hold."""
        self._none = Units(*np.zeros((2, 0, self.size), np.int64))
        self._next = self._none  # windows that are chosen first: returned or not claimed yet
        self._given: list[Units] = []  # windows that learners hold and have not acknowledged

    def begin(self, consumer: Consumer) -> None:
        """Excludes the items that the consumer has acknowledged, before any item is followed.

        Does nothing if items are already being followed.
        """
        if self._windows.is_started:
            return
        self.forget()
        found = consumer.item_states()
        done = np.flatnonzero(found.states == COMPLETE)
        below = int(found.tickets[done].max(initial=-1)) + 1  # later items can be in windows
        self._windows.load(Used(done, below))

    def look_at(self, ring: Ring, bounds: Found) -> None:
        """Sets the ring and the trajectories from which windows are chosen from now on."""
        self.ring, self._bounds, self.table = ring, bounds, bounds.table

    def count(self) -> int:
        """Returns the number of windows that can be chosen."""
        return self._windows.waiting + len(self._next.elements)

    def choose(self, most: int) -> Units:
        """Returns up to ``most`` windows. They stay in the source until `leave_out` is called."""
        if (missing := most - len(self._next.elements)) > 0:
            self._next = self._next.join(self._new(missing))
        return self._next.select(slice(most))

    def _new(self, count: int) -> Units:
        table: Trajectories = self.table
        firsts = table.rows_of(self._windows.take(count))
        rows = firsts[:, None] + np.arange(self.size)
        elements = table.elements_of(rows.ravel()).reshape(rows.shape)
        tickets = slot_words.tickets(self.ring.live.words[elements])
        # If an item has been overwritten since the last update, the new ticket is at least `head`.
        return Units(elements, np.where(tickets < (table.head or 0), tickets, -1))

    def leave_out(self, chosen: Units, which: Flags) -> None:
        """Removes the chosen windows that are True in ``which``, because a learner holds them."""
        rest = self._next.select(slice(len(which), None))
        self._next = chosen.select(~which).join(rest)
        self._given.append(chosen.select(which))

    def put_back(self, slots: Ints, tickets: Ints) -> None:
        """Allows windows to be chosen again, before all others, because their leases have ended.

        Args:
            slots: slots of the returned items, int64 ``[n]``.
            tickets: tickets of these items, int64 ``[n]``.
        """
        if len(slots):
            given = self._all_given()
            order = np.argsort(slots)
            at = np.searchsorted(slots, given.elements, sorter=order).clip(max=len(slots) - 1)
            found = slots[order[at]], tickets[order[at]]
            is_back = (found[0] == given.elements) & (found[1] == given.tickets)
            self._take_back(given, is_back.all(1))

    def look(self, item_states: ItemStates, *, is_new: bool) -> Ints:
        """Updates the source from the ledger.

        Removes windows that were acknowledged or overwritten, and allows returned windows to be
        chosen again. Returns the slots of items that no learner holds and that can never be
        delivered in a window.
        """
        self._windows.help()
        given = self._all_given()
        elements, tickets = given
        is_same, states = item_states.tickets[elements] == tickets, item_states.states[elements]
        is_over = ~is_same.all(1) | (states == COMPLETE).any(1)
        # Items of windows that were only partly acknowledged cannot be delivered any more.
        rest = is_over[:, None] & is_same & (states == DELIVERABLE)
        self._take_back(given.select(~is_over), (states == DELIVERABLE).all(1)[~is_over])
        # The age is measured from the last update instead of the head, because items written since
        # are in no window yet, even if they are half a ring old.
        is_old = item_states.tickets < self._windows.followed - self.ring.capacity // 2
        left = np.flatnonzero(is_old & (item_states.states == DELIVERABLE))
        if len(left):
            # An item that is listed only with ``waiting=True`` is in a waiting window. All other
            # listed items were delivered, or belong to the rest of a window that was lost.
            used = (self.table.used(self.ring.elements, waiting=way) for way in (True, False))
            in_windows = np.not_equal(*used)
            for some in (self._next, *self._given):
                in_windows[some.elements] |= item_states.tickets[some.elements] == some.tickets
            left = left[~in_windows[left]]
        if len(left):
            self._windows.use(left, int(item_states.tickets[left].max()) + 1)
        return np.concatenate([elements[rest], left])

    def facts(self, elements: Ints) -> dict[Any, torch.Tensor]:
        """Returns the marks for windows with these elements; see `Marks.of_rows`."""
        rows = window_rows(elements, self.size, pad=self._pad)
        return self._marks.of_rows(self._bounds.entries, elements, rows)

    # -- inside --------------------------------------------------------------------------------

    def _all_given(self) -> Units:
        return Units(*map(np.concatenate, zip(self._none, *self._given, strict=True)))

    def _take_back(self, given: Units, which: Flags) -> None:
        self._next = given.select(which).join(self._next)
        self._given = [given.select(~which)]
