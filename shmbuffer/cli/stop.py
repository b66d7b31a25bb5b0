"""Implements ``shmbuffer stop DIR``, which stops all processes that use a buffer."""

from __future__ import annotations

import argparse

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch.tables import Table

DESCRIPTION = (
    "Stops every process that uses a buffer, in this order: collectors, other clients, learners, "
    "and the coordinator. Each process gets SIGTERM, and then SIGKILL if it is still running after "
    "the grace period. Suspended processes are resumed first. Coordinators do not restart "
    "processes in the meantime. The items are kept, except those of a temporary buffer, which its "
    "coordinator removes. Processes in another container are listed but not stopped; in that case "
    "the exit code is 4."
)
EXAMPLES = "shmbuffer stop run/buffer\nshmbuffer stop run/buffer --grace 30"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    arguments.add_seconds(parser, "--grace", 5.0, "time between SIGTERM and SIGKILL")


def run(args: argparse.Namespace) -> int:
    """Stops the processes and prints how each of them ended."""
    from shmbuffer.service.stopping import stop

    stopped = stop(args.dir, grace_s=args.grace)
    descriptions = {"killed": "killed because it ignored SIGTERM", "ended": "ended"}
    rows = [
        (one.name or one.role, str(one.pid), descriptions.get(one.how, f"left: {one.why}"))
        for one in stopped
    ]
    console.tell(
        {"path": args.dir, "stopped": [one.to_json() for one in stopped]},
        Table(args.dir, ("client", " pid", ""), rows) if rows else f"{args.dir}: not in use",
        as_json=args.json,
    )
    return exits.REFUSED if any(one.how == "left" for one in stopped) else exits.DONE
