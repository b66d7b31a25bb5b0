"""Implements ``shmbuffer inspect DIR``, which shows a buffer and its clients."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import tables, units, words
from shmbuffer.watch.tables import Table

DESCRIPTION = (
    "Shows the contents, settings, counters and clients of a buffer. Takes no lock and no entry in "
    "the registry, so it works even if a process hangs. While the buffer is in use, the numbers "
    "may not be from exactly the same time. Does not change the buffer. For the base directory of "
    "a ShardedReplayBuffer, it shows the shards that are visible from this machine, one per line, "
    "and their sum."
)
EXAMPLES = (
    "shmbuffer inspect run/buffer\n"
    "shmbuffer inspect run/buffer --all\n"
    "shmbuffer inspect run/buffer --json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument("--all", action="store_true", help="also show the counters that are 0")


def run(args: argparse.Namespace) -> int:
    """Inspects the buffer and prints the result."""
    from shmbuffer.memory.upkeep.inspect import inspect
    from shmbuffer.watch import shards

    if several := shards.inspect_shards(args.dir):
        as_json = shards.to_json(args.dir, several)
        console.tell(as_json, shards.contents(args.dir, several), as_json=args.json)
        if not args.json:
            print(shards.ELSEWHERE)
        return exits.DONE
    found = inspect(args.dir)
    shown = _buffer(found), _leaves(found), _counters(found, zeros=args.all), _clients(found)
    console.tell(found, *shown, as_json=args.json)
    return exits.DONE


def _buffer(found: Mapping[str, Any]) -> Table:
    settings, counters = found["settings"], found["counters"]
    extra = settings["extra"]
    items, capacity = counters["length"], counters["elements"]
    lines = {
        "state": found["state"],
        "used by": words.use(found).value,
        "items": f"{items:,} of {capacity:,} ({items / capacity:.1%}), "
        f"{counters['write_count']:,} written",
        "class": extra.get("buffer"),
        "priorities": _priorities(found),
        "batch size": extra.get("batch_size"),
        "size": words.size(found),
        "records": words.records(found),
        "shared leaves": words.sharing(found),
        "flags": ", ".join(flag.lower().replace("_", " ") for flag in found["flags"]),
        "created": f"{found['created']} by pid {found['owner']['pid']} ({found['owner']['state']})",
        **words.status(found),
        "uuid": found["uuid"],
    }
    return tables.pairs(found["path"], lines)


def _priorities(found: Mapping[str, Any]) -> str:
    settings, counters = found["settings"], found["counters"]
    if not counters["prioritized"] and settings["alpha"] is None:
        return "none"
    # Before the first write, only the settings contain alpha.
    source = counters if counters["prioritized"] else settings
    beta = settings["extra"].get("beta")
    key = settings["extra"].get("priority_key")
    parts = {"alpha": source["alpha"], "beta": beta, "eps": source["eps"], "key": key}
    shown = (f"{name} {value}" for name, value in parts.items() if value is not None)
    return ", ".join([*shown, f"largest {counters['max_priority']:.6g}"])


def _leaves(found: Mapping[str, Any]) -> Table:
    schema = found["schema"]
    leaves = {} if schema is None else schema["leaves"]
    rows = [
        (name, leaf["dtype"], str(leaf["shape"]), units.size(leaf["bytes"]))
        for name, leaf in leaves.items()
    ]
    return Table("leaves", ("leaf", "dtype", "shape", " size"), rows)


def _counters(found: Mapping[str, Any], *, zeros: bool) -> Table:
    counters = found["counters"]
    sampled = counters["items_sampled"]
    shown = {
        name.replace("_", " "): value
        for name, value in counters.items()
        if name not in _SHOWN_ELSEWHERE
    }
    age = counters["age_sum"] / sampled if sampled else None
    shown["mean age of a sampled item, in writes"] = age
    if not zeros:
        there = {name: value for name, value in shown.items() if value}
        others = "all others" if there else "all"
        shown = there | ({others: "0 (shown with --all)"} if len(there) < len(shown) else {})
    return tables.pairs("counters", shown)


_SHOWN_ELSEWHERE = {
    "length",
    "elements",
    "write_count",
    "prioritized",
    "alpha",
    "eps",
    "max_priority",
    "age_sum",
}


def _clients(found: Mapping[str, Any]) -> Table:
    times, counts = ("attached", "idle for"), (" written", " sampled", " updates")
    columns = ("client", " pid", "state", *times, *counts, "holds")
    return tables.chosen("clients", columns, map(words.cells, found["clients"]))
