"""A history over time: rates, ratios, events, and gaps without a recorder.

Records are in order, and have two times. The clock since boot measures durations; the wall clock
gives the date. The wall clock may be set. Therefore a recorder's times are counted back from its
last record, which has to lie before the first record of the next recorder.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.upkeep.history import Event, EventKind, History

MOST_POINTS = 400
"""The most points of a line in a picture; more would not be visible."""

UNRECORDED_S = 5.0
"""Time between two recorders that counts as a gap."""


class Timeline:
    """The last seconds of a history that has at least one record; None: all of it."""

    def __init__(self, history: History, last_s: float | None = None) -> None:
        older = _is_before(history.coarse, history.fine[:1])
        records = np.concatenate([history.coarse[older], history.fine])
        if not len(records):
            raise ValueError("a timeline needs a history with at least one record")
        offsets = _wall_clocks(records)
        offset_ns = np.array([offsets[one] for one in records["recorder"].tolist()])
        times_s = (records["boottime_ns"].astype(np.int64) + offset_ns) / 1e9
        begin_s = -np.inf if last_s is None else times_s[-1] - last_s
        first = max(0, int(np.searchsorted(times_s, begin_s)) - 1)
        events = [
            replace(one, time_ns=one.boottime_ns + offsets[one.recorder])
            if one.recorder in offsets
            else one
            for one in history.events
        ]
        self.times_s: Floats = times_s[first:]  # of the records, in seconds since 1970, growing
        # the records, the one before the part included, since rates need it
        self.records: NDArray[np.void] = records[first:]
        # of the part, in order, at times that match those of the records
        self.events = [one for one in events if one.time_s >= begin_s]
        joined = [one for one in events if one.kind == EventKind.JOINED]
        # the first event of every client, by incarnation
        self.known = {one.incarnation: one for one in reversed(joined)}
        # the incarnation of the recorder that saw it last
        self.seen_by = {one.incarnation: one.recorder for one in joined}
        ends = (EventKind.LEFT, EventKind.DIED)
        # the last event of those that ended
        self.ended = {one.incarnation: one for one in events if one.kind in ends}
        same = self.records["recorder"][1:] == self.records["recorder"][:-1]
        self._breaks = np.flatnonzero(~same) + 1

    @property
    def begin_s(self) -> float:
        """Time of the first record."""
        return float(self.times_s[0])

    @property
    def end_s(self) -> float:
        """Time of the last record."""
        return float(self.times_s[-1])

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Beginnings and ends of the gaps."""
        found = [(float(self.times_s[at - 1]), float(self.times_s[at])) for at in self._breaks]
        return [(begin, end) for begin, end in found if end - begin > UNRECORDED_S]

    @property
    def recorder(self) -> Event | None:
        """The client that recorded last."""
        return self.known.get(int(self.records["recorder"][-1]))

    def recorded_until_s(self, incarnation: int) -> float | None:
        """Returns the time of a recorder's last record; None if it has none here."""
        at = np.flatnonzero(self.records["recorder"] == incarnation)
        return float(self.times_s[at[-1]]) if len(at) else None

    def has(self, name: str) -> bool:
        """True if the field was recorded."""
        return name in (self.records.dtype.names or ())

    def values(self, name: str) -> Floats:
        """Returns the values of a field, one for each record."""
        found: Floats = self.records[name].astype(np.float64)
        return found

    def total(self, name: str) -> int:
        """Returns how much a counter has grown, not counting losses in a power cut."""
        grown = np.diff(self.records[name].astype(np.int64))
        return int(grown[grown > 0].sum())

    def lines(self, *names: str) -> tuple[Floats, list[Floats]]:
        """Returns times and the growth of counters; NaN at a recorder's first record."""
        at = self._shown()
        times, grown = self.times_s[at], []
        for name in names:
            steps = np.diff(self.records[name][at].astype(np.int64), prepend=0).astype(np.float64)
            steps[self._is_first(at) | (steps < 0)] = np.nan
            grown.append(steps)
        return times, grown

    def rates(self, *names: str) -> tuple[Floats, list[Floats]]:
        """Returns `lines` per second, using the clock since boot."""
        times, grown = self.lines(*names)
        at = self._shown()
        boot_s = self.records["boottime_ns"][at].astype(np.float64) / 1e9
        passed_s = np.diff(boot_s, prepend=0.0)
        passed_s[self._is_first(at) | (passed_s <= 0)] = np.nan
        return times, [steps / passed_s for steps in grown]

    def levels(self, name: str) -> tuple[Floats, Floats]:
        """Returns times and the values of a field; NaN between two recorders."""
        at = self._shown()
        times, values = self.times_s[at], self.values(name)[at]
        cuts = np.flatnonzero(np.isin(at, self._breaks))
        return np.insert(times, cuts, times[cuts]), np.insert(values, cuts, np.nan)

    def quiet_s(self, name: str) -> float:
        """Returns the seconds since a counter last grew."""
        grown = np.flatnonzero(np.diff(self.records[name].astype(np.int64)) > 0)
        last = self.times_s[grown[-1] + 1] if len(grown) else self.times_s[0]
        return float(self.end_s - last)

    def _shown(self) -> Ints:
        """Returns the indices of the records on a line: evenly in time, and around each gap."""
        ends = [0, len(self.times_s) - 1, *self._breaks, *(self._breaks - 1)]
        even = np.linspace(self.times_s[0], self.times_s[-1], MOST_POINTS)
        found = np.searchsorted(self.times_s, even[1:-1])
        return np.unique(np.concatenate([np.array(ends, np.int64), found]))

    def _is_first(self, at: Ints) -> Flags:
        found: Flags = np.isin(at, [0, *self._breaks])
        return found


def _is_before(records: NDArray[np.void], first: NDArray[np.void]) -> Flags:
    """Marks the records written before another one; incarnations of a directory only grow."""
    if not len(first):
        return np.ones(len(records), np.bool_)
    earlier = records["recorder"] < first["recorder"][0]
    same = records["recorder"] == first["recorder"][0]
    found: Flags = earlier | same & (records["boottime_ns"] < first["boottime_ns"][0])
    return found


def _wall_clocks(records: NDArray[np.void]) -> dict[int, int]:
    """Returns the nanoseconds from the clock since boot to the wall clock, by recorder."""
    found: dict[int, int] = {}
    later_ns = 2**63
    ends = np.flatnonzero(records["recorder"][1:] != records["recorder"][:-1]) + 1
    for begin, end in reversed([*pairwise([0, *ends.tolist(), len(records)])]):
        first_ns, last_ns = (int(records["boottime_ns"][at]) for at in (begin, end - 1))
        offset_ns = int(records["time_ns"][end - 1]) - last_ns
        offset_ns = min(offset_ns, later_ns - 10**6 - last_ns)
        found[int(records["recorder"][begin])] = offset_ns
        later_ns = first_ns + offset_ns
    return found
