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
    from rich.live import Live

LINE_EVERY_S = 5.0


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


def _live() -> Live | None:
    try:
        from rich.live import Live
    except ModuleNotFoundError:
        return None
    return Live(transient=True, redirect_stdout=False, redirect_stderr=True)
