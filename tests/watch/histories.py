"""Makes histories of runs that did not happen, as the tests need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shmbuffer.memory.format.layout import COUNTERS
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.history import Event, EventKind, History
from shmbuffer.memory.upkeep.item_stats import ItemStats, ItemWriter
from shmbuffer.watch.buffer_state import BufferState
from shmbuffer.watch.plot.timeline import Timeline

BEGIN_S = 1_700_000_000


def records(rows: Iterable[Mapping[str, float]]) -> np.ndarray:  # type: ignore[type-arg]
    """Makes records at ``t`` seconds (wall clock; since boot: ``boot``), by recorder ``by``."""
    rows = list(rows)
    names = history.recorded_fields()
    found = np.zeros(len(rows), history.record_type(names))
    for number, row in enumerate(rows):
        more = {name: value for name, value in row.items() if name in names}
        found[number]["number"] = number + 1
        found[number]["time_ns"] = round((BEGIN_S + row["t"]) * 1e9)
        found[number]["boottime_ns"] = round((1000 + row.get("boot", row["t"])) * 1e9)
        found[number]["recorder"] = row.get("by", 1)
        for name, value in more.items():
            found[number][name] = value
    return found


def event(kind: EventKind, t: float, *, boot: float | None = None, **fields: Any) -> Event:
    """Makes an event at ``t`` seconds of the wall clock, ``boot`` seconds after boot."""
    by = {"role": "collector", "recorder": fields.pop("by", 1), **fields}
    since_boot = round((1000 + (t if boot is None else boot)) * 1e9)
    return Event(kind, time_ns=round((BEGIN_S + t) * 1e9), boottime_ns=since_boot, **by)


def history_of(
    fine: Iterable[Mapping[str, float]],
    coarse: Iterable[Mapping[str, float]] = (),
    happened: Iterable[Event] = (),
) -> History:
    fields = history.recorded_fields()
    found = records(fine), records(coarse), list(happened)
    return History(b"u" * 16, fields, *found, history.rings(fields), 0)


def steady(seconds: int, by: int = 1, begin: int = 0, **rates: float) -> list[dict[str, float]]:
    """Makes a record for each second, with counters that grow evenly."""
    return [
        {"t": t, "by": by, **{name: round(rate * t) for name, rate in rates.items()}}
        for t in range(begin, begin + seconds + 1)
    ]


def client(**changes: Any) -> dict[str, Any]:
    """Makes a living collector, as `inspect` reports it."""
    counted = dict.fromkeys(COUNTERS, 0)
    return {
        "entry": 0,
        "incarnation": 2,
        "role": "collector",
        "pid": 42,
        "alive": True,
        "state": "running",
        "phase": "IDLE",
        "joined_s": float(BEGIN_S),
        "idle_s": 0.1,
        "counters": counted,
        **changes,
    }


def item_stats(
    masses: Sequence[float] | np.ndarray = (),  # type: ignore[type-arg]
    sources: Sequence[int] = (),
    writers: Iterable[ItemWriter] = (),
) -> ItemStats:
    mass = np.asarray(masses, np.float64)
    source = np.asarray(sources if len(sources) else np.full(len(mass), 2), np.uint64)
    ages = np.arange(len(source))[::-1].copy()
    by = {writer.incarnation: writer for writer in writers}
    known = {
        int(one): by.get(int(one), ItemWriter(int(one), 42, "collector", True)) for one in source
    }
    return ItemStats(1.0, ages, source, mass.copy(), mass, known)


def look(
    timeline: Timeline | None = None,
    *,
    clients: Sequence[Mapping[str, Any]] | None = None,
    items: ItemStats | None = None,
    now_s: float | None = None,
    **changes: Any,
) -> BufferState:
    """Makes a full buffer of 1000 items with a living collector; ``changes`` sets its counters."""
    counters = dict.fromkeys((*COUNTERS, "evicted"), 0)
    more = {"length": 1000, "elements": 1000, "write_count": 5000, "prioritized": 1}
    found = {
        "path": "run/buffer",
        "uuid": "u",
        "epoch": changes.pop("epoch", 0),
        "needs_recovery": changes.pop("needs_recovery", None),
        "records": changes.pop("records", None),
        "settings": {"alpha": 0.6},
        "clients": [client()] if clients is None else list(clients),
        "counters": {**counters, **more, **changes},
    }
    end_s = BEGIN_S if timeline is None else timeline.end_s
    now_s = end_s if now_s is None else now_s
    return BufferState(found, items, timeline, "none was recorded", now_s)
