"""``shmbuffer stop DIR``: end every process that uses a buffer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import tables
from shmbuffer.watch.tables import Table

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "stop",
        "Ends every process that uses a buffer: collectors first, then other clients, learners, "
        "and the coordinator last. Each gets SIGTERM, and SIGKILL after the grace; one that is "
        "stopped goes on first. Meanwhile no coordinator starts a process. The items stay, but for "
        "a temporary buffer, which its coordinator removes. A process in another container is "
        "left, and named: then it exits with 4.",
        "shmbuffer stop run/buffer\nshmbuffer stop run/buffer --grace 30",
    )
    arguments.add_directory(parser)
    parser.add_argument(
        "--grace",
        type=arguments.seconds,
        default=5.0,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL (default 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Stops them, and says who that was.

    Raises:
        BufferNotFoundError, AttachTimeout, FormatError, CorruptBufferError: as they say.
    """
    from shmbuffer.service.stopping import stop

    stopped = stop(args.dir, grace_s=args.grace)
    if args.json:
        console.show_json({"path": args.dir, "stopped": [one.to_json() for one in stopped]})
    elif not stopped:
        print(tables.clean(f"{args.dir}: nobody uses it"))
    else:
        said = {"killed": "killed: deaf to SIGTERM", "ended": "ended"}
        rows = [
            (one.name or one.role, str(one.pid), said.get(one.how, f"left: {one.why}"))
            for one in stopped
        ]
        console.show(Table(args.dir, ("client", " pid", ""), rows))
    return exits.REFUSED if any(one.how == "left" for one in stopped) else exits.DONE
