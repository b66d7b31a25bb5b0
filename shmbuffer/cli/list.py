"""Implements ``shmbuffer list DIR``, which lists the buffers below a directory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmbuffer.cli import console, exits
from shmbuffer.errors import BufferNotFoundError, ShmBufferError
from shmbuffer.watch import words
from shmbuffer.watch.tables import Table

DESCRIPTION = (
    "Lists the buffers in a directory and its subdirectories, one per line, with their clients, "
    "number of items, and size on disk or in memory. A buffer that cannot be read is listed with "
    "the reason. Takes no lock, follows no symbolic links and does not change the buffers."
)
EXAMPLES = "shmbuffer list\nshmbuffer list /dev/shm\nshmbuffer list run --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default=".", help="directory to search (default: .)"
    )


def run(args: argparse.Namespace) -> int:
    """Finds the buffers and prints a list of them."""
    if not os.path.isdir(args.dir):
        raise BufferNotFoundError(f"{args.dir}: no such directory. Check the path", path=args.dir)
    unseen: list[str] = []
    found = [_inspect(path) for path in _buffers(args.dir, unseen)]
    rows = [_row(one) for one in found if "error" not in one]
    columns = ("buffer", "used by", " items", " of", "size")
    console.tell(
        {"path": args.dir, "buffers": [_brief(one) for one in found], "unreadable": unseen},
        *([] if found else [f"{args.dir}: no buffer was found in this directory or below it"]),
        *(f"{path}: permission denied, so buffers in it are not listed" for path in unseen),
        *(f"{one['path']}: {one['error']}" for one in found if "error" in one),
        Table("", columns, rows),
        as_json=args.json,
    )
    return exits.DONE


def _buffers(top: str, unseen: list[str]) -> Iterator[Path]:
    """Yields the paths of the buffers below ``top`` in sorted order.

    The search does not enter the directory of a buffer. Directories that cannot be read are added
    to ``unseen``.
    """
    from shmbuffer.memory.format import layout

    walk = os.walk(top, onerror=lambda error: unseen.append(str(error.filename)))
    for path, below, _ in walk:
        below.sort()
        if os.path.lexists(os.path.join(path, layout.CONTROL)):
            below.clear()
            yield Path(path)


def _inspect(path: Path) -> dict[str, Any]:
    """Returns the result of `inspect` for a path, or a dict with its error."""
    from shmbuffer.memory.upkeep.inspect import inspect

    try:
        return {**inspect(path, live_bytes=False), "path": str(path)}
    except (ShmBufferError, OSError) as error:
        message = " ".join(str(error).split())
        return {"path": str(path), "error": message.removeprefix(f"{path.absolute()}: ")}


def _row(found: dict[str, Any]) -> tuple[object, ...]:
    counters = found["counters"]
    items, capacity = counters["length"], counters["elements"]
    return found["path"], words.use(found), items, capacity, words.disk_usage(found)


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    """Selects the values of an inspection that are printed as JSON."""
    if "error" in found:
        return found
    counters = found["counters"]
    return {
        **{key: found[key] for key in ("path", "uuid", "state", "needs_recovery", "created")},
        "use": words.use(found).value,
        "items": counters["length"],
        "elements": counters["elements"],
        "pids": [client["pid"] for client in found["clients"] if client["alive"]],
        **{key: found[key] for key in ("bytes", "disk_bytes")},
        "in_memory": found["filesystem"]["in_memory"],
    }
