"""How a buffer is used: what is different from one look to the next.

Counters only grow, and outlive the process that counted; a directory that was removed and made
again, which another uuid tells, starts over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shmbuffer.watch import changes
from shmbuffer.watch.changes import Change, Kind

#: What is counted per second, under the counters' names.
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
_KEPT = 240  # looks
_KEPT_EVENTS = 200
DEPARTED_S = 10.0
"""How long a client that died is shown after its entry was freed: a coordinator does that at
once, and nobody would see who it was."""


@dataclass(frozen=True)
class Pace:
    """What happened between two looks."""

    seconds: float  # between them
    rates: Mapping[str, float]  # per second, by the names in `RATED`; none after the first look
    # mean age of an item when it was drawn, counted in writes; None if none was drawn
    age: float | None
    clients: Mapping[int, tuple[float, float]]  # items written and drawn per second, by incarnation
    events: tuple[Change, ...] = ()  # who came and went, and what else happened

    @classmethod
    def nothing(cls, *events: Change) -> Pace:
        """Before the second look."""
        return cls(0.0, {}, None, {}, events)

    @property
    def ratio(self) -> float | None:
        """Items drawn for each that was written; None if none was."""
        written = self.rates.get("inserts")
        return self.rates["items_sampled"] / written if written else None

    def to_json(self) -> dict[str, Any]:
        """As a dict of plain values."""
        return {**asdict(self), "ratio": self.ratio}


class Watch:
    """Looks, one after the other, and what happened between them."""

    def __init__(self) -> None:
        self.history: deque[Pace] = deque(maxlen=_KEPT)  # the paces of the last looks, oldest first
        self.events: deque[Change] = deque(maxlen=_KEPT_EVENTS)  # the last of them, oldest first
        self.last: Mapping[str, Any] | None = None
        self._at = 0.0
        self._is_lost = False
        self._departed: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._held: dict[int, tuple[object, float]] = {}

    def see(
        self, found: Mapping[str, Any], at: float | None = None, wall_s: float | None = None
    ) -> Pace:
        """Takes in what `inspect` has found."""
        at = time.monotonic() if at is None else at
        wall_s = time.time() if wall_s is None else wall_s
        last, seen = self.last, []
        if last is not None and last["uuid"] != found["uuid"]:
            seen.append(Change(wall_s, "new buffer", "another one is in its place"))
            self.history.clear()
            self._departed.clear()
            self._held.clear()
            last = None
        pace = Pace.nothing(*seen)
        if last is not None and at > self._at:
            change = changes.between(last, found)
            seen += [Change(wall_s, kind, text) for kind, text in change.kinds]
            dead = ("died", "reaped")
            self._departed |= {
                client["incarnation"]: (at, client)
                for client, how in change.departed
                if how in dead
            }
            pace = _between(last, found, at - self._at, tuple(seen))
            self.history.append(pace)
        self._note_holds(found, at)
        self.events += seen
        self.last, self._at, self._is_lost = found, at, False
        return pace

    def lose(self, why: str, kind: Kind = "removed", wall_s: float | None = None) -> Pace:
        """Takes in that there is nothing to be found any more, and why."""
        seen = () if self._is_lost else (Change(wall_s or time.time(), kind, why),)
        self.events += seen
        self._is_lost = True
        return Pace.nothing(*seen)

    def departed(self) -> list[Mapping[str, Any]]:
        """Clients that died and whose entry was freed not long before the last look."""
        self._departed = {
            key: (at, client)
            for key, (at, client) in self._departed.items()
            if self._at - at < DEPARTED_S
        }
        return [client for _, client in self._departed.values()]

    def held_s(self, client: Mapping[str, Any]) -> float:
        """For how many seconds, at least, a client has been seen with what it holds now."""
        _, since = self._held.get(client["incarnation"], (None, self._at))
        return self._at - since

    def _note_holds(self, found: Mapping[str, Any], at: float) -> None:
        """A lock that is held at two looks was held in between only if its holder did nothing."""
        held: dict[int, tuple[object, float]] = {}
        for client in found["clients"]:
            key = (client["claimed"], client["mutex"] and client["counters"])
            if key == (None, False):
                continue
            before, since = self._held.get(client["incarnation"], (None, at))
            held[client["incarnation"]] = (key, since if before == key else at)
        self._held = held


def _between(
    before: Mapping[str, Any], now: Mapping[str, Any], seconds: float, seen: tuple[Change, ...]
) -> Pace:
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
