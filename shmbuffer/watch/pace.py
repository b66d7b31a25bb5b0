"""Computes the rates of a buffer from consecutive inspections.

Counters only increase, and they keep their values when a process ends. A different uuid shows that
the directory contains a new buffer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shmbuffer.watch import events
from shmbuffer.watch.events import Change, Kind

RATED = (
    "inserts",
    "batches_sampled",
    "items_sampled",
    "updates_applied",
    "updates_stale",
    "redraws",
    "waits",
    "lock_waits",
    "evicted",
)
"""Counters for which a rate per second is computed."""

_KEPT = 240  # number of inspections whose rates are stored
_KEPT_EVENTS = 200
DEPARTED_S = 10.0
"""Time in seconds for which a dead client is still shown after its entry has been freed."""


@dataclass(frozen=True)
class Pace:
    """Rates and events of the time between two inspections."""

    seconds: float  # time between the inspections
    rates: Mapping[str, float]  # per second, by name in `RATED`; empty after the first inspection
    age: float | None  # mean age of sampled items, in writes, or None if no item was sampled
    # Items written and sampled per second, by the incarnation of the client.
    clients: Mapping[int, tuple[float, float]]
    events: tuple[Change, ...] = ()

    @classmethod
    def nothing(cls, *events: Change) -> Pace:
        """Returns a pace without rates, for the first inspection."""
        return cls(0.0, {}, None, {}, events)

    @property
    def ratio(self) -> float | None:
        """Number of items sampled per item written, or None if no item was written."""
        written = self.rates.get("inserts")
        return self.rates["items_sampled"] / written if written else None

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes and the ratio as a dict of JSON values."""
        return {**asdict(self), "ratio": self.ratio}


class Watch:
    """Compares consecutive inspections of a buffer, and stores the latest rates and events."""

    def __init__(self) -> None:
        self.history: deque[Pace] = deque(maxlen=_KEPT)  # oldest first
        self.events: deque[Change] = deque(maxlen=_KEPT_EVENTS)  # oldest first
        self.last: Mapping[str, Any] | None = None
        self._at = 0.0
        self._loss_recorded = False
        self._departed: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._holders: dict[int, tuple[object, float]] = {}

    def add(
        self, found: Mapping[str, Any], at: float | None = None, wall_s: float | None = None
    ) -> Pace:
        """Adds a result of `inspect`, and returns the rates and events since the previous one.

        Args:
            found: result of `inspect`.
            at: time of the inspection on the monotonic clock, or None for now.
            wall_s: time of the inspection in seconds since 1970, or None for now.
        """
        at = time.monotonic() if at is None else at
        wall_s = time.time() if wall_s is None else wall_s
        last, seen = self.last, []
        if last is not None and last["uuid"] != found["uuid"]:
            seen.append(Change(wall_s, "new buffer", "the buffer was replaced by another one"))
            self.history.clear()
            self._departed.clear()
            self._holders.clear()
            last = None
        pace = Pace.nothing(*seen)
        if last is not None and at > self._at:
            change = events.between(last, found)
            seen += [Change(wall_s, kind, text) for kind, text in change.kinds]
            dead = ("died", "reaped")
            self._departed |= {
                client["incarnation"]: (at, client)
                for client, how in change.departed
                if how in dead
            }
            pace = _between(last, found, at - self._at, tuple(seen))
            self.history.append(pace)
        self._update_holders(found, at)
        self.events += seen
        self.last, self._at, self._loss_recorded = found, at, False
        return pace

    def record_loss(self, why: str, kind: Kind = "removed") -> Pace:
        """Records that the buffer can no longer be inspected, unless this is already recorded.

        ``why`` is the text of the event.
        """
        seen = () if self._loss_recorded else (Change(time.time(), kind, why),)
        self.events += seen
        self._loss_recorded = True
        return Pace.nothing(*seen)

    def departed(self) -> list[Mapping[str, Any]]:
        """Returns the dead clients whose entry was freed shortly before the last inspection."""
        self._departed = {
            key: (at, client)
            for key, (at, client) in self._departed.items()
            if self._at - at < DEPARTED_S
        }
        return [client for _, client in self._departed.values()]

    def held_s(self, client: Mapping[str, Any]) -> float:
        """Returns the minimum time in seconds for which a client has held its slots or the lock."""
        _, since = self._holders.get(client["incarnation"], (None, self._at))
        return self._at - since

    def _update_holders(self, found: Mapping[str, Any], at: float) -> None:
        """Records since when each client has held the same slots or the lock.

        A client whose counters have changed has released the lock in the meantime.
        """
        holders: dict[int, tuple[object, float]] = {}
        for client in found["clients"]:
            key = (client["claimed"], client["mutex"] and client["counters"])
            if key == (None, False):
                continue
            before, since = self._holders.get(client["incarnation"], (None, at))
            holders[client["incarnation"]] = (key, since if before == key else at)
        self._holders = holders


def _between(
    before: Mapping[str, Any], now: Mapping[str, Any], seconds: float, seen: tuple[Change, ...]
) -> Pace:
    """Computes the rates between two inspections that are ``seconds`` apart."""
    grown = {name: now["counters"][name] - before["counters"][name] for name in (*RATED, "age_sum")}
    counted = {client["entry"]: client["counters"] for client in before["clients"]}
    clients = {}
    for client in now["clients"]:
        mine, then = client["counters"], counted.get(client["entry"])
        if then is not None:
            clients[client["incarnation"]] = (
                (mine["inserts"] - then["inserts"]) / seconds,
                (mine["items_sampled"] - then["items_sampled"]) / seconds,
            )
    return Pace(
        seconds,
        {name: grown[name] / seconds for name in RATED},
        grown["age_sum"] / grown["items_sampled"] if grown["items_sampled"] > 0 else None,
        clients,
        seen,
    )
