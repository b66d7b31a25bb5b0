"""Checks names of leaves that become names of files, data sets or columns.

A key is the name of a file below the directory of a buffer, a save or a data set. This package
percent-encodes it, while tensordict 0.12 and HDF5 use it unchanged. The rules therefore do not rely
on the encoding, and are applied before a name is passed to any library.

Always true: an accepted key never leads outside of its directory, encoded or not, and no two leaves
share a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import quote

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory.format.leaf import MAX_DEPTH, KeyPath
from shmbuffer.memory.system.beneath import leads_down

RESERVED = frozenset({"shape", "device", "_type", "_format_version", "_class"})
"""The entries of tensordict in a meta.json, which would overwrite a key of that name."""

_NAME_BYTES = 255  # NAME_MAX of Linux


def is_number(name: str) -> bool:
    """True if a name consists of the digits 0 to 9, so that `int` accepts it.

    `str.isdigit` is also true of "²", which `int` refuses, and of digits of other scripts, which
    this package never writes.
    """
    return name.isascii() and name.isdecimal()


def require_file_name(
    path: KeyPath, what: str = "leaf", *, folder: bool = False, slashes: bool = True
) -> None:
    """Raises SchemaMismatchError unless a nested key can be the name of a file below a directory.

    Args:
        path: The nested key, from the root.
        what: Description of the named object for the message, such as ``"x.parquet: column"``.
        folder: Whether the last key is the name of a directory, as the keys before it are.
        slashes: Whether a key may contain a slash. HDF5 takes a key with slashes for a path.
    """
    if len(path) > MAX_DEPTH:
        _refuse(path, what, f"it is nested {len(path)} keys deep, and {MAX_DEPTH} are the limit")
    for depth, key in enumerate(path, 1):
        if not leads_down(key):
            why = "leads out of the directory, or is not a valid file name"
        elif not slashes and "/" in key:
            why = "contains a slash, which would be taken for a path"
        elif not _fits_file_name(key):
            why = "is too long for the name of a file, or is not valid text"
        elif (
            key in RESERVED
            or (depth == 1 and key == ".shmbuffer")
            # a directory cannot have the name of a file that may be beside it
            or (_is_name_of_file(key) and (folder or depth < len(path)))
        ):
            why = "is reserved on disk"
        else:
            continue
        _refuse(path, what, f"the key {key!r} {why}")


def require_file_names(
    paths: Iterable[KeyPath], what: str = "leaf", *, slashes: bool = True
) -> None:
    """Raises SchemaMismatchError unless these leaves can be stored in one directory.

    Each leaf must pass `require_file_name`, and no leaf may contain another.
    """
    leaves: set[KeyPath] = set()
    folders: dict[KeyPath, KeyPath] = {}  # directories, each with one leaf in it
    for path in paths:
        require_file_name(path, what, slashes=slashes)
        if path in leaves:
            raise SchemaMismatchError(
                f"{what} {_dotted_name(path)!r} occurs twice; rename one", leaf=_dotted_name(path)
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
    name = _dotted_name(path)
    raise SchemaMismatchError(f"{what} {name!r}: {why}; rename it", leaf=name)


def _dotted_name(path: KeyPath) -> str:
    return ".".join(path)


def _fits_file_name(key: str) -> bool:
    """True if a key fits into the name of a file after percent-encoding."""
    try:
        return len(quote(key, safe="")) + len(".memmap") <= _NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _is_name_of_file(key: str) -> bool:
    return key == "meta.json" or key.endswith(".memmap")
