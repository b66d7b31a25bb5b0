"""Tables for people: with rich where it is installed and somebody watches, plain otherwise.

FORCE_COLOR, which is not empty, stands for somebody who watches; NO_COLOR takes that back.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"


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


def show(*tables: Table) -> None:
    """Prints tables, one after the other; those without rows are left out."""
    filled = [table for table in tables if table.rows]
    if has_rich():
        _show_rich(filled)
    else:
        _show_plain(filled)


def has_rich() -> bool:
    """Whether somebody watches or wants colours, and rich is there to draw with."""
    if not (sys.stdout.isatty() or _wants_colours()):
        return False
    try:
        import rich.box
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "rich":
            raise
        return False
    return bool(rich.box)


def _wants_colours() -> bool:
    """Whether colours are asked for where nobody watches; rich reads the same two variables."""
    return bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")


def bars(values: Sequence[float | None], width: int = 40) -> str:
    """Returns the last values as a line of bars, the greatest of them as high as a line is.

    What is None is a gap.
    """
    shown = list(values)[-width:]
    greatest = max((value for value in shown if value is not None), default=0.0)

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return _BARS[round(value / greatest * (len(_BARS) - 1))] if greatest > 0 else _BARS[0]

    return "".join(map(bar, shown))


def gauge(share: float, width: int) -> str:
    """Returns a bar that is full at 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def rate(value: float | None) -> str:
    """Returns a number of something per second, in four digits or so."""
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def show_json(value: Mapping[str, Any]) -> None:
    """Prints one object on one line. What JSON does not know is shown as text; NaN as null."""
    print(json.dumps(_plain(value), default=str), flush=True)


def text(value: object) -> str:
    """Returns a value as a cell: thousands separators in numbers, no control characters in text.

    Names of leaves and paths come from a directory that somebody else may have written.
    """
    if isinstance(value, Styled):
        return text(value.value)
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


def counted(count: int, one: str, more: str | None = None) -> str:
    """Returns a number with what it counts."""
    return f"{count:,} {one if count == 1 or more is None else more}"


def span(seconds: float) -> str:
    """Returns a span of time for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"


def percent(share: float) -> str:
    """Returns a share, 0 to 1, for people: ``12 %``."""
    return f"{100 * share:.3g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _show_plain(tables: Sequence[Table]) -> None:
    for number, table in enumerate(tables):
        if number:
            print()
        if table.title:
            print(clean(table.title))
        rows = [[text(cell) for cell in row] for row in table.rows]
        lines = [list(table.columns), *rows] if table.columns else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = [name.startswith(" ") for name in table.columns or ("",) * len(widths)]
        for line in lines:
            cells = (
                cell.strip().rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(line, widths, right, strict=True)
            )
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
        drawn.add_column(column.strip(), justify="right" if column.startswith(" ") else "left")
    for row in table.rows:
        drawn.add_row(*map(styled, row))
    return drawn


def styled(cell: object) -> Any:
    """Returns a cell for rich; as Text, because a leaf may be named [red]."""
    from rich.text import Text

    return Text(text(cell), style=cell.style if isinstance(cell, Styled) else "")


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
