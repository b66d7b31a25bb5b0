"""Implements ``shmbuffer recover DIR``, which recovers a buffer after a crash."""

from __future__ import annotations

import argparse

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress_bar import Bar

DESCRIPTION = (
    "Recovers a buffer after its processes were killed: completes or undoes their incomplete "
    "writes, and rebuilds the priorities. Prints how many items were kept and dropped. attach() "
    "and Coordinator(on_existing='recover') do the same automatically. If the buffer is in use, "
    "only the claims and entries of dead processes are cleaned up."
)
EXAMPLES = (
    "shmbuffer recover run/buffer\nshmbuffer recover run/buffer --json\n"
    "shmbuffer recover run/buffer --verify"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every item with its checksum, and drop items that do not match; this is "
        "always done after a reboot and for a copied buffer. The buffer must not be in use",
    )
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Recovers the buffer and prints a report. Returns 1 if an item did not match its checksum."""
    from shmbuffer.service.recover import recover

    with Bar(wanted=not args.json) as bar:
        report = recover(args.dir, verify=args.verify, timeout=args.timeout, on_progress=bar)
    console.tell(report.to_json(), str(report), as_json=args.json)
    return exits.DAMAGED if report.checksum_failed else exits.DONE
