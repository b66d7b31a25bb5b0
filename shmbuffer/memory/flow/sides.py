"""Observes the clients on each side of a rate-limited buffer, for calls that wait for them."""

from __future__ import annotations

import os
import time
from threading import get_native_id

import numpy as np

from shmbuffer.memory.clients.roster import Dead, RosterContent, read_roster
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.rate_status import clients_on, may_write, not_attached
from shmbuffer.memory.format.layout import EntryState, Side

ALONE_S = 1.0
"""Time without clients after which a side counts as empty; a client may be restarting."""

_FORGET_S = 30.0  # after this time without a wait, it is not known since when a side is left


class Sides:
    """Tells a handle which clients sample and insert."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._samplers: set[int] = set()
        self._left: set[Side] = set()  # sides that had no client when the last call waited
        # first and last time at which a side had no client
        self._alone: dict[Side, tuple[float, float]] = {}

    def draws_here(self) -> None:
        """Records that this thread samples, for the writers of its process."""
        self._samplers.add(get_native_id())

    def are_left(self, side: Side, now: float) -> bool:
        """True if a side has had no client for at least `ALONE_S`."""
        there = clients_on(self._seat.control.entries, side, excluding=self._seat.entry)
        if there or self.has_thread(side):
            self._alone.pop(side, None)
            self._left.discard(side)
            return False
        since, last = self._alone.get(side, (now, now))
        # last of all calls, so that short timeouts add up
        since = since if now - last < _FORGET_S else now
        self._alone.update({side: (since, now)})
        return side in self._left or now - since >= ALONE_S

    def lost_collectors(self) -> tuple[Dead, ...]:
        """Returns the dead collectors, if all have died and no other client could write."""
        entry, spawned = self._seat.entry, self._spawned()
        if spawned.others or may_write(self._seat.control.entries, excluding=entry):
            return ()
        return spawned.dead

    def absent(self) -> str:
        """Describes spawned collectors that have not attached yet."""
        return not_attached(self._spawned().absent, time.time())

    def _spawned(self) -> RosterContent:
        """Returns the spawned processes of the directory."""
        directory, entries = self._seat.backing.directory, self._seat.control.entries
        if directory is None:
            return RosterContent((), 0, ())
        pids = entries["pid"][entries["state"] == EntryState.LIVE]
        return read_roster(directory, set(map(int, pids)))

    def all_wait(self, side: Side) -> bool:
        """True if all clients on a side wait, or the side has no clients."""
        waits = self._seat.control.entries["waits_for"]
        there = clients_on(self._seat.control.entries, side, excluding=self._seat.entry)
        if self.has_thread(side) and not waits[self._seat.entry] & ~np.uint32(side):
            return False
        return bool((waits[there] > 0).all())

    def note_left(self, side: Side) -> bool:
        """Records that no client is on a side; returns True if that is new."""
        known = side in self._left
        self._left.add(side)
        return not known

    def has_thread(self, side: Side) -> bool:
        """True if another thread of this process uses this handle on that side."""
        me = get_native_id()
        native = self._seat.native  # None before the first write
        writers = {native.last_writer} if native is not None else set()
        theirs = self._samplers if side == Side.SAMPLES else writers
        return any(
            thread and thread != me and os.path.exists(f"/proc/self/task/{thread}")
            for thread in theirs
        )
