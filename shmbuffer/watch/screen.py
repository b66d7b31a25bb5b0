"""What `top` shows, laid out on a terminal of any size, from 80 columns by 24 lines on.

     path                                       who uses it, and the time
     what it holds                              (from 130 columns on: priorities, beside
     rates, with their history                   the rates)
     clients, one a line; the dead and the stopped first
     events, the newest last; they have what is left

A line is one line: what does not fit is cut, so that nothing jumps when a number grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmbuffer.watch.tables import Styled, Table, styled, text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

WIDE = 130
"""Columns from which on the priorities have a place of their own."""

_FEWEST_CLIENTS = 4
_FEWEST_EVENTS = 3


class Screen:
    """A renderable of rich's that takes all of a terminal.

    Args:
        title: left and right part of the first line.
        tables: from top to bottom, by the name of their part: ``buffer``, ``rates``,
            ``quiet``, ``priorities``, ``clients``, ``events``; made for a width, which is given.
    """

    def __init__(
        self, title: tuple[Styled, Styled], tables: Callable[[int], Mapping[str, Table]]
    ) -> None:
        self._title = title
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Asked by rich at each refresh, so that a terminal may change its size."""
        from rich.console import Group

        width, height = options.size
        parts = self._tables(width)
        middle = _lines(parts["rates"]) + _lines(parts["quiet"])
        beside = width >= WIDE and bool(parts["priorities"].rows)
        if beside:
            middle = max(middle, _lines(parts["priorities"]))
        left = height - 1 - _lines(parts["buffer"]) - middle
        clients, events = _lines(parts["clients"]), _lines(parts["events"])
        fewest = min(events, 1 + _FEWEST_EVENTS)
        # Blank lines between the parts only where nothing has to be left out for them.
        gap = [""] if left - 3 >= clients + fewest else []
        left -= 3 * len(gap)
        clients = min(clients, max(1 + _FEWEST_CLIENTS, left - fewest))
        rates: RenderableType = Group(compact(parts["rates"]), compact(parts["quiet"]))
        if beside:
            rates = _beside(rates, compact(parts["priorities"]))
        yield self._first_line()
        yield compact(parts["buffer"])
        yield from gap
        yield rates
        yield from gap
        yield compact(_first(parts["clients"], clients - 1))
        yield from gap
        yield compact(_last(parts["events"], left - clients - 1))

    def _first_line(self) -> Any:
        from rich.table import Table as RichTable

        line = RichTable.grid(expand=True)
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(*map(styled, self._title))
        return line


def compact(table: Table) -> Any:
    """Returns a table for rich without a frame, each row on one line.

    Its title heads the first column. Of pairs, which have no heading, the names stand out instead.
    """
    from rich.table import Table as RichTable

    drawn = RichTable.grid(padding=(0, 2, 0, 0))
    columns = table.columns or ("", "")
    for at, name in enumerate(columns):
        cells = [table.title if at == 0 else name.strip(), *(row[at] for row in table.rows)]
        drawn.add_column(
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if name.startswith(" ") else "left",
            # What has to give way to a narrow terminal is the last one.
            min_width=max(len(text(cell)) for cell in cells) if at < len(columns) - 1 else None,
        )
    if table.columns:
        heads = (table.title, *(name.strip() for name in table.columns[1:]))
        drawn.add_row(*(styled(Styled(head, "bold cyan")) for head in heads))
    for first, *others in table.rows:
        cells = [first if table.columns else Styled(first, "cyan"), *others]
        drawn.add_row(*map(styled, cells))
    return drawn


def _lines(table: Table) -> int:
    return len(table.rows) + bool(table.columns)


def _beside(left: RenderableType, right: RenderableType) -> Any:
    from rich.table import Table as RichTable

    grid = RichTable.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid


def _first(table: Table, rows: int) -> Table:
    if len(table.rows) <= max(0, rows):
        return table
    more = len(table.rows) - rows + 1
    last = (Styled(f"{more} more", "dim"), *("" for _ in table.columns[1:]))
    return replace(table, rows=[*table.rows[: rows - 1], last])


def _last(table: Table, rows: int) -> Table:
    return replace(table, rows=table.rows[-rows:] if rows > 0 else [])
