"""State of a directory at one point in time, living or dead, for `findings` and `report`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmbuffer.errors import BufferNotFoundError, ShmBufferError
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history, item_stats
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.memory.upkeep.item_stats import ItemStats
from shmbuffer.watch.plot.timeline import Timeline


@dataclass(frozen=True)
class Look:
    """State of a directory at one point in time."""

    found: Mapping[str, Any]  # of `inspect`
    item_stats: ItemStats | None  # None before the first write
    timeline: Timeline | None  # the chosen part of the history; None without one
    absent: str  # why there is no timeline, in words
    now_s: float  # when it was, in seconds since 1970

    def total(self, name: str) -> int:
        """Returns the growth of a counter in the timeline, or, without one, since the creation."""
        if self.timeline is not None and self.timeline.has(name):
            return self.timeline.total(name)
        return int(self.found["counters"].get(name, 0))

    @property
    def seconds(self) -> float | None:
        """Length of the timeline."""
        return None if self.timeline is None else self.timeline.end_s - self.timeline.begin_s

    @property
    def living(self) -> list[Mapping[str, Any]]:
        """The living clients."""
        return [client for client in self.found["clients"] if client["alive"]]

    @property
    def coordinator(self) -> Mapping[str, Any] | None:
        """The living coordinator, which records the history."""
        return next((one for one in self.living if one["role"] == "coordinator"), None)


def look_at(path: str, last_s: float | None) -> Look:
    """Reads a directory, with the last seconds of its history; None: all of it."""
    found = inspect(path)
    timeline, absent = None, "it has no record yet"
    try:
        with Directory.open(path, reading=True) as directory:
            recorded = history.read(directory)
        if len(recorded.fine) or len(recorded.coarse):
            timeline = Timeline(recorded, last_s)
    except BufferNotFoundError:
        absent = "none was recorded (a Coordinator or shmbuffer serve records it)"
    except ShmBufferError as error:
        absent = str(error)
    return Look(found, item_stats.take(path), timeline, absent, time.time())
