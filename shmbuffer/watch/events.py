"""Events of a buffer, derived from the difference of two looks at it.

There is no log of events. What begins and ends between two looks shows only in the counters.

    alive ──▶ dead, in its entry      died: proven, and nobody has reaped it yet
    alive ──▶ no entry, reaped grew   died, and was reaped (or a recovery retired it)
    alive ──▶ no entry                left in good order
    dead  ──▶ no entry                reaped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shmbuffer.watch import units, words

Kind = Literal[
    "joined",
    "left",
    "died",
    "reaped",
    "gone",
    "stopped",
    "continued",
    "rolled back",
    "recovering",
    "recovered",
    "removed",
    "new buffer",
]
Client = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """An event between two looks."""

    at_s: float  # wall clock, when it was seen
    kind: Kind
    text: str  # the client, or a detail


@dataclass(frozen=True)
class Difference:
    """The difference of two looks."""

    kinds: Sequence[tuple[Kind, str]]  # events, in the order in which they are shown
    departed: Sequence[tuple[Client, Kind]]  # clients without an entry now: died, left, or gone


def between(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference:
    """Returns the difference of two looks at one buffer."""
    then = {client["incarnation"]: client for client in before["clients"]}
    here = {client["incarnation"]: client for client in now["clients"]}
    both = [(then[key], here[key]) for key in then.keys() & here.keys()]
    departed = _departed(before, now, [then[key] for key in then if key not in here])
    told: list[tuple[Kind, str]] = []

    def tell(kind: Kind, clients: Iterable[Client]) -> None:
        if names := ", ".join(f"{client['role']} {client['pid']}" for client in clients):
            told.append((kind, names))

    tell("stopped", [new for old, new in both if _stopped(new) and not _stopped(old)])
    tell(
        "continued",
        [new for old, new in both if new["alive"] and _stopped(old) and not _stopped(new)],
    )
    died = [new for old, new in both if old["alive"] and not new["alive"]]
    tell("died", [*died, *(client for client, how in departed if how == "died")])
    tell("gone", [client for client, how in departed if how == "gone"])
    tell("reaped", [client for client, how in departed if how == "reaped"])
    if slots := _grown("rolled_back", before, now):
        text = units.counted(slots, "slot", "slots")
        told.append(("rolled back", f"{text} that the dead had claimed"))
    if now["epoch"] > before["epoch"] or (before["state"] == "RECOVERING" != now["state"]):
        if now["state"] == "RECOVERING":
            told.append(("recovering", "somebody has opened it, with nobody alive"))
        else:
            told.append(("recovered", words.recovered(now)))
    tell("left", [client for client, how in departed if how == "left"])
    tell("joined", [here[key] for key in here if key not in then])
    return Difference(told, departed)


def _departed(
    before: Mapping[str, Any], now: Mapping[str, Any], missing: Sequence[Client]
) -> list[tuple[Client, Kind]]:
    """The counter of reaped clients says how many of the missing died, not which."""
    living = [client for client in missing if client["alive"]]
    reaped = _grown("reaped", before, now) - (len(missing) - len(living))
    how: Kind = "left" if reaped <= 0 else "died" if reaped >= len(living) else "gone"
    return [(client, how if client["alive"] else "reaped") for client in missing]


def _grown(counter: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    grown: int = now["counters"][counter] - before["counters"][counter]
    return grown


def _stopped(client: Client) -> bool:
    return bool(client["alive"] and client["state"] == "stopped")
