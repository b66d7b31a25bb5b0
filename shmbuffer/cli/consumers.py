"""Implements ``shmbuffer consumers DIR``, which lists the consumers of a buffer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.errors import ConsumerError
from shmbuffer.watch.tables import Table

DESCRIPTION = (
    "Lists the consumers of a buffer: how many items each is behind, how many items were "
    "delivered, acknowledged and redelivered, and which processes lease its items. --remove "
    "removes a consumer that no learner uses any more, so that writers stop waiting for it. Its "
    "unacknowledged items count as acknowledged, and learners that still use it get an error."
)
EXAMPLES = "shmbuffer consumers run/buffer\nshmbuffer consumers run/buffer --remove eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument("--remove", metavar="NAME", help="name of a consumer to remove")
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Removes a consumer if requested, and lists the remaining ones."""
    from shmbuffer.memory.upkeep.inspect import inspect

    if args.remove is not None:
        _remove(args)
    found = inspect(args.dir, live_bytes=False)["consumers"]
    rows = [_row(one) for one in found]
    shown = Table(args.dir, _COLUMNS, rows) if rows else f"{args.dir}: there are no consumers"
    console.tell({"path": args.dir, "consumers": found}, shown, as_json=args.json)
    return exits.DONE


def _remove(args: argparse.Namespace) -> None:
    from shmbuffer.memory.engine import Engine

    with Engine.open(args.dir, None, timeout=args.timeout) as engine:
        ring = engine.ring()
        if ring is None or not ring.consumers.remove(args.remove):
            raise ConsumerError(
                f"{args.dir}: there is no consumer {args.remove!r}. Nothing was changed. Run the "
                "command without --remove to list the consumers",
                name=args.remove,
            )


_COLUMNS = (
    "consumer",
    " behind",
    " delivered",
    " acknowledged",
    " redelivered",
    " late",
    " leased",
    "by pid",
)


def _row(one: Mapping[str, Any]) -> list[object]:
    pids = sorted({lease["pid"] for lease in one["leases"]})
    counts = (one[name] for name in ("behind", "delivered", "acked", "redelivered", "refused"))
    return [one["name"], *counts, one["held"], ", ".join(map(str, pids))]
