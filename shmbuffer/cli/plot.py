"""Implements ``shmbuffer plot DIR -o report.png``, which draws the history of a buffer."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmbuffer.cli import arguments, console, exits
from shmbuffer.extras import missing

if TYPE_CHECKING:
    from shmbuffer.watch.buffer_state import BufferState
    from shmbuffer.watch.findings import Finding

SUFFIXES = (".png", ".svg", ".pdf")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LAST_S = 3600.0


DESCRIPTION = (
    "Plots the recorded history of a buffer as one picture: rates, fill, samples per insert, age "
    "and priorities over time, clients and deaths, items by collector, and a headline with "
    "possible problems. The coordinator records the history in the buffer's directory, so it ends "
    "now or when the coordinator died. Takes no lock and does not change the buffer. Needs "
    "matplotlib."
)
EXAMPLES = (
    "shmbuffer plot run/buffer -o report.png\n"
    "shmbuffer plot run/buffer -o report.svg --last 10m\n"
    "shmbuffer plot run/buffer --json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=_picture,
        metavar="FILE",
        help="output file: .png, .svg or .pdf (default shmbuffer-report.png; none with --json)",
    )
    parser.add_argument(
        "--last",
        type=_span,
        default=_LAST_S,
        metavar="TIME",
        help="length of the history to plot: 90s, 10m, 2h, 7d (default 1h)",
    )


def run(args: argparse.Namespace) -> int:
    """Draws the history and prints possible problems."""
    from shmbuffer.watch import findings
    from shmbuffer.watch.buffer_state import read_state

    buffer = read_state(args.dir, args.last)
    found = findings.find_problems(buffer)
    path = args.output
    if path is None and not args.json:
        path = Path("shmbuffer-report.png")
    if path is not None:
        path = _draw(buffer, found, path)
    lines = [findings.verdict(buffer, found), *(f"  {one.says}" for one in found)]
    if buffer.timeline is None:
        lines.append(f"no history: {buffer.absent}")
    console.tell(_json(buffer, found, path), *lines, f"picture: {path}", as_json=args.json)
    return exits.DONE


def _draw(buffer: BufferState, found: list[Finding], path: Path) -> Path:
    from shmbuffer.saves.publication import publish_file
    from shmbuffer.saves.safe_files import write_file
    from shmbuffer.watch.plot import report

    try:
        content = report.picture(buffer, found, path.suffix.lower().removeprefix("."))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise missing(
            "--json prints the findings without a picture; the picture needs matplotlib",
            "plot",
            name=error.name,
        ) from error
    with publish_file(path) as beside:
        write_file(beside, content)
    return path.absolute()


def _json(buffer: BufferState, found: list[Finding], path: Path | None) -> dict[str, Any]:
    line = buffer.timeline
    names = (
        "inserts",
        "batches_sampled",
        "items_sampled",
        "updates_applied",
        "updates_stale",
        "redraws",
        "waits",
    )
    recorded = None
    if line is not None:
        recorded = {
            "begin_s": line.begin_s,
            "end_s": line.end_s,
            "grown": {name: line.total(name) for name in names if line.has(name)},
            "gaps": line.gaps,
            "events": [
                {"time_s": one.time_s, "kind": one.kind.name, "who": one.who, "pid": one.pid}
                for one in line.events
            ],
        }
    return {
        "path": buffer.found["path"],
        "healthy": not found,
        "findings": [{"name": one.name, "says": one.says} for one in found],
        "history": recorded,
        "absent": None if line is not None else buffer.absent,
        "picture": None if path is None else str(path),
    }


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(SUFFIXES)}")
    return path


def _span(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", text)
    if found is None or found[2] not in _UNITS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time span, such as 90s, 10m, 2h or 7d")
    value = arguments.seconds(found[1]) * _UNITS_S[found[2]]
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive time span")
    return value
