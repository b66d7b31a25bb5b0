"""How fast a buffer is used: what its counters say at one look and at the next.

Counters only grow, and outlive the process that counted; a directory that was removed and made
again, which another uuid tells, begins anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: What is counted per second, under the counters' names.
RATED = (
    "inserts",
    "samples",
    "sampled",
    "updates_applied",
    "updates_stale",
    "redraws",
    "waits",
    "evicted",
)
_KEPT = 240  # looks


@dataclass(frozen=True)
class Pace:
    """What happened between two looks.

    Attributes:
        seconds: between them.
        rates: per second, by the names in `RATED`; none after the first look.
        age: mean age of an item when it was drawn, counted in writes; None if none was drawn.
        clients: items written and drawn per second, by incarnation.
    """

    seconds: float
    rates: Mapping[str, float]
    age: float | None
    clients: Mapping[int, tuple[float, float]]

    @classmethod
    def nothing(cls) -> Pace:
        """Before the second look."""
        return cls(0.0, {}, None, {})

    def to_json(self) -> dict[str, Any]:
        """As a dict of plain values."""
        return asdict(self)


class Watch:
    """Looks, one after the other, and the rates between them.

    Attributes:
        history: the last of them, oldest first.
    """

    def __init__(self) -> None:
        self.history: deque[Pace] = deque(maxlen=_KEPT)
        self._last: Mapping[str, Any] | None = None
        self._at = 0.0

    def see(self, found: Mapping[str, Any], at: float | None = None) -> Pace:
        """Takes in what `inspect` has found.

        Args:
            found: see there.
            at: seconds, of a clock that does not jump; None is now.
        """
        at = time.monotonic() if at is None else at
        last = self._last
        if last is not None and last["uuid"] != found["uuid"]:
            self.history.clear()
            last = None
        pace = Pace.nothing()
        if last is not None and at > self._at:
            pace = _between(last, found, at - self._at)
            self.history.append(pace)
        self._last, self._at = found, at
        return pace


def _between(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> Pace:
    grown = {name: now["counters"][name] - before["counters"][name] for name in (*RATED, "age_sum")}
    counted = {client["entry"]: client["counters"] for client in before["clients"]}
    clients = {}
    for client in now["clients"]:
        mine, then = client["counters"], counted.get(client["entry"])
        if then is not None:
            clients[client["incarnation"]] = (
                (mine["inserts"] - then["inserts"]) / seconds,
                (mine["sampled"] - then["sampled"]) / seconds,
            )
    return Pace(
        seconds,
        {name: grown[name] / seconds for name in RATED},
        grown["age_sum"] / grown["sampled"] if grown["sampled"] > 0 else None,
        clients,
    )
