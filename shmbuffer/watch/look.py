"""Reads the state of a directory for `findings` and `report`, also if all its clients are dead."""

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

    found: Mapping[str, Any]  # result of `inspect`
    item_stats: ItemStats | None  # None before the first write
    timeline: Timeline | None  # selected part of the history; None without a history
    absent: str  # reason why there is no timeline
    now_s: float  # time of the inspection, in seconds since 1970

    def total(self, name: str) -> int:
        """Returns the increase of a counter in the timeline, or its value without a timeline."""
        if self.timeline is not None and self.timeline.has(name):
            return self.timeline.total(name)
        return int(self.found["counters"].get(name, 0))

    @property
    def seconds(self) -> float | None:
        """Length of the timeline in seconds; None without a timeline."""
        return None if self.timeline is None else self.timeline.end_s - self.timeline.begin_s

    @property
    def living(self) -> list[Mapping[str, Any]]:
        """The living clients."""
        return [client for client in self.found["clients"] if client["alive"]]

    @property
    def coordinator(self) -> Mapping[str, Any] | None:
        """The living coordinator, which records the history; None if there is none."""
        return next((one for one in self.living if one["role"] == "coordinator"), None)


def look_at(path: str, last_s: float | None) -> Look:
    """Reads a directory and the last ``last_s`` seconds of its history; None: the whole history."""
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
