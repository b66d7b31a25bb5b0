"""``shmbuffer top DIR``: who writes, who draws, how fast, and who waits? Seen as it happens."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.console import Table
from shmbuffer.cli.pace import Pace, Watch
from shmbuffer.errors import BufferNotFoundError, ShmBufferError

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers

_SOON_S = 0.2  # between the two looks of --once, which make a rate
_MOST_ROWS = 10  # of the histogram


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "top",
        "Shows a buffer while it is used, until Ctrl-C: how full it is, items written and drawn a "
        "second, the age of what is drawn, priorities, and a line for each process. Takes no lock "
        "and no place in the registry, and goes on through crashes, recoveries and removal. Of a "
        "dead directory it shows what its processes were at.",
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
    from shmbuffer.memory.inspect import inspect

    watch = Watch()
    watch.see(inspect(args.dir))
    if args.once:
        time.sleep(_SOON_S)
        found = inspect(args.dir, priorities=True)
        _print(found, watch.see(found), watch, as_json=args.json)
    elif args.json or not console.has_rich():
        for found, pace in _looks(args, watch):
            _print(found, pace, watch, as_json=args.json)
    else:
        _live(args, watch)
    return exits.DONE


def _looks(args: argparse.Namespace, watch: Watch) -> Iterator[tuple[dict[str, Any], Pace]]:
    """What there is, at each look, for ever; what could not be seen has the key ``error``."""
    from shmbuffer.memory.inspect import inspect

    while True:
        time.sleep(args.interval)
        try:
            found = inspect(args.dir, priorities=True)
        except BufferNotFoundError:
            yield {"path": args.dir, "error": "there is no buffer here any more"}, Pace.nothing()
        except ShmBufferError as error:  # is being made, or removed, or damaged: it may pass
            yield {"path": args.dir, "error": str(error)}, Pace.nothing()
        else:
            yield found, watch.see(found)


def _live(args: argparse.Namespace, watch: Watch) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        for found, pace in _looks(args, watch):
            live.update(console.drawn(*tables(found, pace, watch.history)), refresh=True)


def _print(found: Mapping[str, Any], pace: Pace, watch: Watch, *, as_json: bool) -> None:
    if as_json:
        console.show_json({**found, "pace": pace.to_json()})
    else:
        console.show(*tables(found, pace, watch.history))


def tables(found: Mapping[str, Any], pace: Pace, history: Sequence[Pace] = ()) -> list[Table]:
    """Returns what is shown of one look.

    Args:
        found: what `inspect` found, with priorities; or ``path`` and ``error``.
        pace: since the look before.
        history: earlier ones, oldest first.
    """
    if "error" in found:
        return [console.pairs(found["path"], {"buffer": found["error"]})]
    return [_buffer(found), _rates(pace, history), _clients(found, pace), _priorities(found)]


def _buffer(found: Mapping[str, Any]) -> Table:
    counters = found["counters"]
    items, room = counters["length"], counters["elements"]
    alive = [client for client in found["clients"] if client["alive"]]
    dead = len(found["clients"]) - len(alive)
    lines = {
        "state": found["state"],
        "items": f"{items:,} of {room:,} ({items / room:.1%})",
        "written": counters["write_count"],
        "clients": f"{len(alive)} alive" + (f", {dead} dead" if dead else ""),
        "size": f"{console.size(found['bytes'])}, on disk {console.size(found['disk_bytes'])}",
        "recoveries": found["epoch"],
        "after deaths": _mended(counters),
        "needs recovery": found["needs_recovery"],
    }
    return console.pairs(found["path"], {k: v for k, v in lines.items() if v is not None})


def _mended(counters: Mapping[str, Any]) -> str | None:
    done = {
        "clients reaped": counters["reaped"],
        "slots rolled back": counters["rolled_back"],
        "slots rolled forward": counters["rolled_forward"],
        "repairs": counters["repairs"],
    }
    return ", ".join(f"{value:,} {name}" for name, value in done.items() if value) or None


def _rates(pace: Pace, history: Sequence[Pace]) -> Table:
    shown = {
        "items written": "inserts",
        "items drawn": "sampled",
        "batches drawn": "samples",
        "priorities set": "updates_applied",
        "priorities that came too late": "updates_stale",
        "rows drawn again": "redraws",
        "writes that waited": "waits",
        "items evicted": "evicted",
    }
    rows: list[Sequence[object]] = [
        (name, pace.rates[key], console.bars([one.rates[key] for one in history]))
        for name, key in shown.items()
        if pace.rates and (key in _ALWAYS or any(one.rates[key] for one in history))
    ]
    if rows and pace.rates["inserts"]:
        rows.append(("drawn for each written", pace.rates["sampled"] / pace.rates["inserts"], ""))
    if pace.age is not None:
        rows.append(("age of a drawn item, in writes", pace.age, ""))
    return Table("rates", ("", "per second", "history"), rows)


_ALWAYS = ("inserts", "sampled", "samples", "updates_applied")


def _priorities(found: Mapping[str, Any]) -> Table:
    histogram = found.get("priorities")
    if not histogram:
        return Table("", (), [])
    shares = list(histogram.items())
    if len(shares) > _MOST_ROWS:  # the small ones as one
        few = shares[: 1 - _MOST_ROWS]
        shares = [(few[-1][0], sum(share for _, share in few)), *shares[1 - _MOST_ROWS :]]
    most = max(share for _, share in shares)
    rows = [(edge, f"{share:.1%}", "█" * round(24 * share / most)) for edge, share in shares]
    return Table("priorities", ("up to", "items", ""), rows)


def _clients(found: Mapping[str, Any], pace: Pace) -> Table:
    rows = []
    for client in found["clients"]:
        written, drawn = pace.clients.get(client["incarnation"], (None, None))
        idle = client["idle_s"]
        rows.append(
            (
                client["role"],
                client["pid"],
                client["state"] if client["alive"] else "dead",
                client["phase"].lower(),
                written,
                drawn,
                None if idle is None else console.span(idle),
            )
        )
    columns = ("role", "pid", "state", "claim", "written/s", "drawn/s", "last seen")
    return Table("clients", columns, rows)
