"""Lays out the screen of the command `top` on a terminal of at least 80 columns and 24 lines.

     path                                       state, clients, and the time
     items, size, flow                          (with at least 130 columns: priorities, next to
     rates, with their history                   the rates)
     clients, one per line; dead and stopped clients first
     events, the newest last, in the remaining lines

Long lines are truncated and not wrapped, so that the layout stays the same when a number grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from shmbuffer.watch.pace import Pace, Watch
from shmbuffer.watch.tables import Styled, Table, drawn, styled
from shmbuffer.watch.top import panels

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

WIDE = 130
"""Minimum terminal width in columns for a separate table of priorities."""

_FEWEST_CLIENTS = 4
_FEWEST_EVENTS = 3


@dataclass(frozen=True)
class Screen:
    """A rich renderable that fills the terminal."""

    path: str  # as given by the user
    found: Mapping[str, Any]  # result of `inspect` with priorities, or ``path`` and ``error``
    pace: Pace  # since the previous inspection
    watch: Watch

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the parts of the screen.

        rich calls this method at each refresh, because the terminal may have been resized.
        """
        from rich.console import Group
        from rich.table import Table as RichTable

        (width, height), watch = options.size, self.watch
        buffer = panels.buffer(self.found, watch, width, histogram=width < WIDE)
        rates = panels.rates(watch.history, min(60, width - 46))
        quiet, priorities = panels.quiet(watch.history), panels.priorities(self.found)
        clients, events = panels.clients(self.found, self.pace, watch, width), panels.events(watch)

        middle: RenderableType = Group(drawn(rates, compact=True), drawn(quiet, compact=True))
        lines = _lines(rates) + _lines(quiet)
        if width >= WIDE and priorities.rows:
            beside = RichTable.grid(padding=(0, 4, 0, 0))
            beside.add_row(middle, drawn(priorities, compact=True))
            middle = beside
            lines = max(lines, _lines(priorities))
        left = height - 1 - _lines(buffer) - lines
        fewest = min(_lines(events), 1 + _FEWEST_EVENTS)
        # Blank lines between the parts are added only if they fit.
        gap = [""] if left - 3 >= _lines(clients) + fewest else []
        left -= 3 * len(gap)
        room = min(_lines(clients), max(1 + _FEWEST_CLIENTS, left - fewest))
        yield self._first_line()
        yield drawn(buffer, compact=True)
        yield from gap
        yield middle
        yield from gap
        yield drawn(_first(clients, room - 1), compact=True)
        yield from gap
        last = max(0, left - room - 1)
        yield drawn(replace(events, rows=events.rows[len(events.rows) - last :]), compact=True)

    def _first_line(self) -> Any:
        from rich.table import Table as RichTable

        state, now = panels.state(self.found), datetime.now().strftime("%H:%M:%S")
        line = RichTable.grid(expand=True)
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_column(no_wrap=True, justify="right")
        right = Styled(f"  {state.value}  {now}", state.style)
        line.add_row(styled(Styled(self.path, "bold")), styled(right))
        return line


def _lines(table: Table) -> int:
    return len(table.rows) + bool(table.columns)


def _first(table: Table, rows: int) -> Table:
    if len(table.rows) <= max(0, rows):
        return table
    more = len(table.rows) - rows + 1
    last = (Styled(f"{more} more", "dim"), *("" for _ in table.columns[1:]))
    return replace(table, rows=[*table.rows[: rows - 1], last])
