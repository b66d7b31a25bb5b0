"""Tables for the terminal, printed as aligned text or by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of cells with a title and optional headings.

    A column is aligned to the right if its heading starts with a space.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Styled:
    """A cell with a style of rich, which is used on terminals with colours."""

    value: object
    style: str


def chosen(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Table:
    """Returns a table with the selected columns of rows that are dicts."""
    return Table(title, columns, [[row[name] for name in columns] for row in rows])


def pairs(title: str, values: Mapping[str, object]) -> Table:
    """Returns a table with one row per name and value."""
    return Table(title, (), list(values.items()))


def text(value: object) -> str:
    """Formats a value for a cell. Escapes control characters, which another user may have set."""
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
    """Escapes all control characters in a text except newlines."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(value))


def plain(table: Table) -> Iterator[str]:
    """Yields the lines of a table as aligned text."""
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


def drawn(table: Table, *, compact: bool = False) -> Any:
    """Converts a table to a rich table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=None if compact else styled(Styled(table.title, "bold")),
        title_justify="left",
        box=None if compact else SIMPLE_HEAD,
        padding=(0, 2, 0, 0) if compact else (0, 1),
        pad_edge=False,
        show_header=bool(table.columns),
        header_style="bold cyan" if compact else "bold",
    )
    for at, name in enumerate(table.columns or ("", "")):
        heading = styled(table.title if compact and at == 0 else name.strip())
        drawn.add_column(
            heading,
            justify="right" if name.startswith(" ") else "left",
            no_wrap=compact,
            overflow="ellipsis",
        )
    for first, *others in table.rows:
        names = Styled(first, "cyan") if compact and not table.columns else first
        drawn.add_row(*map(styled, (names, *others)))
    if compact:  # a narrow terminal truncates only the last column
        for column in drawn.columns[:-1]:
            cells = (column.header, *column.cells)
            column.min_width = max(len(str(cell)) for cell in cells)
    return drawn


def styled(cell: object) -> Any:
    """Converts a cell to a rich Text, because rich would interpret ``[red]`` in a str as markup."""
    from rich.text import Text

    return Text(text(cell), style=cell.style if isinstance(cell, Styled) else "")
