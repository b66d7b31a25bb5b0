"""Implements ``shmbuffer top DIR``, which monitors a buffer in use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import shards
from shmbuffer.watch.shards import ShardsWatch
from shmbuffer.watch.top import terminal
from shmbuffer.watch.top.live import BufferWatch

_SOON_S = 0.2  # time between the two inspections of --once


DESCRIPTION = (
    "Monitors a buffer in use until q or Ctrl-C: fill, items written and sampled per second, age "
    "of the sampled items, priorities, and one line per process with its rates, the lock and slots "
    "that it holds, and when it was last active. Joins, deaths and recoveries are listed as they "
    "happen. The command only reads the mapped counters. It takes no lock and no entry in the "
    "registry, does not slow down other processes, and keeps running when the buffer is recovered "
    "or removed. If all processes are dead, it shows what they held. For the base directory of a "
    "ShardedReplayBuffer, it shows the shards that are visible from this machine, one per line, "
    "and their sum."
)
EXAMPLES = "shmbuffer top run/buffer\nshmbuffer top run/buffer --once --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    arguments.add_seconds(parser, "--interval", 1.0, "time between two updates")
    parser.add_argument(
        "--once",
        action="store_true",
        help=f"measure the rates for {_SOON_S:g} seconds, print the result, and exit",
    )


def run(args: argparse.Namespace) -> int:
    """Displays the buffer repeatedly until the user ends the program."""
    several = shards.inspect_shards(args.dir, live_bytes=False)
    seen = ShardsWatch(args.dir) if several else BufferWatch(args.dir)
    seen.update()
    if args.once:
        time.sleep(_SOON_S)
        seen.update()
        _show(seen, as_json=args.json)
    elif args.json or not (sys.stdout.isatty() and console.has_rich()):
        while True:
            time.sleep(args.interval)
            seen.try_update()
            _show(seen, as_json=args.json)
    else:
        _fill_terminal(seen, args.interval)
    return exits.DONE


def _show(seen: BufferWatch | ShardsWatch, *, as_json: bool) -> None:
    console.tell(seen.to_json(), *seen.tables(), as_json=as_json)
    if seen.footnote and not as_json:
        print(seen.footnote, flush=True)


def _fill_terminal(seen: BufferWatch | ShardsWatch, interval_s: float) -> None:
    """Displays the buffer on the whole terminal until the user presses q or a signal arrives."""
    deadly = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    with terminal.leave_on(*deadly) as received, terminal.keys() as pause:
        fill_screen(seen, interval_s, pause)
    for number in received:  # now that the terminal is restored, the signal can end this process
        os.kill(os.getpid(), number)


def fill_screen(
    seen: BufferWatch | ShardsWatch, interval_s: float, pause: Callable[[float], bool]
) -> None:
    """Redraws the whole terminal after each inspection, until ``pause`` returns True."""
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        live.update(seen.screen(), refresh=True)
        while not pause(interval_s):
            seen.try_update()
            live.update(seen.screen(), refresh=True)
