"""Computes rates, events and gaps from the recorded history.

Records are sorted, and each contains the time on two clocks. The clock since boot measures
durations, and the wall clock gives the date. The wall clock may be set while records are written.
Therefore only the date of the last record of each recorder is used, and the times of its other
records are computed backwards from this date. If this date is later than that of the first record
of the next recorder, all records of the recorder are moved to an earlier time.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.upkeep.history import Event, EventKind, History

MOST_POINTS = 400
"""Maximum number of points per line in a picture. More would not be visible."""

UNRECORDED_S = 5.0
"""Minimum time in seconds between the records of two recorders that is shown as a gap."""


class Timeline:
    """The last ``last_s`` seconds of a history, or the whole history for None.

    Raises:
        ValueError: the history is empty.
    """

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
        # Times of the records in seconds since 1970, increasing.
        self.times_s: Floats = times_s[first:]
        # Records of the selected part, and the record before it, which is needed for rates.
        self.records: NDArray[np.void] = records[first:]
        # Sorted events of the selected part. Their times are comparable with those of the records.
        self.events = [one for one in events if one.time_s >= begin_s]
        joined = [one for one in events if one.kind == EventKind.JOINED]
        # First event of each client, by its incarnation.
        self.known = {one.incarnation: one for one in reversed(joined)}
        # Incarnation of the recorder that last recorded the client as joined, by its incarnation.
        self.seen_by = {one.incarnation: one.recorder for one in joined}
        ends = (EventKind.LEFT, EventKind.DIED)
        # Last event of each client that has ended, by its incarnation.
        self.ended = {one.incarnation: one for one in events if one.kind in ends}
        same = self.records["recorder"][1:] == self.records["recorder"][:-1]
        self._breaks = np.flatnonzero(~same) + 1

    @property
    def begin_s(self) -> float:
        """Time of the first record in seconds since 1970."""
        return float(self.times_s[0])

    @property
    def end_s(self) -> float:
        """Time of the last record in seconds since 1970."""
        return float(self.times_s[-1])

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Start and end times of the gaps between recorders, in seconds since 1970."""
        found = [(float(self.times_s[at - 1]), float(self.times_s[at])) for at in self._breaks]
        return [(begin, end) for begin, end in found if end - begin > UNRECORDED_S]

    @property
    def recorder(self) -> Event | None:
        """First event of the client that wrote the last record, or None if it is unknown."""
        return self.known.get(int(self.records["recorder"][-1]))

    def recorded_until_s(self, incarnation: int) -> float | None:
        """Returns the time of a recorder's last record in the timeline, or None without any."""
        at = np.flatnonzero(self.records["recorder"] == incarnation)
        return float(self.times_s[at[-1]]) if len(at) else None

    def has(self, name: str) -> bool:
        """True if the records contain this field."""
        return name in (self.records.dtype.names or ())

    def values(self, name: str) -> Floats:
        """Returns the values of a field as an array with one element per record."""
        found: Floats = self.records[name].astype(np.float64)
        return found

    def total(self, name: str) -> int:
        """Returns the increase of a counter. Decreases, after a power cut, are ignored."""
        grown = np.diff(self.records[name].astype(np.int64))
        return int(grown[grown > 0].sum())

    def lines(self, *names: str) -> tuple[Floats, list[Floats]]:
        """Returns points for lines of the increases of counters.

        The result contains the times of the points and, for each counter, the increase since the
        previous point. It is NaN at the first record of each recorder.
        """
        at = self._shown()
        times, grown = self.times_s[at], []
        for name in names:
            steps = np.diff(self.records[name][at].astype(np.int64), prepend=0).astype(np.float64)
            steps[self._is_first(at) | (steps < 0)] = np.nan
            grown.append(steps)
        return times, grown

    def rates(self, *names: str) -> tuple[Floats, list[Floats]]:
        """Returns the same points as `lines`, with increases per second of the clock since boot."""
        times, grown = self.lines(*names)
        at = self._shown()
        boot_s = self.records["boottime_ns"][at].astype(np.float64) / 1e9
        passed_s = np.diff(boot_s, prepend=0.0)
        passed_s[self._is_first(at) | (passed_s <= 0)] = np.nan
        return times, [steps / passed_s for steps in grown]

    def levels(self, name: str) -> tuple[Floats, Floats]:
        """Returns points for a line of the values of a field, with a NaN between two recorders."""
        at = self._shown()
        times, values = self.times_s[at], self.values(name)[at]
        cuts = np.flatnonzero(np.isin(at, self._breaks))
        return np.insert(times, cuts, times[cuts]), np.insert(values, cuts, np.nan)

    def quiet_s(self, name: str) -> float:
        """Returns the time from the last increase of a counter to the last record, in seconds."""
        grown = np.flatnonzero(np.diff(self.records[name].astype(np.int64)) > 0)
        last = self.times_s[grown[-1] + 1] if len(grown) else self.times_s[0]
        return float(self.end_s - last)

    def _shown(self) -> Ints:
        """Returns the indices of the records to draw.

        They are evenly spaced in time, and include the first and last record of each recorder.
        """
        ends = [0, len(self.times_s) - 1, *self._breaks, *(self._breaks - 1)]
        even = np.linspace(self.times_s[0], self.times_s[-1], MOST_POINTS)
        found = np.searchsorted(self.times_s, even[1:-1])
        return np.unique(np.concatenate([np.array(ends, np.int64), found]))

    def _is_first(self, at: Ints) -> Flags:
        found: Flags = np.isin(at, [0, *self._breaks])
        return found


def _is_before(records: NDArray[np.void], first: NDArray[np.void]) -> Flags:
    """Returns True for each record that is older than ``first``, an array of at most one record.

    Records of one recorder are compared by the clock since boot. Recorders are compared by their
    incarnations, which only increase.
    """
    if not len(first):
        return np.ones(len(records), np.bool_)
    earlier = records["recorder"] < first["recorder"][0]
    same = records["recorder"] == first["recorder"][0]
    found: Flags = earlier | same & (records["boottime_ns"] < first["boottime_ns"][0])
    return found


def _wall_clocks(records: NDArray[np.void]) -> dict[int, int]:
    """Returns the offset of the wall clock from the clock since boot, in ns, for each recorder.

    If the times of a recorder would overlap with those of the next one, its offset is reduced.
    """
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
