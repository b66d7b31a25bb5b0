"""Inspects a buffer repeatedly, even while it is being recovered or removed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shmbuffer.errors import BufferNotFoundError, ShmBufferError
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.watch.events import Kind
from shmbuffer.watch.pace import Pace, Watch
from shmbuffer.watch.tables import Table
from shmbuffer.watch.top import panels
from shmbuffer.watch.top.screen import Screen


class BufferWatch:
    """Last inspection of a buffer, and the rates and events before it, for `top`."""

    footnote = ""

    def __init__(self, path: str) -> None:
        self._path = path
        self._watch = Watch()
        self._found: Mapping[str, Any] = {}
        self._pace = Pace.nothing()

    def update(self) -> None:
        """Inspects the buffer. Errors of `inspect` are raised."""
        self._found = inspect(self._path, priorities=True, live_bytes=False)
        self._pace = self._watch.add(self._found)

    def try_update(self) -> None:
        """Inspects the buffer. Errors of `inspect` are displayed instead of raised."""
        try:
            self.update()
        except BufferNotFoundError:
            still = "still exists" if os.path.isdir(self._path) else "was removed, too"
            self._lose(f"the buffer was removed; the directory {still}", "removed")
        except ShmBufferError as error:  # may be temporary
            self._lose(str(error), "unreadable")

    def _lose(self, why: str, kind: Kind) -> None:
        self._found = {"path": self._path, "error": why}
        self._pace = self._watch.record_loss(why, kind)

    def to_json(self) -> dict[str, Any]:
        """Returns the last inspection as JSON values."""
        return {**self._found, "pace": self._pace.to_json()}

    def tables(self) -> list[Table]:
        """Returns the last inspection as tables."""
        return panels.plain(self._found, self._pace, self._watch)

    def screen(self) -> Screen:
        """Returns the last inspection as a screen that fills the terminal."""
        return Screen(self._path, self._found, self._pace, self._watch)
