"""Derives the events of a buffer from the difference between two inspections.

There is no log of events. A client that joins and ends between two inspections is visible only in
the counters. The table shows how the event of a client is derived from its state at both
inspections.

    alive ──▶ dead                        died; its registry entry has not been freed yet
    alive ──▶ no entry, reaped increased  died and was reaped, or retired by a recovery
    alive ──▶ no entry                    left: it closed its handle
    alive ──▶ no entry                    left or died, if fewer were reaped than are missing
    dead  ──▶ no entry                    reaped

"Dead" and "stopped" are states of `ProcessState`; clients in all other states are alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shmbuffer.watch import units, words
from shmbuffer.watch.words import STOPPED

Kind = Literal[
    "joined",
    "left",
    "died",
    "reaped",
    "left or died",
    "stopped",
    "continued",
    "rolled back",
    "recovering",
    "recovered",
    "unreadable",
    "removed",
    "new buffer",
]
Client = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """An event that happened between two inspections."""

    at_s: float  # wall-clock time at which it was detected
    kind: Kind
    text: str  # names of the clients, or a detail


@dataclass(frozen=True)
class Difference:
    """The events between two inspections, and the clients that ended."""

    kinds: Sequence[tuple[Kind, str]]  # events, in the order in which they are shown
    departed: Sequence[tuple[Client, Kind]]  # clients that no longer have an entry


def between(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference:
    """Compares two inspections of the same buffer, the earlier one first."""
    then = {client["incarnation"]: client for client in before["clients"]}
    here = {client["incarnation"]: client for client in now["clients"]}
    both = [(then[key], here[key]) for key in then.keys() & here.keys()]
    departed = _departed(before, now, [then[key] for key in then if key not in here])
    events: list[tuple[Kind, str]] = []

    def tell(kind: Kind, clients: Iterable[Client]) -> None:
        if names := ", ".join(f"{client['role']} {client['pid']}" for client in clients):
            events.append((kind, names))

    tell("stopped", [new for old, new in both if new["state"] == STOPPED != old["state"]])
    tell(
        "continued",
        [new for old, new in both if new["alive"] and old["state"] == STOPPED != new["state"]],
    )
    died = [new for old, new in both if old["alive"] and not new["alive"]]
    tell("died", [*died, *(client for client, how in departed if how == "died")])
    tell("left or died", [client for client, how in departed if how == "left or died"])
    tell("reaped", [client for client, how in departed if how == "reaped"])
    if slots := _grown("rolled_back", before, now):
        text = units.counted(slots, "slot", "slots")
        events.append(("rolled back", f"{text} claimed by dead clients"))
    if now["epoch"] > before["epoch"] or (before["state"] == "RECOVERING" != now["state"]):
        if now["state"] == "RECOVERING":
            events.append(
                ("recovering", "a process is recovering the buffer, which has no living client")
            )
        else:
            events.append(("recovered", words.recovered(now)))
    tell("left", [client for client, how in departed if how == "left"])
    tell("joined", [here[key] for key in here if key not in then])
    return Difference(events, departed)


def _departed(
    before: Mapping[str, Any], now: Mapping[str, Any], missing: Sequence[Client]
) -> list[tuple[Client, Kind]]:
    """Returns how each missing client ended.

    For clients that were alive, this is inferred from the increase of the counter of reaped
    clients. If the counter does not tell which of them died, the result is "left or died".
    """
    living = [client for client in missing if client["alive"]]
    reaped = _grown("reaped", before, now) - (len(missing) - len(living))
    how: Kind = "left" if reaped <= 0 else "died" if reaped >= len(living) else "left or died"
    return [(client, how if client["alive"] else "reaped") for client in missing]


def _grown(counter: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    grown: int = now["counters"][counter] - before["counters"][counter]
    return grown
