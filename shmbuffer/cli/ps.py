"""``shmbuffer ps DIR``: who uses a buffer, and what does each of them hold?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import tables, words

DESCRIPTION = (
    "Lists the processes that use a buffer, one line for each handle: its role, how long it has "
    "been there, when it last wrote, drew or updated, its memory with shared pages, and what it "
    "holds that others may wait for: the lock, slots, a turn, or a wait of its own. Those that "
    "died in it and were not cleaned up after are listed as dead. Takes no lock and changes "
    "nothing. shmbuffer stop ends them."
)
EXAMPLES = "shmbuffer ps run/buffer\nshmbuffer ps run/buffer --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of the verb."""
    arguments.add_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Looks and prints."""
    from shmbuffer.memory.inspect import inspect
    from shmbuffer.watch import shards

    looked = shards.look(args.dir, live_bytes=False) or {"": inspect(args.dir, live_bytes=False)}
    shown, told = [], []
    for node, found in looked.items():
        clients = _clients(found)
        told += [{**({"node": node} if node else {}), **client} for client in clients]
        rows = [words.cells(client) | {"holds": client["holds"] or ""} for client in clients]
        table = tables.chosen(found["path"], _COLUMNS, rows)
        what = found.get("error") or words.use(found).value
        shown.append(table if rows else f"{found['path']}: {what}")
    console.tell({"path": args.dir, "clients": told}, *shown, as_json=args.json)
    return exits.DONE


_COLUMNS = ("client", " pid", "state", "here for", "idle for", " memory", "holds")


def _clients(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Clients with what they hold, in words; those who hold something first."""
    waits = {one["entry"]: one["text"] for one in found.get("waits", ())}
    clients = [
        {**client, "holds": words.holds(client) or waits.get(client["entry"])}
        for client in found.get("clients", ())
    ]
    return sorted(clients, key=lambda one: (one["alive"], one["holds"] is None, one["pid"]))
