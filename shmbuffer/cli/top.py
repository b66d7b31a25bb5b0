"""``shmbuffer top DIR``: who writes, who draws, how fast, and who waits? Seen as it happens."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import live, panels, shards, terminal
from shmbuffer.watch.pace import Pace, Watch

_SOON_S = 0.2  # between the two looks of --once, which make a rate


DESCRIPTION = (
    "Shows a buffer while it is used, until q or Ctrl-C: how full it is, items written and "
    "drawn a second, the age of what is drawn, priorities, a line for each process (its rates, "
    "what it holds, when it was last seen), and who came, died and was recovered meanwhile. "
    "Reads the "
    "mapped counters alone: it takes no lock and no place in the registry, slows nobody, and "
    "goes on through crashes, recoveries and removal. Of a dead directory it shows what its "
    "processes were at. Of the base directory of a buffer over several nodes "
    "(ShardedReplayBuffer) it shows the shards that this machine sees, one a line, and their sum."
)
EXAMPLES = "shmbuffer top run/buffer\nshmbuffer top run/buffer --once --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of the verb."""
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
    """Looks again and again, and shows it."""
    return _shards(args) if shards.look(args.dir, live_bytes=False) else _buffer(args)


def _buffer(args: argparse.Namespace) -> int:
    watch = Watch()

    def show(found: Mapping[str, Any], pace: Pace) -> None:
        told = {**found, "pace": pace.to_json()}
        console.tell(told, *panels.plain(found, pace, watch), as_json=args.json)

    found = live.look(args.dir)
    watch.see(found)
    if args.once:
        time.sleep(_SOON_S)
        found = live.look(args.dir)
        show(found, watch.see(found))
    elif args.json or not _has_screen():
        for found, pace in live.looks(args.dir, watch, args.interval):
            show(found, pace)
    else:
        _fill(lambda pause: live.fill_screen(args.dir, found, watch, args.interval, pause))
    return exits.DONE


def _shards(args: argparse.Namespace) -> int:
    """The same of a base directory."""
    watch = shards.ShardsWatch(args.dir)

    def show() -> None:
        console.tell(watch.to_json(), *watch.tables(), as_json=args.json)
        if not args.json:
            print(shards.ELSEWHERE, flush=True)

    watch.look()
    if args.once:
        time.sleep(_SOON_S)
        watch.look()
        show()
    elif args.json or not _has_screen():
        for _ in shards.looks(watch, args.interval):
            show()
    else:
        _fill(lambda pause: shards.fill_screen(watch, args.interval, pause))
    return exits.DONE


def _has_screen() -> bool:
    return sys.stdout.isatty() and console.has_rich()


def _fill(show: Callable[[Callable[[float], bool]], None]) -> None:
    """Has the terminal filled until a key or a signal ends that."""
    deadly = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    with terminal.unwound_on(*deadly) as came, terminal.keys() as pause:
        show(pause)
    for number in came:  # the terminal is as it was: now it may end us
        os.kill(os.getpid(), number)
