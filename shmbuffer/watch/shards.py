"""The shards of a buffer over several nodes that this machine sees, a line each, and their sum.

    run/            the base directory (``scratch_dir`` of `ShardedReplayBuffer`)
    run/NODE/       a shard: a buffer whose settings name its node, as its keeper has recorded it

What lies on other machines cannot be read as files: there ``rb.stats()`` asks the keepers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmbuffer.errors import ShmBufferError
from shmbuffer.memory import layout
from shmbuffer.memory.inspect import inspect
from shmbuffer.watch import tables, terminal, units, words
from shmbuffer.watch.pace import RATED, Pace, Watch
from shmbuffer.watch.tables import Styled, Table

NODE = "node"
"""Where the settings of a shard have the name of its node, among ``extra``."""

ELSEWHERE = "shards of other machines are not seen from here: rb.stats() asks all of them"

SUMMED = ("length", "elements", "write_count", "inserts", "items_sampled", "updates_applied")
"""Counters whose sum says something of all shards."""

Looked = Mapping[str, Mapping[str, Any]]


def look(base: str | os.PathLike[str], *, live_bytes: bool = True) -> dict[str, dict[str, Any]]:
    """What each shard below a directory says of itself, by the name of its node.

    Returns:
        What `inspect` returns, or ``path`` and ``error`` of one that cannot be read now. Empty
        where the directory is a buffer itself, or holds none with the name of a node.
    """
    found: dict[str, dict[str, Any]] = {}
    if os.path.isfile(Path(base) / layout.CONTROL):
        return found
    with suppress(OSError), os.scandir(base) as entries:
        for path in sorted(Path(one) for one in entries if one.is_dir(follow_symlinks=False)):
            if not os.path.isfile(path / layout.CONTROL):
                continue
            try:
                one = inspect(path, live_bytes=live_bytes)
            except ShmBufferError as error:  # is being made, or is damaged
                found[path.name] = {"path": str(path), "error": str(error)}
            else:
                if NODE in one["settings"]["extra"]:
                    found[one["settings"]["extra"][NODE]] = one
    return found if any("error" not in one for one in found.values()) else {}


def totals(found: Looked) -> dict[str, int]:
    """The sums of the counters of all shards that can be read."""
    there = [one["counters"] for one in found.values() if "error" not in one]
    return {name: sum(counters[name] for counters in there) for name in SUMMED}


def to_json(base: str, found: Looked) -> dict[str, Any]:
    """All of them as plain values."""
    return {"path": base, "shards": found, "total": totals(found)}


def held(base: str, found: Looked) -> Table:
    """What the shards hold."""
    rows = [
        (node, *_held(one["counters"]), units.size(one["disk_bytes"]), one["epoch"], *_used(one))
        if "error" not in one
        else (node, *("-",) * 7, Styled(one["error"], "red"))
        for node, one in found.items()
    ]
    there = [one for one in found.values() if "error" not in one]
    disk = units.size(sum(one["disk_bytes"] for one in there))
    rows.append(("all", *_held(totals(found)), disk, sum(one["epoch"] for one in there), ""))
    columns = (" items", " room", " full", " written", " drawn", " on disk", " recoveries")
    return Table(f"{base}: {_counted(found)}", ("node", *columns, "used by"), rows)


def _held(counters: Mapping[str, Any]) -> tuple[object, ...]:
    items, room = counters["length"], counters["elements"]
    return (
        items,
        room,
        f"{items / room:.1%}" if room else None,
        counters["write_count"],
        counters["items_sampled"],
    )


def _used(found: Mapping[str, Any]) -> tuple[Styled]:
    text, colour = words.use(found)
    return (Styled(text, colour),)


def _counted(found: Looked) -> str:
    return units.counted(len(found), "shard", "shards")


class ShardsWatch:
    """Looks at the shards, one after the other, and what happened between them.

    Args:
        base: the directory above the shards.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._watches: dict[str, Watch] = {}
        self._paces: dict[str, Pace] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def look(self) -> None:
        """Take in what is there now; one that was there and is not says so."""
        now = look(self.base, live_bytes=False)
        gone = {"path": self.base, "error": "there is no buffer here any more"}
        now |= {node: gone for node in self.found if node not in now}
        for node, found in now.items():
            watch = self._watches.setdefault(node, Watch())
            lost = found.get("error")
            self._paces[node] = watch.see(found) if lost is None else watch.lose(lost, "gone")
        self.found = now

    def to_json(self) -> dict[str, Any]:
        """What was seen, as plain values."""
        paces = {node: pace.to_json() for node, pace in self._paces.items()}
        return {**to_json(self.base, self.found), "pace": paces, "rates": self.rates()}

    def rates(self) -> dict[str, float]:
        """The sums of what all shards did per second; none after the first look."""
        seen = [pace.rates for pace in self._paces.values() if pace.rates]
        return {name: sum(rates[name] for rates in seen) for name in RATED} if seen else {}

    def tables(self) -> list[Table]:
        """A line a shard, their sum, and what the last looks have seen."""
        rows = [
            (node, *_filled(one["counters"]), *_paced(self._paces[node].rates), *_used(one))
            if "error" not in one
            else (node, *("-",) * 5, Styled(one["error"], "red"))
            for node, one in self.found.items()
        ]
        rows.append(("all", *_filled(totals(self.found)), *_paced(self.rates()), ""))
        columns = ("full", " items", " written/s", " drawn/s", " priorities/s")
        title = f"{self.base}: {_counted(self.found)}"
        return [Table(title, ("node", *columns, "used by"), rows), self._events()]

    def _events(self) -> Table:
        """What happened in the shards, the newest last."""
        seen = [(event, node) for node, one in self._watches.items() for event in one.events]
        newest = sorted(seen, key=lambda one: one[0].at_s)[-_MOST_EVENTS:]
        return Table("events", ("", "", ""), [(node, e.kind, e.text) for e, node in newest])


_MOST_EVENTS = 10


def _filled(counters: Mapping[str, Any]) -> tuple[object, ...]:
    items, room = counters["length"], counters["elements"]
    full = items / room if room else 0.0
    return f"{units.gauge(full, 12)} {full:.1%}", items


def _paced(rates: Mapping[str, float]) -> list[str]:
    shown = ("inserts", "items_sampled", "updates_applied")
    return [units.rate(rates.get(name)) for name in shown]


def looks(
    watch: ShardsWatch, interval_s: float, pause: Callable[[float], bool] = terminal.sleep
) -> Iterator[None]:
    """Looks again and again, until a pause says so."""
    while not pause(interval_s):
        watch.look()
        yield


def fill_screen(watch: ShardsWatch, interval_s: float, pause: Callable[[float], bool]) -> None:
    """Shows each look on the whole terminal, in place of the one before; needs rich."""
    from rich.console import Group
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:

        def show() -> None:
            shown = [tables.drawn(table, compact=True) for table in watch.tables() if table.rows]
            live.update(Group(*shown, ELSEWHERE), refresh=True)

        show()
        for _ in looks(watch, interval_s, pause):
            show()
