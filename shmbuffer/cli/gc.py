"""``shmbuffer gc``: what did killed processes leave in the folder for temporary files?"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shmbuffer.cli import arguments, console, exits
from shmbuffer.watch import tables, units
from shmbuffer.watch.tables import Table

if TYPE_CHECKING:
    from shmbuffer.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = arguments.add_verb(
        subparsers,
        "gc",
        "Removes temporary buffers of yours whose processes were killed before they could do it: "
        "those whose owner is proven dead and that nobody uses, in the folder that TMPDIR names. "
        "The next program that makes a temporary buffer does the same. A directory that was given "
        "by name is never removed.",
        "shmbuffer gc --dry-run\nshmbuffer gc",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: argparse.Namespace) -> int:
    """Removes, or lists.

    Raises:
        OSError, ShmBufferError: the folder, or what is in it, cannot be looked at.
    """
    from shmbuffer.memory import removal

    found = {path: _taken(path) for path in removal.abandoned()}
    gone = [] if args.dry_run else removal.sweep()
    shown = found if args.dry_run else {path: found.get(path, 0) for path in gone}
    left = [] if args.dry_run else [path for path in found if path not in gone and path.exists()]
    if args.json:
        console.show_json(
            {
                "folder": tempfile.gettempdir(),
                "dry_run": args.dry_run,
                "directories": {str(path): nbytes for path, nbytes in shown.items()},
                "left": [str(path) for path in left],
            }
        )
    else:
        _print(shown, left, dry_run=args.dry_run)
    return exits.REFUSED if left else exits.DONE


def _print(shown: dict[Path, int], left: list[Path], *, dry_run: bool) -> None:
    done = "would be removed" if dry_run else "removed"
    if not shown and not left:
        print(tables.clean(f"{tempfile.gettempdir()}: nothing was left there"))
    rows = [(path, units.size(nbytes)) for path, nbytes in shown.items()]
    console.show(
        Table(done, ("directory", "on disk"), rows),
        Table("could not be removed (the log says why)", ("directory",), [(it,) for it in left]),
    )


def _taken(path: Path) -> int:
    """Bytes on disk of what lies in there, as far as it is still there."""
    taken = 0
    for one in path.rglob("*"):
        with suppress(FileNotFoundError):
            taken += one.lstat().st_blocks * 512
    return taken
