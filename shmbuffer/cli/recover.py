"""``shmbuffer recover DIR``: make a buffer whole after a crash, and say what that took."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress import Bar
from shmbuffer.watch import tables

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "recover",
        "Makes a buffer whole after its processes were killed: what they had half done is finished "
        "or undone, the priorities are rebuilt. Prints what is there, what was dropped. attach() "
        "and Coordinator(on_existing='recover') do the same by themselves. While somebody uses the "
        "buffer, only what dead processes left is cleaned up.",
        "shmbuffer recover run/buffer\nshmbuffer recover run/buffer --json\n"
        "shmbuffer recover run/buffer --verify",
    )
    arguments.add_directory(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every item with its checksum, and drop those that do not fit; after a reboot "
        "and in a copy this is done in any case. Needs a buffer that nobody uses",
    )
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Recovers and prints the report; items refused by their checksums make it exit 1."""
    from shmbuffer.service.recovery import recover

    with Bar(wanted=not args.json) as bar:
        report = recover(args.dir, verify=args.verify, timeout=args.timeout, on_progress=bar)
    if args.json:
        console.show_json(report.to_json())
    else:
        print(tables.clean(report))
    return exits.DAMAGED if report.checksum_failed else exits.DONE
