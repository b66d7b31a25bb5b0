"""What all verbs have in common: help with an example, ``--json``, ``--debug``, exit codes."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING

from shmbuffer.cli import VERBS, exits

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verb(
    subparsers: Subparsers, name: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Adds a verb's parser.

    Args:
        subparsers: of the command line.
        name: of the verb.
        description: what it does, in a paragraph.
        examples: lines for the end of the help.
    """
    indented = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    parser = subparsers.add_parser(
        name,
        help=VERBS[name],
        description=description,
        epilog=f"examples:\n{indented}\n\n{exits.TABLE}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--debug", action="store_true", help="show where an error came from (or SHMBUFFER_DEBUG=1)"
    )
    return parser


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Adds the argument DIR."""
    parser.add_argument("dir", metavar="DIR", help="the directory of the buffer")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Adds ``--timeout``."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for another process that makes or recovers it now (default 60)",
    )


def seconds(text: str) -> float:
    """Parses a number of seconds.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def whole(text: str) -> int:
    """Parses a whole number: 1000000, 1_000_000 or 1e6.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if (value := float(text)).is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number; 1000000, 1_000_000 and 1e6 are"
    )


def number(text: str) -> float:
    """Parses a number.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
