"""Implements ``shmbuffer serve DIR``, which runs a coordinator in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
import select
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress_bar import Bar
from shmbuffer.errors import BufferExistsError, BufferNotFoundError
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.prefault import MODES
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.service.buffer_config import STORAGES
from shmbuffer.watch import units
from shmbuffer.watch.top import terminal

if TYPE_CHECKING:
    from shmbuffer.service.coordinator import Coordinator


DESCRIPTION = (
    "Creates or recovers a buffer and runs its coordinator until SIGTERM or Ctrl-C. Dead clients "
    "are reaped immediately and reported on stderr. Prints one line when the buffer is ready, and "
    "one at the end with the number of items and the command to continue. Collectors and learners "
    "open the buffer with attach(DIR). They keep running if this process is killed. To start a new "
    "coordinator for them, run the verb again with --on-existing recover."
)
EXAMPLES = (
    "shmbuffer serve run/buffer --capacity 1000000 --batch-size 256\n"
    "shmbuffer serve run/buffer --on-existing recover"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.argument_default = argparse.SUPPRESS  # the defaults of Coordinator apply
    add = parser.add_argument
    integer, number = partial(add, type=arguments.integer), partial(add, type=arguments.number)
    says = "maximum number of items; required unless an existing buffer is recovered"
    integer("--capacity", metavar="N", help=says)
    says = "what to do with an existing buffer (default error)"
    add("--on-existing", choices=("error", "recover", "overwrite"), default="error", help=says)
    says = "priority exponent (default 0.6); 'none' for a buffer without priorities"
    add("--alpha", type=_alpha, metavar="A", help=says)
    number("--beta", metavar="B", help="exponent of the importance weights (default 0.4)")
    number("--eps", metavar="E", help="added to every priority (default 1e-8)")
    add(
        "--priority-key",
        metavar="K",
        help="key of the priorities in a TensorDict (default td_error)",
    )
    integer("--batch-size", metavar="N", help="default number of items in a sample (default: none)")
    integer("--ndim", metavar="N", help="leading dimensions of the storage (default 1)")
    add(
        "--storage",
        choices=tuple(STORAGES),
        help="class of the storage: LazyMemmapStorage (the default) for items of equal shapes, "
        "the others for items of any shape, raw or compressed",
    )
    says = "size of the byte ring for items of any shape; required to create such a buffer"
    integer("--max-bytes", metavar="BYTES", help=says)
    says = "serve http://127.0.0.1:PORT/metrics for Prometheus; 0 selects a free port"
    integer("--metrics-port", metavar="PORT", help=says)
    says = "write no checksums, so that damage to items after a power cut is not detected"
    add("--no-checksum", dest="checksum", action="store_false", help=says)
    says = "create sparse files; if the disk becomes full, the writer is killed (SIGBUS)"
    add("--no-reserve", dest="reserve", action="store_const", const=False, help=says)
    add(
        "--prefault",
        choices=MODES,
        help="allocate the pages of the buffer in advance; with 'full' a recovered buffer is "
        "ready only when all pages are allocated (default off)",
    )
    add(
        "--auto-cleanup",
        action="store_true",
        default=False,
        help="remove the buffer when the coordinator ends",
    )
    arguments.add_timeout(parser)


def _alpha(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return arguments.number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'none'") from None


def run(args: argparse.Namespace) -> int:
    """Runs a coordinator until SIGTERM or SIGINT arrives. Both count as success."""
    from shmbuffer.service.coordinator import Coordinator

    arguments = {k: v for k, v in vars(args).items() if k not in ("dir", "json", "debug")}
    if args.on_existing == "error":
        _require_no_buffer(args.dir)
    logging.basicConfig(format="%(message)s")
    served: Path | None = None
    with (
        terminal.leave_on(signal.SIGTERM, signal.SIGINT),
        terminal.signal_fd() as signalled,
        Bar(wanted=not args.json) as bar,
        Coordinator(args.dir, on_progress=bar, **arguments) as coordinator,
    ):
        served = coordinator.scratch_dir
        _announce(coordinator, as_json=args.json)
        select.select([signalled], [], [])
    if served is not None:
        _announce_end(served, as_json=args.json)
    return exits.DONE


def _require_no_buffer(path: str) -> None:
    """Raises an error that names the options of this verb if the directory contains a buffer."""
    if os.path.exists(os.path.join(path, layout.CONTROL)):
        raise BufferExistsError(
            f"{path}: already contains a buffer. To continue with it, run: "
            f"{_continue_command(path)} (use overwrite instead of recover to start with an empty "
            "buffer)",
            path=path,
        )


def _continue_command(path: str | os.PathLike[str]) -> str:
    """Returns the command that continues with an existing buffer."""
    return f"shmbuffer serve {shlex.quote(os.fspath(path))} --on-existing recover"


def _announce_end(path: Path, *, as_json: bool) -> None:
    """Prints the number of remaining items, the living clients, and the command to continue."""
    try:
        found = inspect(path)
    except BufferNotFoundError:
        items, users, left = 0, [], "the buffer was removed"
    else:
        items = found["counters"]["length"]
        users = [client["pid"] for client in found["clients"] if client["alive"]]
        use = f", in use by pid {', '.join(map(str, users))}" if users else ""
        counted = units.counted(items, "item", "items")
        left = f"{counted} left{use}; to continue, run: {_continue_command(path)}"
    value = {"event": "ended", "path": str(path), "items": items, "pids": users}
    console.tell(value, f"ended: {path}: {left}", as_json=as_json)


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
        f"{metrics}pid {pid}; press Ctrl-C or send SIGTERM to stop",
        as_json=as_json,
    )
