"""Maintains made.json, the list of files that a definition creates in the scratch directory.

The list is written before the files are created, so that another process can remove the files that
remain after a crash. A list with names that this package does not create is rejected.
"""

from __future__ import annotations

import json
from contextlib import suppress

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError, CorruptBufferError
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.region import Directory

NAME = f"{layout.PRIVATE}/made.json"


def note(directory: Directory, names: list[str]) -> None:
    """Writes the list of the files that the caller is about to create, by their relative paths."""
    directory.write_atomic(NAME, json.dumps(names).encode())


def remove(directory: Directory) -> None:
    """Removes the listed files, then their directories if these are empty, and then the list."""
    folders, names = set(), _read_list(directory)
    for name in names:
        unlink(directory, name)
        parts = name.split("/")[:-1]
        folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        _core.reached("remove.file")
    for folder in sorted(folders, key=len, reverse=True):
        if directory.exists(folder) and not directory.rmdir(folder):
            directory.sync(folder)
    if names:
        # if the list were removed first, files that reappear after a power cut would remain forever
        directory.sync()
    unlink(directory, NAME)


def unlink(directory: Directory, name: str) -> None:
    """Removes a file, and the temporary files of a process that was killed while writing it."""
    directory.unlink(name)
    if not (name.endswith(".json") or name == layout.DICTIONARY):
        return
    with suppress(BufferNotFoundError):  # the directory does not exist
        for left in directory.leftovers(name):
            directory.unlink(left)


def _read_list(directory: Directory) -> list[str]:
    """Reads the list of files; raises CorruptBufferError if it is damaged."""
    if not directory.exists(NAME):
        return []
    where = directory.path / NAME
    try:
        names = json.loads(directory.read(NAME, limit=layout.SCHEMA_LIMIT))
    except (ValueError, RecursionError) as error:
        raise CorruptBufferError(
            f"{where}: cannot be read ({error}); remove the directory by hand", path=str(where)
        ) from error
    if not isinstance(names, list) or not all(map(_is_ours, names)):
        raise CorruptBufferError(
            f"{where}: this is not a list of files that shmbuffer creates; remove the directory by "
            "hand",
            path=str(where),
        )
    return names


def _is_ours(name: object) -> bool:
    """True if a first write creates files with this name outside of `layout.PRIVATE`."""
    if not isinstance(name, str):
        return False
    first, last = name.split("/")[0], name.rpartition("/")[2]
    return first != layout.PRIVATE and (last == "meta.json" or last.endswith(".memmap"))
