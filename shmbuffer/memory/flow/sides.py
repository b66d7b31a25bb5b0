"""Finds the clients on each side of a rate-limited buffer, for calls that wait for them."""

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
"""Seconds without clients after which a side counts as empty.

The time is not 0, because a client may be restarting.
"""

_FORGET_S = 30.0
"""Seconds between two waits after which the time without clients is counted from 0 again."""


class Sides:
    """The clients that insert into a buffer and sample from it, as seen by one handle."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._sampling_threads: set[int] = set()
        self._known_empty: set[Side] = set()  # sides whose emptiness was reported by `note_empty`
        # first and last time at which `is_empty` found no client on a side
        self._empty: dict[Side, tuple[float, float]] = {}

    def note_sampler(self) -> None:
        """Records that this thread samples, because the registry lists only processes."""
        self._sampling_threads.add(get_native_id())

    def is_empty(self, side: Side, now: float) -> bool:
        """True if no client has been on a side for at least `ALONE_S` seconds."""
        clients = clients_on(self._seat.control.entries, side, excluding=self._seat.entry)
        if clients or self.has_thread(side):
            self._empty.pop(side, None)
            self._known_empty.discard(side)
            return False
        since, last = self._empty.get(side, (now, now))
        # `last` is from the previous call of any wait, so that waits with short timeouts add up
        since = since if now - last < _FORGET_S else now
        self._empty.update({side: (since, now)})
        return side in self._known_empty or now - since >= ALONE_S

    def dead_collectors(self) -> tuple[Dead, ...]:
        """Returns the dead collectors if no other process could write; otherwise an empty tuple."""
        entry, spawned = self._seat.entry, self._spawned()
        if spawned.others or may_write(self._seat.control.entries, excluding=entry):
            return ()
        return spawned.dead

    def describe_absent(self) -> str:
        """Describes spawned collectors that have not attached yet; "" if there are none."""
        return not_attached(self._spawned().absent, time.time())

    def _spawned(self) -> RosterContent:
        """Returns which spawned processes of the directory are dead or have not attached yet."""
        directory, entries = self._seat.backing.directory, self._seat.control.entries
        if directory is None:
            return RosterContent((), 0, ())
        pids = entries["pid"][entries["state"] == EntryState.LIVE]
        return read_roster(directory, set(map(int, pids)))

    def all_wait(self, side: Side) -> bool:
        """True if every client on a side waits, or there is no client on that side."""
        waits = self._seat.control.entries["waits_for"]
        clients = clients_on(self._seat.control.entries, side, excluding=self._seat.entry)
        if self.has_thread(side) and not waits[self._seat.entry] & ~np.uint32(side):
            return False
        return bool((waits[clients] > 0).all())

    def note_empty(self, side: Side) -> bool:
        """Records that a side has no client. Returns True if this was not recorded before."""
        is_known = side in self._known_empty
        self._known_empty.add(side)
        return not is_known

    def has_thread(self, side: Side) -> bool:
        """True if another living thread of this process has used this handle on that side."""
        me = get_native_id()
        native = self._seat.native  # None before the first write
        writers = {native.last_writer} if native is not None else set()
        threads = self._sampling_threads if side == Side.SAMPLES else writers
        return any(
            thread and thread != me and os.path.exists(f"/proc/self/task/{thread}")
            for thread in threads
        )
