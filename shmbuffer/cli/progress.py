"""What a person sees while something runs: events line by line, and below them how it is going.

With rich and a terminal the last lines are redrawn in place; else there is a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shmbuffer.cli import console

if TYPE_CHECKING:
    import rich.progress
    from rich.live import Live

LINE_EVERY_S = 5.0

LARGE_BYTES = 2**30
"""Less than that is done before anybody has read the line."""


class Progress:
    """Shows events and numbers on stdout; use ``with``, so that the terminal is left in order."""

    def __init__(self) -> None:
        self._live: Live | None = _live() if sys.stdout.isatty() else None
        self._last_line_s = time.monotonic()

    def event(self, text: str) -> None:
        """Shows something that happened, to stay."""
        if self._live is None:
            print(console.clean(text), flush=True)
        else:
            self._live.console.print(console.clean(text), markup=False, highlight=False)

    def numbers(self, values: Mapping[str, str]) -> None:
        """Shows how it is going, in place of what was shown before."""
        if self._live is not None:
            from rich.table import Table

            drawn = Table()
            for name in values:
                drawn.add_column(name, min_width=9)  # or the table would dance with its numbers
            drawn.add_row(*values.values())
            self._live.update(drawn)
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


class Bar:
    """How far something large has come, in bytes, on stderr: stdout is for results.

    With rich and a terminal a bar that goes when it is full; else a line now and then. It may be
    called from any thread.

    Args:
        title: what is being done.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._drawn: rich.progress.Progress | None = None
        self._last_line_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Shows it."""
        if total < LARGE_BYTES:
            return
        if self._drawn is None and sys.stderr.isatty():
            self._drawn = _bar(self._title, total)
        if self._drawn is not None:
            self._drawn.update(self._drawn.task_ids[0], completed=done)
            if done == total:
                self._drawn.stop()
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S or done == total:
            self._last_line_s = time.monotonic()
            text = f"{self._title}: {console.size(done)} of {console.size(total)}"
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._drawn is not None:
            self._drawn.stop()


def _bar(title: str, total: int) -> rich.progress.Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    except ModuleNotFoundError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    drawn = Progress(*columns, console=Console(stderr=True), transient=True)
    drawn.add_task(title, total=total)
    drawn.start()
    return drawn


def _live() -> Live | None:
    try:
        from rich.live import Live
    except ModuleNotFoundError:
        return None
    return Live(transient=True, redirect_stdout=False, redirect_stderr=True)
