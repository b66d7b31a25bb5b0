"""Defines arguments that several verbs share, and parses their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress

from shmbuffer.memory.directory.neighbours import directory_of


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Adds the argument DIR, the directory of a buffer."""
    parser.add_argument(
        "dir", type=_directory, metavar="DIR", help="directory of the buffer, or of a save"
    )


def _directory(text: str) -> str:
    return str(directory_of(text))


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--timeout``."""
    description = "how long to wait for another process that is creating or recovering the buffer"
    add_seconds(parser, "--timeout", 60.0, description)


def add_seconds(
    parser: argparse.ArgumentParser, name: str, default: float, description: str
) -> None:
    """Adds an option that takes a number of seconds."""
    parser.add_argument(
        name,
        type=seconds,
        default=default,
        metavar="SECONDS",
        help=f"{description} (default {default:g})",
    )


def seconds(text: str) -> float:
    """Parses a finite number of seconds that is at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def integer(text: str) -> int:
    """Parses an integer such as 1000000, 1_000_000 or 1e6."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if (value := float(text)).is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not an integer, such as 1000000, 1_000_000 or 1e6"
    )


def at_least(least: int) -> Callable[[str], int]:
    """Returns a function that parses integers of at least ``least``."""

    def parse(text: str) -> int:
        value = integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return parse


def number(text: str) -> float:
    """Parses a floating-point number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
