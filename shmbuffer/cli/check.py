"""Implements ``shmbuffer check DIR``, which checks a buffer for damage without changing it."""

from __future__ import annotations

import argparse

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress_bar import Bar

DESCRIPTION = (
    "Reads all files of a buffer and reports damage: items, slot words, checksums, priorities and "
    "their sums. Problems that the next recovery will repair are reported as notes, not as damage. "
    "Does not change the buffer."
)
EXAMPLES = (
    "shmbuffer check run/buffer\nshmbuffer check run/buffer --json || shmbuffer inspect run/buffer"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Checks the buffer and prints a report. Returns 1 if anything is damaged."""
    from shmbuffer.memory.upkeep.check import check

    with Bar(wanted=not args.json) as bar:
        report = check(args.dir, timeout=args.timeout, on_progress=bar)
    console.tell(report.to_json(), str(report), as_json=args.json)
    return exits.DONE if report.ok else exits.DAMAGED
