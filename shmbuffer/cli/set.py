"""Implements ``shmbuffer set DIR NAME=VALUE ...``, which changes the rate limiter of a buffer."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.memory.format.limiter import RateLimiter
from shmbuffer.watch import tables
from shmbuffer.watch.tables import Table

_WHOLE = ("min_size", "max_times_sampled")
_NAMES = tuple(field.name for field in fields(RateLimiter))


DESCRIPTION = (
    "Changes the rate limiter of a buffer in use. Waiting calls check the new limits immediately. "
    f"Names are {', '.join(_NAMES)}. Other limits keep their values, and NAME=off removes a limit. "
    "A new ratio applies to the inserts and samples from now on. Without NAME=VALUE the command "
    "prints the current limits."
)
EXAMPLES = (
    "shmbuffer set run/buffer samples_per_insert=8\n"
    "shmbuffer set run/buffer samples_per_insert=4 min_size=1000 when_no_peer=wait\n"
    "shmbuffer set run/buffer samples_per_insert=off"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument(
        "changes", nargs="*", type=_change, metavar="NAME=VALUE", help="a limit to change"
    )
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Changes the limits and prints the new ones."""
    from shmbuffer.memory.engine import Engine

    changes: dict[str, Any] = dict(args.changes)
    with Engine.open(args.dir, None, timeout=args.timeout) as engine:
        if changes:
            limiter = (engine.limiter or RateLimiter()).changed(**changes)
            engine.set_limiter(limiter if limiter.limits or limiter.min_size > 1 else None)
        limiter_now = engine.limiter
    limits = None if limiter_now is None else asdict(limiter_now)
    shown: Table | str = f"{args.dir}: no rate limiter is set"
    if limits is not None:
        shown = tables.pairs(args.dir, {k: v for k, v in limits.items() if v is not None})
    console.tell({"path": args.dir, "rate_limiter": limits}, shown, as_json=args.json)
    return exits.DONE


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in _NAMES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE, where NAME is one of {_NAMES}"
        )
    if value.lower() in ("off", "none"):
        return name, 1 if name == "min_size" else None
    if name == "when_no_peer":
        return name, value
    parse = arguments.integer if name in _WHOLE else arguments.number
    try:
        return name, parse(value)
    except argparse.ArgumentTypeError:
        kind = "an integer" if name in _WHOLE else "a number"
        raise argparse.ArgumentTypeError(f"{name} must be {kind} or off, got {value!r}") from None
