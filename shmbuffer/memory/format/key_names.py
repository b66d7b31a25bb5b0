"""Checks the keys of leaves, which become names of files, HDF5 data sets or columns.

The keys of a leaf become the path of a file in the directory of a buffer, a save or a data set.
This package percent-encodes keys, but tensordict 0.12 and HDF5 use them unchanged. A key must
therefore be a safe file name even if it is not encoded. It is checked before it is passed to
another library.

Invariants: The path of an accepted key always stays inside its directory, whether or not the key is
encoded. No two leaves share a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import quote

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory.format.leaf import MAX_DEPTH, KeyPath
from shmbuffer.memory.system.beneath import leads_down

RESERVED = frozenset({"shape", "device", "_type", "_format_version", "_class"})
"""Names of tensordict's own entries in ``meta.json``, which would overwrite a key of that name."""

_NAME_BYTES = 255  # NAME_MAX of Linux


def is_number(name: str) -> bool:
    """True if a name consists only of the digits 0 to 9, so that `int` accepts it.

    `str.isdigit` would also accept "²", which `int` rejects, and the digits of other scripts, which
    this package never writes.
    """
    return name.isascii() and name.isdecimal()


def require_file_name(
    path: KeyPath, what: str = "leaf", *, folder: bool = False, slashes: bool = True
) -> None:
    """Raises SchemaMismatchError unless a nested key can be the path of a file in a directory.

    Args:
        path: The nested key, outermost key first.
        what: Description of the object with this key for the message, such as
            ``"x.parquet: column"``.
        folder: Whether the last key is the name of a directory. All keys before it are.
        slashes: Whether a key can contain a slash. HDF5 interprets a key with slashes as a path.
    """
    if len(path) > MAX_DEPTH:
        _refuse(path, what, f"it has {len(path)} nested keys, but the limit is {MAX_DEPTH}")
    for depth, key in enumerate(path, 1):
        if not leads_down(key):
            why = "leads out of the directory, or is not a valid file name"
        elif not slashes and "/" in key:
            why = "contains a slash, so it would be interpreted as a path"
        elif not _fits_file_name(key):
            why = "is too long for a file name, or is not valid text"
        elif (
            key in RESERVED
            or (depth == 1 and key == ".shmbuffer")
            # A directory must not have the name of a file that can be in the same directory.
            or (_is_name_of_file(key) and (folder or depth < len(path)))
        ):
            why = "is reserved on disk"
        else:
            continue
        _refuse(path, what, f"the key {key!r} {why}")


def require_file_names(
    paths: Iterable[KeyPath], what: str = "leaf", *, slashes: bool = True
) -> None:
    """Raises SchemaMismatchError unless leaves with these paths can be stored in one directory.

    Each path must pass `require_file_name`. All paths must be different, and the path of a leaf
    must not be the directory of another leaf.
    """
    leaves: set[KeyPath] = set()
    folders: dict[KeyPath, KeyPath] = {}  # the path of each directory and of one leaf in it
    for path in paths:
        require_file_name(path, what, slashes=slashes)
        if path in leaves:
            raise SchemaMismatchError(
                f"{what} {_dotted_name(path)!r} occurs twice; rename one of them",
                leaf=_dotted_name(path),
            )
        above = [path[:depth] for depth in range(1, len(path))]
        outer = next(filter(leaves.__contains__, above), None)
        inner = folders.get(path)
        if outer is not None or inner is not None:
            name = _dotted_name(path if outer is None else outer)
            inner_name = _dotted_name(path if inner is None else inner)
            raise SchemaMismatchError(
                f"{what} {name!r} is a tensor, but {inner_name!r} is the key of an entry in it;"
                " rename one of them",
                leaf=inner_name,
            )
        leaves.add(path)
        folders.update(dict.fromkeys(above, path))


def _refuse(path: KeyPath, what: str, why: str) -> NoReturn:
    """Raises SchemaMismatchError for a key, with the reason ``why``."""
    name = _dotted_name(path)
    raise SchemaMismatchError(f"{what} {name!r}: {why}; rename it", leaf=name)


def _dotted_name(path: KeyPath) -> str:
    """Returns a nested key in dotted notation, such as ``next.obs``."""
    return ".".join(path)


def _fits_file_name(key: str) -> bool:
    """True if the percent-encoded key and its extension are short enough for a file name."""
    try:
        return len(quote(key, safe="")) + len(".memmap") <= _NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _is_name_of_file(key: str) -> bool:
    """True if a file of a save could have this name."""
    return key == "meta.json" or key.endswith(".memmap")
