"""Tables for people: aligned text, or a table of rich's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows under a title; ``columns`` may be empty, for pairs that need no heading.

    A heading with a blank in front is of numbers, which stand at the right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Styled:
    """A cell that is shown in a style of rich's, where there are colours."""

    value: object
    style: str


def pairs(title: str, values: Mapping[str, object]) -> Table:
    """Returns a table of names and values."""
    return Table(title, (), list(values.items()))


def text(value: object) -> str:
    """Returns a value as a cell: thousands separators in numbers, no control characters in text.

    Names of leaves and paths come from a directory that somebody else may have written.
    """
    match value:
        case Styled():
            return text(value.value)
        case bool():
            return "yes" if value else "no"
        case None:
            return "-"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
    return clean(value)


def clean(value: object) -> str:
    """Returns a text without control characters but line ends."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(value))


def plain(table: Table) -> Iterator[str]:
    """Yields the lines of a table in columns of text."""
    if table.title:
        yield clean(table.title)
    rows = [[text(cell) for cell in row] for row in table.rows]
    lines = [list(table.columns), *rows] if table.columns else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [name.startswith(" ") for name in table.columns or ("",) * len(widths)]
    for line in lines:
        cells = (
            cell.strip().rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        )
        yield "  " + "  ".join(cells).rstrip()


def drawn(table: Table) -> Any:
    """Returns a table of rich's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        title=Text(clean(table.title), style="bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_header=bool(table.columns),
        header_style="bold",
    )
    for column in table.columns or ("", ""):
        drawn.add_column(column.strip(), justify="right" if column.startswith(" ") else "left")
    for row in table.rows:
        drawn.add_row(*map(styled, row))
    return drawn


def styled(cell: object) -> Any:
    """Returns a cell for rich; as Text, because a leaf may be named [red]."""
    from rich.text import Text

    return Text(text(cell), style=cell.style if isinstance(cell, Styled) else "")
