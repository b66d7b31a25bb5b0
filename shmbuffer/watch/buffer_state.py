"""Reads the state of a directory for `findings` and `report`, even if all clients are dead."""

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
class BufferState:
    """State of a directory at one point in time."""

    found: Mapping[str, Any]  # result of `inspect`
    item_stats: ItemStats | None  # None before the first write
    timeline: Timeline | None  # selected part of the history, or None without a history
    absent: str  # reason why there is no timeline, for the picture
    now_s: float  # time of the inspection, in seconds since 1970

    def total(self, name: str) -> int:
        """Returns the increase of a counter within the timeline.

        Without a timeline, or if the history does not contain the counter, returns its value.
        """
        if self.timeline is not None and self.timeline.has(name):
            return self.timeline.total(name)
        return int(self.found["counters"].get(name, 0))

    @property
    def seconds(self) -> float | None:
        """Length of the timeline in seconds, or None without a timeline."""
        return None if self.timeline is None else self.timeline.end_s - self.timeline.begin_s

    @property
    def living(self) -> list[Mapping[str, Any]]:
        """Clients whose process is alive."""
        return [client for client in self.found["clients"] if client["alive"]]

    @property
    def coordinator(self) -> Mapping[str, Any] | None:
        """The living coordinator, which records the history, or None if no coordinator is alive."""
        return next((one for one in self.living if one["role"] == "coordinator"), None)


def read_state(path: str, last_s: float | None) -> BufferState:
    """Reads the state of a directory and the last ``last_s`` seconds of its history.

    If ``last_s`` is None, the whole history is read.
    """
    found = inspect(path)
    timeline, absent = None, "it contains no record yet"
    try:
        with Directory.open(path, reading=True) as directory:
            recorded = history.read(directory)
        if len(recorded.fine) or len(recorded.coarse):
            timeline = Timeline(recorded, last_s)
    except BufferNotFoundError:
        absent = "none was recorded (a Coordinator or shmbuffer serve records it)"
    except ShmBufferError as error:
        absent = str(error)
    return BufferState(found, item_stats.take(path), timeline, absent, time.time())
