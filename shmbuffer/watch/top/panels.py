"""Creates the tables that the command `top` displays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from shmbuffer.watch import tables, units, words
from shmbuffer.watch.pace import Pace, Watch
from shmbuffer.watch.tables import Styled, Table

NARROW = 100
"""Terminal width in columns below which the memory of the clients is not shown."""

_PLAIN_WIDTH = 100  # width of the output without a terminal
_MOST_ROWS = 10  # maximum number of rows of a histogram that is shown as a table
_MOST_BARS = 32  # maximum number of bars of a histogram that is shown as a line
_HARDLY = 0.01  # share of the items below which bars at the lower end are combined
_SILENT_S = 10.0  # idle time in seconds after which a client is highlighted
_BARS = "green"


def plain(found: Mapping[str, Any], pace: Pace, watch: Watch) -> list[Table]:
    """Returns all tables in order, for output that is printed once and not updated."""
    if "error" in found:
        return [tables.pairs(found["path"], {"buffer": found["error"]}), events(watch)]
    lines = buffer(found, watch, _PLAIN_WIDTH, histogram=False).rows
    return [
        Table(found["path"], (), [("state", state(found)), *lines]),
        rates(watch.history, 40),
        quiet(watch.history),
        clients(found, pace, watch, _PLAIN_WIDTH),
        priorities(found),
        events(watch),
    ]


def state(found: Mapping[str, Any]) -> Styled:
    """Describes the state of the buffer and its clients."""
    if "error" in found:
        return Styled("not readable", "red")
    use = words.use(found)
    return Styled(f"{found['state']}: {use.value}", use.style)


def buffer(found: Mapping[str, Any], watch: Watch, width: int, *, histogram: bool) -> Table:
    """Returns a table with the items, size, limits and recoveries of a buffer.

    With ``histogram`` it contains a line with the distribution of the priorities, for which the
    terminal has no separate table.
    """
    if "error" in found:
        assert watch.last is not None  # an error of the first inspection would have been raised
        counters = watch.last["counters"]
        last = f"{counters['length']:,} of {counters['elements']:,} items, {words.size(watch.last)}"
        return tables.pairs("", {"now": Styled(found["error"], "red"), "last seen": last})
    counters = found["counters"]
    items, elements = counters["length"], counters["elements"]
    gauge = units.gauge(items / elements, min(30, width // 4))
    lines: dict[str, object] = {
        "items": f"{gauge} {items / elements:.1%}, {items:,} of {elements:,}; "
        f"{counters['write_count']:,} written",
        "size": words.size(found),
        "records": words.records(found),
        **words.status(found),
        "after deaths": _repairs(counters),
        "priorities": _histogram_line(found.get("priorities")) if histogram else None,
    }
    return tables.pairs("", {k: v for k, v in lines.items() if v})


def _repairs(counters: Mapping[str, Any]) -> str:
    done = {
        "reaped": ("client reaped", "clients reaped"),
        "rolled_back": ("slot rolled back", "slots rolled back"),
        "rolled_forward": ("slot rolled forward", "slots rolled forward"),
        "repairs": ("lock repaired", "locks repaired"),
    }
    return ", ".join(
        units.counted(counters[key], *names) for key, names in done.items() if counters[key]
    )


def rates(history: Sequence[Pace], width: int) -> Table:
    """Returns a table with the current rates and bars of the last ``width`` rates.

    Rates that have always been 0 are left out, except the most important ones.
    """
    rows: list[Sequence[object]] = []
    if not history:
        return Table("rates", ("", " now"), rows)
    spanned = units.span(sum(one.seconds for one in list(history)[-width:]))
    columns = ("", " now", f"the last {spanned}", " most")
    for name, key, style in _SHOWN:
        if key in _ALWAYS or _happens(history, key):
            values = [one.rates[key] for one in history]
            rows.append(_rate(Styled(name, style if values[-1] else ""), values, width))
    for name, series in (
        ("samples per insert", [one.ratio for one in history]),
        ("age when sampled, in writes", [one.age for one in history]),
    ):
        if any(value is not None for value in series[-width:]):
            rows.append(_rate(name, series, width))
    return Table("rates", columns, rows)


def quiet(history: Sequence[Pace]) -> Table:
    """Returns a table with one line: the names of the rates that have always been 0."""
    names = [
        name.removesuffix("/s")
        for name, key, _ in _SHOWN
        if key not in _ALWAYS and not _happens(history, key)
    ]
    return tables.pairs("", {"never": Styled(", ".join(names), "dim")} if names else {})


def _happens(history: Sequence[Pace], key: str) -> bool:
    return any(one.rates[key] for one in history)


def _rate(name: object, values: Sequence[float | None], width: int) -> Sequence[object]:
    shown = values[-width:]
    most = max((value for value in shown if value is not None), default=None)
    bars = Styled(units.bars(shown, width), _BARS)
    return name, units.rate(shown[-1]), bars, units.rate(most)


_SHOWN = (
    ("items written/s", "inserts", ""),
    ("items sampled/s", "items_sampled", ""),
    ("batches sampled/s", "batches_sampled", ""),
    ("priority updates/s", "updates_applied", ""),
    ("stale updates/s", "updates_stale", "yellow"),
    ("redraws/s", "redraws", "yellow"),
    ("waits for a slot/s", "waits", "yellow"),
    ("waits for the lock/s", "lock_waits", "yellow"),
    ("evictions/s", "evicted", ""),
)
_ALWAYS = ("inserts", "items_sampled", "batches_sampled", "updates_applied")


def _histogram_line(histogram: Mapping[str, float] | None) -> str | None:
    """Draws a histogram of priorities as one line. Combines its sparse lower end into one bar."""
    if not histogram:
        return None
    powers = {
        round(math.log2(float(edge))): share for edge, share in histogram.items() if edge != "0"
    }
    if not powers:
        return "all 0"
    low, high = min(powers), max(powers)
    shares = [powers.get(power, 0.0) for power in range(low, high + 1)]
    shares[0] += histogram.get("0", 0.0)
    while len(shares) > _MOST_BARS or (len(shares) > 1 and shares[0] + shares[1] < _HARDLY):
        shares[:2] = [shares[0] + shares[1]]
    first = 2.0 ** (high + 1 - len(shares))
    return f"up to {first:.4g} {units.bars(shares)} up to {2.0**high:.4g}, each bar doubles"


def priorities(found: Mapping[str, Any]) -> Table:
    """Returns a table with the distribution of the priorities.

    It has no rows if the buffer has no priorities.
    """
    histogram = found.get("priorities")
    if not histogram:
        return Table("", (), [])
    shares = list(histogram.items())
    if len(shares) > _MOST_ROWS:  # combine the small shares
        few = shares[: 1 - _MOST_ROWS]
        shares = [(few[-1][0], sum(share for _, share in few)), *shares[1 - _MOST_ROWS :]]
    most = max(share for _, share in shares)
    rows = [
        (edge, f"{share:.1%}", Styled("█" * round(24 * share / most), _BARS))
        for edge, share in shares
    ]
    return Table("priorities up to", (" ", " items", ""), rows)


def clients(found: Mapping[str, Any], pace: Pace, watch: Watch, width: int) -> Table:
    """Returns a table of the clients, with reaped, dead and stopped clients first."""
    if "error" in found:
        return Table("", (), [])
    clients = sorted(
        found["clients"], key=lambda one: one["state"] not in (words.DEAD, words.STOPPED)
    )
    rows = [_departed(client) for client in watch.departed()]
    rows += [_client(client, pace, watch) for client in clients]
    shown = [name for name in _COLUMNS if width >= NARROW or name != " memory"]
    return tables.chosen("clients", shown, rows)


_COLUMNS = ("client", " pid", "state", " written/s", " sampled/s", " seen", " memory", "holds")


def _client(client: Mapping[str, Any], pace: Pace, watch: Watch) -> dict[str, Styled]:
    written, drawn = pace.clients.get(client["incarnation"], (None, None))
    cells = words.cells(client, watch.held_s(client))
    idle_s, style = client["idle_s"], words.state(client).style
    cells |= {"state": words.state(client).value, " seen": cells["idle for"]}
    cells |= {" written/s": units.rate(written), " sampled/s": units.rate(drawn)}
    row = {name: Styled(cell, style) for name, cell in cells.items()}
    if not style and idle_s is not None and idle_s >= _SILENT_S:
        row[" seen"] = Styled(cells[" seen"], "yellow")
    return row


def _departed(client: Mapping[str, Any]) -> dict[str, Styled]:
    row = {"client": client["role"], " pid": str(client["pid"])}
    row |= {"state": f"{words.DEAD}, reaped", "holds": ""}
    return {name: Styled(row.get(name, "-"), "red") for name in _COLUMNS}


def events(watch: Watch) -> Table:
    """Returns a table of the recorded events. The newest one is last."""
    rows = []
    for event in watch.events:
        when = datetime.fromtimestamp(event.at_s).strftime("%H:%M:%S")
        rows.append((when, Styled(event.kind, _STYLES.get(event.kind, "")), event.text))
    return Table("events", ("", "", ""), rows)


_STYLES = {
    "died": "red",
    "left or died": "red",
    "unreadable": "red",
    "removed": "red",
    "stopped": "yellow",
    "rolled back": "yellow",
    "recovering": "yellow",
    "recovered": "green",
    "joined": "green",
    "continued": "green",
}
