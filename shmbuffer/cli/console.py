"""Tables for people: with rich where it is installed and somebody watches, plain otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Table:
    """Rows under a title; ``columns`` may be empty, for pairs that need no heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def pairs(title: str, values: Mapping[str, object]) -> Table:
    """Returns a table of names and values."""
    return Table(title, (), list(values.items()))


def show(*tables: Table) -> None:
    """Prints tables, one after the other; those without rows are left out."""
    filled = [table for table in tables if table.rows]
    if has_rich():
        _show_rich(filled)
    else:
        _show_plain(filled)


def has_rich() -> bool:
    """Whether somebody watches, and rich is there to draw with."""
    if not sys.stdout.isatty():
        return False
    try:
        import rich.box
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "rich":
            raise
        return False
    return bool(rich.box)


def bars(values: Sequence[float], width: int = 40) -> str:
    """Returns the last values as a line of bars, the greatest of them as high as a line is."""
    shown = list(values)[-width:]
    greatest = max(shown, default=0.0)
    if greatest <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round(value / greatest * (len(_BARS) - 1))] for value in shown)


def show_json(value: Mapping[str, Any]) -> None:
    """Prints one object on one line. What JSON does not know is shown as text; NaN as null."""
    print(json.dumps(_plain(value), default=str), flush=True)


def text(value: object) -> str:
    """Returns a value as a cell: thousands separators in numbers, no control characters in text.

    Names of leaves and paths come from a directory that somebody else may have written.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return clean(value)


def clean(value: object) -> str:
    """Returns a text without control characters but line ends."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(value))


def size(count: int) -> str:
    """Returns a number of bytes for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def span(seconds: float) -> str:
    """Returns a span of time for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"


def _show_plain(tables: Sequence[Table]) -> None:
    for number, table in enumerate(tables):
        if number:
            print()
        print(clean(table.title))
        rows = [[text(cell) for cell in row] for row in table.rows]
        lines = [list(table.columns), *rows] if table.columns else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  " + "  ".join(cells).rstrip())


def _show_rich(tables: Sequence[Table]) -> None:
    from rich.console import Console

    Console().print(drawn(*tables))


def drawn(*tables: Table) -> Any:
    """Returns tables as one thing that rich can print; those without rows are left out.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """
    from rich.console import Group

    return Group(*(_drawn(table) for table in tables if table.rows))


def _drawn(table: Table) -> Any:
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
        drawn.add_column(column)
    for row in table.rows:
        # As Text, because a leaf may be named [red].
        drawn.add_row(*(Text(text(cell)) for cell in row))
    return drawn


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy's
        return _plain(value.item())
    return value
