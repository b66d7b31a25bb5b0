"""Shows progress on a terminal: one line per event, and the current numbers below the events.

If rich is installed and the output is a terminal, the numbers are updated in place. Otherwise they
are printed at intervals.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from shmbuffer.watch import tables, units

if TYPE_CHECKING:
    import rich.progress
    from rich.live import Live

    from shmbuffer.memory.system.progress import ProgressReport

LINE_EVERY_S = 5.0

SHOWN_AFTER_S = 0.5
"""Time in seconds after which a bar is shown. Work that takes less time gets no bar."""


class ProgressBar:
    """Shows events and numbers on stdout. Leaving the ``with`` block restores the terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        if sys.stdout.isatty() and find_spec("rich"):
            from rich.live import Live

            self._live = Live(transient=True, redirect_stdout=False, redirect_stderr=True)
        self._last_line_s = time.monotonic()

    def event(self, text: str) -> None:
        """Prints an event on its own line."""
        if self._live is None:
            print(tables.clean(text), flush=True)
        else:
            self._live.console.print(tables.clean(text), markup=False, highlight=False)

    def numbers(self, values: Mapping[str, str]) -> None:
        """Replaces the numbers that are shown."""
        if self._live is not None:
            from rich.table import Table

            drawn = Table()
            for name in values:
                drawn.add_column(name, min_width=9)  # keeps the width of the table constant
            drawn.add_row(*values.values())
            self._live.update(drawn)
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


class Bar:
    """Shows the progress of a long operation on stderr if it is a terminal. Thread-safe."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._drawn: rich.progress.Progress | None = None
        self._task_of: dict[str, rich.progress.TaskID] = {}
        self._began_s = self._last_line_s = time.monotonic()

    def __call__(self, report: ProgressReport) -> None:
        """Displays a progress report."""
        if not self._wanted or time.monotonic() - self._began_s < SHOWN_AFTER_S:
            return
        amount = f"{_amount(report.done, report)} of {_amount(report.total, report)}"
        if self._drawn is None and find_spec("rich"):
            self._drawn = _bars()
        if self._drawn is None:
            if time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                self._last_line_s = time.monotonic()
                print(f"{report.what}: {amount}", file=sys.stderr, flush=True)
            return
        if report.what not in self._task_of:
            self._task_of[report.what] = self._drawn.add_task(report.what, amount="")
        self._drawn.update(
            self._task_of[report.what], completed=report.done, total=report.total, amount=amount
        )
        if self._drawn.finished:
            self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn is not None:
            self._drawn.stop()
        self._drawn, self._task_of = None, {}


def _amount(count: int, report: ProgressReport) -> str:
    return units.size(count) if report.unit == "bytes" else f"{count:,} {report.unit}"


def _bars() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    names, amounts = TextColumn("{task.description}"), TextColumn("{task.fields[amount]}")
    columns = (names, BarColumn(), amounts, TimeRemainingColumn())
    drawn = Progress(*columns, console=Console(stderr=True), transient=True)
    drawn.start()
    return drawn
