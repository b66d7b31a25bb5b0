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
from shmbuffer.watch import units

if TYPE_CHECKING:
    from shmbuffer.service.coordinator import Coordinator


class _Stop(BaseException):
    """SIGTERM or SIGINT: leave in good order. Nothing on the way may take it for a failure."""


DESCRIPTION = (
    "Makes or recovers a buffer and looks after it until SIGTERM or Ctrl-C: dead clients are "
    "reaped at once and reported on stderr. Prints one line when it is ready, and one at the "
    "end: what is left, and how to go on. Collectors and "
    "learners open the buffer with attach(DIR); they go on if this process is killed, and the "
    "next serve --on-existing recover takes over."
)
EXAMPLES = (
    "shmbuffer serve run/buffer --capacity 1000000 --batch-size 256\n"
    "shmbuffer serve run/buffer --on-existing recover"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of the verb."""
    arguments.add_directory(parser)
    for name, says, how in _OPTIONS:
        parser.add_argument(name, help=says, **{"default": argparse.SUPPRESS, **how})
    arguments.add_timeout(parser)


def _alpha(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return arguments.number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'none'") from None


#: Arguments of Coordinator; what is not given has the default that it has there.
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "--capacity",
        "how many items there is room for; needed unless a buffer is recovered",
        {"type": arguments.whole, "metavar": "N"},
    ),
    (
        "--on-existing",
        "what to do with a buffer that is there (default error)",
        {"choices": ("error", "recover", "overwrite"), "default": "error"},
    ),
    (
        "--alpha",
        "priority exponent (default 0.6); 'none' for a buffer without priorities",
        {"type": _alpha, "metavar": "A"},
    ),
    (
        "--beta",
        "exponent of the importance weights (default 0.4)",
        {"type": arguments.number, "metavar": "B"},
    ),
    (
        "--eps",
        "added to every priority (default 1e-8)",
        {"type": arguments.number, "metavar": "E"},
    ),
    (
        "--priority-key",
        "where priorities lie in a tensordict (default td_error)",
        {"metavar": "K"},
    ),
    (
        "--batch-size",
        "what sample() draws (default: none)",
        {"type": arguments.whole, "metavar": "N"},
    ),
    (
        "--ndim",
        "leading dimensions of the storage (default 1)",
        {"type": arguments.whole, "metavar": "N"},
    ),
    (
        "--storage",
        "where items lie: LazyMemmapStorage (the default) for items of one form, the others "
        "for items of any shapes, as they are or compressed",
        {"choices": ("LazyMemmapStorage", "LazyStackStorage", "CompressedListStorage")},
    ),
    (
        "--max-bytes",
        "room for items of any shapes; needed where such a buffer is created",
        {"type": arguments.whole, "metavar": "BYTES"},
    ),
    (
        "--metrics-port",
        "serve http://127.0.0.1:PORT/metrics for Prometheus; 0 takes a free port",
        {"type": arguments.whole, "metavar": "PORT"},
    ),
    (
        "--no-checksum",
        "no checksums: nothing is promised for a power cut",
        {"dest": "checksum", "action": "store_false"},
    ),
    (
        "--no-reserve",
        "sparse files: a full disk kills whoever writes (SIGBUS)",
        {"dest": "reserve", "action": "store_false"},
    ),
    (
        "--prefault",
        "make the pages of the buffer before they are needed, once its files are there; a "
        "buffer that is recovered is ready when they are, with 'full' (default off)",
        {"choices": MODES},
    ),
    (
        "--auto-cleanup",
        "remove the buffer at the end",
        {"action": "store_true", "default": False},
    ),
)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; both are a good end."""
    from shmbuffer.service.coordinator import Coordinator

    wished = {k: v for k, v in vars(args).items() if k not in ("dir", "json", "debug")}
    if args.on_existing == "error":
        _require_room(args.dir)
    logging.basicConfig(format="%(message)s")
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    served: Path | None = None
    try:
        with (
            Bar(wanted=not args.json) as bar,
            Coordinator(args.dir, on_progress=bar, **wished) as coordinator,
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
    told = {"event": "ended", "path": str(path), "items": items, "pids": users}
    console.tell(told, f"ended: {path}: {left}", as_json=as_json)


def _announce(coordinator: Coordinator, *, as_json: bool) -> None:
    pid, report = os.getpid(), coordinator.report
    size, port = coordinator.stats()["size"], coordinator.metrics_port
    metrics = "" if port is None else f"metrics at http://127.0.0.1:{port}/metrics, "
    console.tell(
        {
            "event": "ready",
            "path": str(coordinator.scratch_dir),
            "pid": pid,
            "capacity": coordinator.capacity,
            "recovered": None if report is None else report.to_json(),
            "metrics_port": port,
        },
        f"ready: {coordinator.scratch_dir}, {size:,} of {coordinator.capacity:,} items, "
        f"{metrics}pid {pid}; Ctrl-C or SIGTERM ends it",
        as_json=as_json,
    )


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: the way out has deadlines of its own, a second signal would only cut it short.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop
