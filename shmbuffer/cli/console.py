"""The output of a verb: JSON, or tables, which rich draws on a terminal if it is installed.

FORCE_COLOR counts as a terminal, unless NO_COLOR is set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from shmbuffer.watch import tables
from shmbuffer.watch.tables import Table


def show(*shown: Table) -> None:
    """Prints the tables that have rows, one after the other."""
    filled = [table for table in shown if table.rows]
    if not filled:
        return
    if has_rich():
        from rich.console import Console

        Console().print(*map(tables.drawn, filled), sep="\n")
    else:
        print(*("\n".join(tables.plain(table)) for table in filled), sep="\n\n")


def tell(value: Mapping[str, Any], *shown: Table | str, as_json: bool) -> None:
    """Prints a result, as an object or as lines and tables."""
    if as_json:
        show_json(value)
        return
    for line in shown:
        if isinstance(line, str):
            print(tables.clean(line), flush=True)
    show(*(table for table in shown if isinstance(table, Table)))


def has_rich() -> bool:
    """True if the output is a terminal, or should have colours, and rich is installed."""
    wanted = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    return (sys.stdout.isatty() or wanted) and find_spec("rich") is not None


def show_json(value: Mapping[str, Any]) -> None:
    """Prints an object on one line; values that JSON lacks become text, NaN becomes null."""
    print(json.dumps(_plain(value), default=str), flush=True)


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
