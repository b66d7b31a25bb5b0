"""One look at a directory, living or dead: what is judged and drawn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmbuffer.errors import BufferNotFoundError, ShmBufferError
from shmbuffer.memory import history, item_stats
from shmbuffer.memory.inspect import inspect
from shmbuffer.memory.item_stats import ItemStats
from shmbuffer.memory.region import Directory
from shmbuffer.watch.timeline import Timeline


@dataclass(frozen=True)
class Look:
    """What was found."""

    found: Mapping[str, Any]  # what `inspect` found
    item_stats: ItemStats | None  # the items; None before the first write
    timeline: Timeline | None  # the part of the history that is looked at; None without
    absent: str  # why there is no timeline, in words
    now_s: float  # when it was looked, in seconds since 1970

    def total(self, name: str) -> int:
        """How much a counter has grown in the part that is looked at, or since the beginning."""
        if self.timeline is not None and self.timeline.has(name):
            return self.timeline.total(name)
        return int(self.found["counters"].get(name, 0))

    @property
    def seconds(self) -> float | None:
        """How long the part is; None without a history."""
        return None if self.timeline is None else self.timeline.end_s - self.timeline.begin_s

    @property
    def living(self) -> list[Mapping[str, Any]]:
        """The clients that are alive."""
        return [client for client in self.found["clients"] if client["alive"]]

    @property
    def coordinator(self) -> Mapping[str, Any] | None:
        """The living client that records."""
        return next((one for one in self.living if one["role"] == "coordinator"), None)


def look_at(path: str, last_s: float | None) -> Look:
    """Looks."""
    found = inspect(path)
    timeline, absent = None, "it has no record yet"
    try:
        with Directory.open(path) as directory:
            recorded = history.read(directory)
        if len(recorded.fine) or len(recorded.coarse):
            timeline = Timeline(recorded, last_s)
    except BufferNotFoundError:
        absent = "nobody has recorded: a Coordinator, or shmbuffer serve, does it"
    except ShmBufferError as error:
        absent = str(error)
    return Look(found, item_stats.take(path), timeline, absent, time.time())
