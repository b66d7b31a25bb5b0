"""Prints the output of a verb as JSON or as tables.

If rich is installed, it draws the tables on terminals. If FORCE_COLOR is set and NO_COLOR is not,
every output is treated as a terminal.
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
    """Prints the tables that have rows."""
    filled = [table for table in shown if table.rows]
    if not filled:
        return
    if has_rich():
        from rich.console import Console

        Console().print(*map(tables.drawn, filled), sep="\n")
    else:
        print(*("\n".join(tables.plain(table)) for table in filled), sep="\n\n")


def tell(value: Mapping[str, Any], *shown: Table | str, as_json: bool) -> None:
    """Prints a result: ``value`` as a JSON object, or ``shown`` as lines and tables."""
    if as_json:
        show_json(value)
        return
    for line in shown:
        if isinstance(line, str):
            print(tables.clean(line), flush=True)
    show(*(table for table in shown if isinstance(table, Table)))


def has_rich() -> bool:
    """True if rich is installed and the output is a terminal, or is treated as one."""
    wanted = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    return (sys.stdout.isatty() or wanted) and find_spec("rich") is not None


def show_json(value: Mapping[str, Any]) -> None:
    """Prints a JSON object on one line.

    NaN and infinities become null. Other values that JSON does not support become text.
    """
    print(json.dumps(_plain(value), default=str), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        return _plain(value.item())
    return value
