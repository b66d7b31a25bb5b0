"""Implements ``shmbuffer export DIR FILE``, which writes the items of a buffer to a file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shmbuffer.cli import arguments, console, exits
from shmbuffer.cli.progress_bar import Bar
from shmbuffer.errors import ShmBufferError
from shmbuffer.watch import units, words

DESCRIPTION = (
    "Exports the items of a buffer, oldest first, to a Parquet file (one column per leaf), an "
    "HDF5 file (one dataset per leaf), or a directory for TensorDict.load_memmap. The buffer can "
    "be in use; items that are overwritten during the export are left out. The command joins "
    "as a client, so a buffer whose processes were killed is recovered first. A buffer of another "
    "user, or on a read-only file system, is copied into memory instead and is not changed. "
    "Priorities and the cursor are not exported; buffer.dumps() saves everything. Needs torch."
)
EXAMPLES = (
    "shmbuffer export run/buffer items.parquet\n"
    "shmbuffer export run/buffer items.h5\n"
    "shmbuffer export run/buffer items --format tensordict --json"
)
FORMATS = ("parquet", "hdf5", "tensordict")
SUFFIXES = {".parquet": "parquet", ".h5": "hdf5", ".hdf5": "hdf5", "": "tensordict"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    arguments.add_directory(parser)
    parser.add_argument("file", metavar="FILE", type=Path, help="file or directory to create")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="format; by default chosen by the suffix of FILE: .parquet, .h5, .hdf5, or none "
        "for tensordict",
    )
    arguments.add_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the items to the file and prints the number of items and the size."""
    kind = args.format or SUFFIXES.get(args.file.suffix)
    if kind is None:
        raise ValueError(
            f"{args.file}: no format has this suffix. Pass --format with one of "
            f"{', '.join(FORMATS)}"
        )
    from shmbuffer.memory.upkeep.inspect import inspect

    inspect(args.dir, live_bytes=False)  # raises an error, if any, before torch is imported
    from shmbuffer.distributed.nearby import engine_of
    from shmbuffer.saves.export import export
    from shmbuffer.service.client import open_to_read

    began = time.monotonic()
    with Bar(wanted=not args.json) as bar:
        opened, changed = open_to_read(args.dir, timeout=args.timeout, on_progress=bar)
        with opened as buffer:
            try:
                items = export(buffer.storage, args.file, kind)
            except TypeError as error:  # the items cannot be written in this format
                raise ShmBufferError(str(error), path=args.dir) from error
            report = engine_of(buffer).report
    seconds = time.monotonic() - began
    nbytes = sum(one.stat().st_size for one in (args.file, *args.file.rglob("*")) if one.is_file())
    counted = units.counted(items, "item", "items")
    recovery = None if report is None else report.to_json()
    repairs = [] if recovery is None else words.repairs(recovery)
    first = "recovered first"
    if changed is not None:
        first = "copied first, without taking the lock"
        repairs += [
            units.counted(changed, "item", "items") + " overwritten during the copy and left out"
        ]
    console.tell(
        {
            "path": args.dir,
            "file": str(args.file),
            "format": kind,
            "items": items,
            "bytes": nbytes,
            "seconds": seconds,
            "recovery": recovery,
            "left_out": changed,
        },
        *([f"{first}: {', '.join(repairs)}"] if repairs else []),
        f"{args.file}: {counted}, {units.size(nbytes)}, {kind}, in {units.span(seconds)}",
        as_json=args.json,
    )
    return exits.DONE
