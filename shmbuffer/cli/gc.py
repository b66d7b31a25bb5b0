"""Implements ``shmbuffer gc``, which removes the temporary buffers of killed processes."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path

from shmbuffer.cli import console, exits
from shmbuffer.watch import units
from shmbuffer.watch.tables import Table

DESCRIPTION = (
    "Removes your temporary buffers whose processes were killed before they could remove them. "
    "These are buffers below TMPDIR whose owner is proven to be dead and that no process uses. The "
    "next program that creates a temporary buffer also removes them. Directories that were passed "
    "as scratch_dir are never removed."
)
EXAMPLES = "shmbuffer gc --dry-run\nshmbuffer gc"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "--dry-run", action="store_true", help="only list the buffers that would be removed"
    )


def run(args: argparse.Namespace) -> int:
    """Removes or lists the abandoned buffers."""
    from shmbuffer.memory.directory import removal

    found = {path: _disk_bytes(path) for path in removal.abandoned()}
    gone = [] if args.dry_run else removal.sweep()
    shown = found if args.dry_run else {path: found.get(path, 0) for path in gone}
    left = [] if args.dry_run else [path for path in found if path not in gone and path.exists()]
    folder = tempfile.gettempdir()
    done = "would be removed" if args.dry_run else "removed"
    rows = [(path, units.size(nbytes)) for path, nbytes in shown.items()]
    why = "could not be removed (see the log for the reason)"
    console.tell(
        {
            "folder": folder,
            "dry_run": args.dry_run,
            "directories": {str(path): nbytes for path, nbytes in shown.items()},
            "left": [str(path) for path in left],
        },
        *([] if shown or left else [f"{folder}: no abandoned buffers"]),
        Table(done, ("directory", "on disk"), rows),
        Table(why, ("directory",), [(path,) for path in left]),
        as_json=args.json,
    )
    return exits.REFUSED if left else exits.DONE


def _disk_bytes(path: Path) -> int:
    """Returns the disk usage of a directory in bytes.

    Files that another process removes in the meantime are ignored.
    """
    total = 0
    for one in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += one.lstat().st_blocks * 512
    return total
