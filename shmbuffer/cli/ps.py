"""Implements ``shmbuffer ps DIR``, which lists the processes that use a buffer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import tables, words

DESCRIPTION = (
    "Lists the processes that use a buffer, one line per handle: its role, the time since it "
    "joined and since it last wrote, sampled or updated, its memory including shared pages, and "
    "the lock or slots that it holds or waits for. Dead clients are listed until they are reaped. "
    "Takes no lock and does not change the buffer. Use shmbuffer stop to end the processes."
)
EXAMPLES = "shmbuffer ps run/buffer\nshmbuffer ps run/buffer --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Inspects the buffer and prints its clients."""
    from shmbuffer.memory.upkeep.inspect import inspect
    from shmbuffer.watch import shards

    inspections = shards.inspect_shards(args.dir, live_bytes=False) or {
        "": inspect(args.dir, live_bytes=False)
    }
    shown, listed = [], []
    for node, found in inspections.items():
        clients = _clients(found)
        listed += [{**({"node": node} if node else {}), **client} for client in clients]
        rows = [words.cells(client) | {"holds": client["holds"] or ""} for client in clients]
        table = tables.chosen(found["path"], _COLUMNS, rows)
        what = found.get("error") or words.use(found).value
        shown.append(table if rows else f"{found['path']}: {what}")
    console.tell({"path": args.dir, "clients": listed}, *shown, as_json=args.json)
    return exits.DONE


_COLUMNS = ("client", " pid", "state", "attached", "idle for", " memory", "holds")


def _clients(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the clients with the locks and slots that they hold or wait for.

    Dead clients come first, then those that hold or wait for something.
    """
    waits = {one["entry"]: one["text"] for one in found.get("waits", ())}
    clients = [
        {**client, "holds": words.holds(client) or waits.get(client["entry"])}
        for client in found.get("clients", ())
    ]
    return sorted(clients, key=lambda one: (one["alive"], one["holds"] is None, one["pid"]))
