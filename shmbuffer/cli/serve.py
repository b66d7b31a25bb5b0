"""``shmbuffer serve DIR``: a coordinator in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress import Bar
from shmbuffer.errors import BufferExistsError, BufferNotFoundError
from shmbuffer.memory import layout
from shmbuffer.memory.inspect import inspect
from shmbuffer.memory.prefault import MODES
from shmbuffer.watch import tables, units

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers
    from shmbuffer.service.coordinator import Coordinator


class _Stop(BaseException):
    """SIGTERM or SIGINT: leave in good order. Nothing on the way may take it for a failure."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "serve",
        "Makes or recovers a buffer and looks after it until SIGTERM or Ctrl-C: dead clients are "
        "reaped at once and reported on stderr. Prints one line when it is ready, and one at the "
        "end: what is left, and how to go on. Collectors and "
        "learners open the buffer with attach(DIR); they go on if this process is killed, and the "
        "next serve --on-existing recover takes over.",
        "shmbuffer serve run/buffer --capacity 1000000 --batch-size 256\n"
        "shmbuffer serve run/buffer --on-existing recover",
    )
    arguments.add_directory(parser)
    parser.add_argument(
        "--capacity",
        type=arguments.whole,
        metavar="N",
        help="how many items there is room for; needed unless a buffer is recovered",
    )
    parser.add_argument(
        "--on-existing",
        choices=("error", "recover", "overwrite"),
        default="error",
        help="what to do with a buffer that is there (default error)",
    )
    parser.add_argument(
        "--alpha",
        type=_alpha,
        default=argparse.SUPPRESS,
        metavar="A",
        help="priority exponent (default 0.6); 'none' for a buffer without priorities",
    )
    parser.add_argument(
        "--beta",
        type=arguments.number,
        default=argparse.SUPPRESS,
        metavar="B",
        help="exponent of the importance weights (default 0.4)",
    )
    parser.add_argument(
        "--eps",
        type=arguments.number,
        default=argparse.SUPPRESS,
        metavar="E",
        help="added to every priority (default 1e-8)",
    )
    parser.add_argument(
        "--priority-key",
        metavar="K",
        help="where priorities lie in a tensordict (default td_error)",
    )
    parser.add_argument(
        "--batch-size",
        type=arguments.whole,
        metavar="N",
        help="what sample() draws (default: none)",
    )
    parser.add_argument(
        "--ndim",
        type=arguments.whole,
        metavar="N",
        help="leading dimensions of the storage (default 1)",
    )
    parser.add_argument(
        "--storage",
        choices=("LazyMemmapStorage", "LazyStackStorage", "CompressedListStorage"),
        help="where items lie: LazyMemmapStorage (the default) for items of one form, the others "
        "for items of any shapes, as they are or compressed",
    )
    parser.add_argument(
        "--max-bytes",
        type=arguments.whole,
        metavar="BYTES",
        help="room for items of any shapes; needed where such a buffer is created",
    )
    parser.add_argument(
        "--metrics-port",
        type=arguments.whole,
        metavar="PORT",
        help="serve http://127.0.0.1:PORT/metrics for Prometheus; 0 takes a free port",
    )
    parser.add_argument(
        "--no-checksum",
        dest="checksum",
        action="store_false",
        help="no checksums: nothing is promised for a power cut",
    )
    parser.add_argument(
        "--no-reserve",
        dest="reserve",
        action="store_false",
        help="sparse files: a full disk kills whoever writes (SIGBUS)",
    )
    parser.add_argument(
        "--prefault",
        choices=MODES,
        default="off",
        help="make the pages of the buffer before they are needed, once its files are there; a "
        "buffer that is recovered is ready when they are, with 'full' (default off)",
    )
    parser.add_argument(
        "--auto-cleanup",
        action="store_true",
        help="remove the buffer at the end",
    )
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; both are a good end."""
    from shmbuffer.service.coordinator import Coordinator

    if args.on_existing == "error":
        _require_room(args.dir)
    logging.basicConfig(format="%(message)s")
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    served: Path | None = None
    try:
        with (
            Bar(wanted=not args.json) as bar,
            Coordinator(args.dir, on_progress=bar, **_options(args)) as coordinator,
        ):
            served = coordinator.scratch_dir
            _announce(coordinator, as_json=args.json)
            threading.Event().wait()
    except _Stop:
        if served is not None:
            _say_what_is_left(served, as_json=args.json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return exits.DONE


def _require_room(path: str) -> None:
    """Says what to do with a buffer that is there, in the words of this verb.

    Raises:
        BufferExistsError: one is there.
    """
    if os.path.exists(os.path.join(path, layout.CONTROL)):
        raise BufferExistsError(
            f"{path}: there is a buffer already; to go on with it: {_again(path)} "
            "(overwrite in place of recover begins with an empty one)",
            path=path,
        )


def _again(path: str | os.PathLike[str]) -> str:
    """Returns the command that goes on with a buffer."""
    return f"shmbuffer serve {shlex.quote(os.fspath(path))} --on-existing recover"


def _say_what_is_left(path: Path, *, as_json: bool) -> None:
    """Tells, at the end, how many items there are, who still uses them, and how to go on."""
    try:
        found = inspect(path)
    except BufferNotFoundError:
        items, users, left = 0, [], "the buffer was removed"
    else:
        items = found["counters"]["length"]
        users = [client["pid"] for client in found["clients"] if client["alive"]]
        use = f", in use by pid {', '.join(map(str, users))}" if users else ""
        left = f"{units.counted(items, 'item', 'items')} left{use}; to go on: {_again(path)}"
    if as_json:
        console.show_json({"event": "ended", "path": str(path), "items": items, "pids": users})
    else:
        print(f"ended: {tables.clean(path)}: {left}", flush=True)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of Coordinator; what was not given keeps its default."""
    given = vars(args)
    names = ("capacity", "on_existing", "priority_key", "batch_size", "ndim", "checksum", "reserve")
    more = ("storage", "max_bytes", "prefault", "metrics_port", "timeout", "auto_cleanup")
    numbers = {name: given[name] for name in ("alpha", "beta", "eps") if name in given}
    return {name: given[name] for name in (*names, *more)} | numbers


def _announce(coordinator: Coordinator, *, as_json: bool) -> None:
    pid, report = os.getpid(), coordinator.report
    if as_json:
        console.show_json(
            {
                "event": "ready",
                "path": str(coordinator.scratch_dir),
                "pid": pid,
                "capacity": coordinator.capacity,
                "recovered": None if report is None else report.to_json(),
                "metrics_port": coordinator.metrics_port,
            }
        )
    else:
        size, port = coordinator.stats()["size"], coordinator.metrics_port
        metrics = "" if port is None else f"metrics at http://127.0.0.1:{port}/metrics, "
        print(
            f"ready: {coordinator.scratch_dir}, {size:,} of {coordinator.capacity:,} items, "
            f"{metrics}pid {pid}; Ctrl-C or SIGTERM ends it",
            flush=True,
        )


def _alpha(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return arguments.number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'none'") from None


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: the way out has deadlines of its own, a second signal would only cut it short.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop
