"""Shows the shards of a sharded buffer that are on this machine, and the sums of their counters.

    run/            the base directory (``scratch_dir`` of `ShardedReplayBuffer`)
    run/NODE/       a shard, which is a buffer whose settings contain the name of its node

Shards on other machines are included only in ``rb.stats()``, which sends requests to their keepers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmbuffer.errors import ShmBufferError
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.watch import tables, units, words
from shmbuffer.watch.pace import RATED, Pace, Watch
from shmbuffer.watch.tables import Styled, Table

NODE = "node"
"""Key of the node's name in the ``extra`` settings of a shard."""

ELSEWHERE = "shards on other machines are not shown; rb.stats() includes them"

SUMMED = ("length", "elements", "write_count", "inserts", "items_sampled", "updates_applied")
"""Counters that are summed over all shards."""

Inspections = Mapping[str, Mapping[str, Any]]


def inspect_shards(
    base: str | os.PathLike[str], *, live_bytes: bool = True
) -> dict[str, dict[str, Any]]:
    """Inspects the shards below the directory ``base``.

    Returns a dict from the names of the nodes to the results of `inspect`. For a shard that cannot
    be read, the result is a dict with its ``path`` and the ``error``, under the name of its
    directory. The dict is empty if no shard can be read, or if ``base`` itself is a buffer.
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
            except ShmBufferError as error:  # the shard is being created, or is damaged
                found[path.name] = {"path": str(path), "error": str(error)}
            else:
                if NODE in one["settings"]["extra"]:
                    found[one["settings"]["extra"][NODE]] = one
    return found if any("error" not in one for one in found.values()) else {}


def totals(found: Inspections) -> dict[str, int]:
    """Returns the sums of the counters of all readable shards."""
    there = [one["counters"] for one in found.values() if "error" not in one]
    return {name: sum(counters[name] for counters in there) for name in SUMMED}


def to_json(base: str, found: Inspections) -> dict[str, Any]:
    """Returns the shards and their totals as JSON values."""
    return {"path": base, "shards": found, "total": totals(found)}


def contents(base: str, found: Inspections) -> Table:
    """Returns a table of the shards with their items, counters and disk usage."""
    there = [one for one in found.values() if "error" not in one]
    sums = {name: sum(one[name] for one in there) for name in ("disk_bytes", "epoch")}
    columns = (" items", " capacity", " full", " written", " sampled", " on disk", " recoveries")
    return _by_node(base, found, columns, _content_cells, {**sums, "counters": totals(found)})


def _content_cells(found: Mapping[str, Any]) -> tuple[object, ...]:
    counters = found["counters"]
    items, capacity = counters["length"], counters["elements"]
    full = f"{items / capacity:.1%}" if capacity else None
    flow = counters["write_count"], counters["items_sampled"]
    return items, capacity, full, *flow, units.size(found["disk_bytes"]), found["epoch"]


def _by_node(
    base: str,
    found: Inspections,
    columns: Sequence[str],
    cells: Callable[[Mapping[str, Any]], Sequence[object]],
    total: Mapping[str, Any],  # argument of ``cells`` for the sum of all shards
) -> Table:
    """Returns a table with one line per shard and a last line for their sum.

    Each line contains the result of ``cells`` and the clients of the shard, or its error.
    """
    rows = [
        (node, *("-",) * len(columns), Styled(one["error"], "red"))
        if "error" in one
        else (node, *cells(one), words.use(one))
        for node, one in found.items()
    ]
    title = f"{base}: {units.counted(len(found), 'shard', 'shards')}"
    return Table(title, ("node", *columns, "used by"), [*rows, ("all", *cells(total), "")])


class ShardsWatch:
    """Monitors all shards below a directory for `top`, as `BufferWatch` does for one buffer."""

    footnote = ELSEWHERE

    def __init__(self, base: str) -> None:
        self.base = base
        self._watches: dict[str, Watch] = {}
        self._paces: dict[str, Pace] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def update(self) -> None:
        """Inspects all shards. A shard that was removed is still shown, with an error."""
        now = inspect_shards(self.base, live_bytes=False)
        gone = {"path": self.base, "error": "the buffer was removed"}
        now |= {node: gone for node in self.found if node not in now}
        for node, found in now.items():
            watch = self._watches.setdefault(node, Watch())
            lost = found.get("error")
            self._paces[node] = (
                watch.add(found) if lost is None else watch.record_loss(lost, "unreadable")
            )
        self.found = now

    try_update = update

    def to_json(self) -> dict[str, Any]:
        """Returns the last inspection as JSON values."""
        paces = {node: pace.to_json() for node, pace in self._paces.items()}
        return {**to_json(self.base, self.found), "pace": paces, "rates": self.rates()}

    def rates(self) -> dict[str, float]:
        """Returns the sums of the rates of all shards, or an empty dict after one inspection."""
        seen = [pace.rates for pace in self._paces.values() if pace.rates]
        return {name: sum(rates[name] for rates in seen) for name in RATED} if seen else {}

    def screen(self) -> Any:
        """Returns the last inspection as a rich renderable that fills the terminal."""
        from rich.console import Group

        shown = [tables.drawn(table, compact=True) for table in self.tables() if table.rows]
        return Group(*shown, self.footnote)

    def tables(self) -> list[Table]:
        """Returns a table of the shards and their sum, and a table of the latest events."""
        found = {
            node: {**one, "rates": self._paces[node].rates} for node, one in self.found.items()
        }
        total = {"counters": totals(self.found), "rates": self.rates()}
        columns = ("full", " items", " written/s", " sampled/s", " updates/s")
        return [_by_node(self.base, found, columns, _rate_cells, total), self._events()]

    def _events(self) -> Table:
        """Returns a table of the latest events. The newest one is last."""
        seen = [(event, node) for node, one in self._watches.items() for event in one.events]
        newest = sorted(seen, key=lambda one: one[0].at_s)[-_MOST_EVENTS:]
        return Table("events", ("", "", ""), [(node, e.kind, e.text) for e, node in newest])


_MOST_EVENTS = 10


def _rate_cells(found: Mapping[str, Any]) -> tuple[object, ...]:
    counters, rates = found["counters"], found["rates"]
    items, capacity = counters["length"], counters["elements"]
    full = items / capacity if capacity else 0.0
    shown = ("inserts", "items_sampled", "updates_applied")
    per_s = (units.rate(rates.get(name)) for name in shown)
    return f"{units.gauge(full, 12)} {full:.1%}", items, *per_s
