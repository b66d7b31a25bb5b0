"""``shmbuffer check DIR``: is the buffer whole? Changes nothing."""

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
        "check",
        "Reads everything in a buffer, files, slot words, checksums, priorities and their sums, "
        "and says what is wrong. What the next recovery will mend is a note and no damage. Changes "
        "nothing.",
        "shmbuffer check run/buffer\n"
        "shmbuffer check run/buffer --json || shmbuffer inspect run/buffer",
    )
    arguments.add_directory(parser)
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Checks and prints the report; exit 1 if anything is damaged."""
    from shmbuffer.memory.check import check

    with Bar(wanted=not args.json) as bar:
        report = check(args.dir, timeout=args.timeout, on_progress=bar)
    if args.json:
        console.show_json(report.to_json())
    else:
        print(tables.clean(report))
    return exits.DONE if report.ok else exits.DAMAGED
