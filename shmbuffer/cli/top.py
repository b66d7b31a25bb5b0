"""``shmbuffer top DIR``: who writes, who draws, how fast, and who waits? Seen as it happens."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import arguments, console, exits, panels, terminal
from shmbuffer.cli.console import Table
from shmbuffer.cli.pace import Pace, Watch
from shmbuffer.cli.screen import Screen
from shmbuffer.errors import BufferNotFoundError, ShmBufferError

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers

_SOON_S = 0.2  # between the two looks of --once, which make a rate
_PLAIN_WIDTH = 100  # where there is no terminal


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "top",
        "Shows a buffer while it is used, until q or Ctrl-C: how full it is, items written and "
        "drawn a second, the age of what is drawn, priorities, a line for each process (its rates, "
        "what it holds, when it was last seen), and who came, died and was recovered meanwhile. "
        "Reads the "
        "mapped counters alone: it takes no lock and no place in the registry, slows nobody, and "
        "goes on through crashes, recoveries and removal. Of a dead directory it shows what its "
        "processes were at.",
        "shmbuffer top run/buffer\nshmbuffer top run/buffer --once --json",
    )
    arguments.add_directory(parser)
    parser.add_argument(
        "--interval",
        type=arguments.seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help=f"look for {_SOON_S:g} seconds, print, and end"
    )


def run(args: argparse.Namespace) -> int:
    """Looks again and again, and shows it.

    Raises:
        BufferNotFoundError, FormatError, CorruptBufferError, UnsafePathError: at the first look.
            Later ones are shown, and waited for.
    """
    watch = Watch()
    found = _look(args.dir)
    watch.see(found)
    if args.once:
        time.sleep(_SOON_S)
        found = _look(args.dir)
        _print(found, watch.see(found), watch, as_json=args.json)
    elif args.json or not (sys.stdout.isatty() and console.has_rich()):
        for found, pace in _looks(args, watch):
            _print(found, pace, watch, as_json=args.json)
    else:
        with terminal.undone_on_a_signal(), terminal.keys() as pause:
            _live(args, found, watch, pause)
    return exits.DONE


def _look(path: str) -> dict[str, Any]:
    from shmbuffer.memory.inspect import inspect

    return inspect(path, priorities=True, live_bytes=False)


def _looks(
    args: argparse.Namespace, watch: Watch, pause: Callable[[float], bool] = terminal.sleep
) -> Iterator[tuple[dict[str, Any], Pace]]:
    """Each look at the buffer, until a pause says so; what could not be seen has ``error``."""
    while not pause(args.interval):
        try:
            found = _look(args.dir)
        except BufferNotFoundError:
            there = os.path.isdir(args.dir)
            what = "there is no buffer here any more; " + (
                "the directory is still there" if there else "the directory is gone too"
            )
            yield {"path": args.dir, "error": what}, watch.lose(what)
        except ShmBufferError as error:  # is being made, or removed, or damaged: it may pass
            yield {"path": args.dir, "error": str(error)}, watch.lose(str(error), "gone")
        else:
            yield found, watch.see(found)


def _live(
    args: argparse.Namespace, found: dict[str, Any], watch: Watch, pause: Callable[[float], bool]
) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:

        def show(found: Mapping[str, Any], pace: Pace) -> None:
            tables = partial(panels.parts, found, pace, watch)
            live.update(Screen(panels.title(found, args.dir), tables), refresh=True)

        show(found, Pace.nothing())
        for found, pace in _looks(args, watch, pause):
            show(found, pace)


def _print(found: Mapping[str, Any], pace: Pace, watch: Watch, *, as_json: bool) -> None:
    if as_json:
        console.show_json({**found, "pace": pace.to_json()})
    else:
        console.show(*tables(found, pace, watch))


def tables(found: Mapping[str, Any], pace: Pace, watch: Watch) -> list[Table]:
    """Returns what is shown of one look where nothing is redrawn.

    Args:
        found: what `inspect` found, with priorities; or ``path`` and ``error``.
        pace: since the look before.
        watch: what was seen so far.
    """
    if "error" in found:
        return [console.pairs(found["path"], {"buffer": found["error"]}), panels.events(watch)]
    return [
        panels.summary(found, _PLAIN_WIDTH),
        panels.rates(watch.history, 40),
        panels.quiet(watch.history),
        panels.clients(found, pace, watch, _PLAIN_WIDTH),
        panels.priorities(found),
        panels.events(watch),
    ]
