"""Finds the buffer that a path refers to, and similar paths that contain buffers."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shmbuffer.errors import FormatError
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.path_checks import explain_errors

_TORCHRL_FILES = ("buffer_metadata.json", "storage_metadata.json")
_MAX_ENTRIES = 1000  # number of directory entries that are examined at most


def _folders(where: Path) -> list[Path]:
    """Returns the sorted paths of the subdirectories of a directory.

    Only the first `_MAX_ENTRIES` entries are examined. If the directory cannot be read, the result
    is empty.
    """
    with suppress(OSError), os.scandir(where) as entries:
        first = islice(entries, _MAX_ENTRIES)
        return sorted(Path(entry) for entry in first if entry.is_dir(follow_symlinks=False))
    return []


def did_you_mean(where: Path) -> str:
    """Returns a question that names up to three buffers near a path, or "" if there are none."""
    near = [where.parent, *_folders(where)]
    if not os.path.exists(where):  # a component of the path may be misspelt
        existing = next((parent for parent in where.parents if os.path.exists(parent)), where)
        rest = where.relative_to(existing).parts[1:]
        near += [folder.joinpath(*rest) for folder in _folders(existing)]
    unique = dict.fromkeys(near)
    buffers = [str(folder) for folder in unique if os.path.isfile(folder / layout.CONTROL)]
    others = f" and {len(buffers) - 3} more" if len(buffers) > 3 else ""
    return f"did you mean {', '.join(buffers[:3])}{others}?" if buffers else ""


def directory_of(path: str | os.PathLike[str]) -> Path:
    """Returns the directory that contains the buffer files of a path.

    In a save, this directory is the subdirectory ``storage``.
    """
    path = Path(path)
    inner = path / "storage"
    return inner if not is_buffer(path) and is_buffer(inner) else path


def is_buffer(path: Path) -> bool:
    """True if a directory contains a control file, and is therefore a buffer."""
    with explain_errors(path, reading=True):
        return (path / layout.CONTROL).exists()


def require_no_export(path: Path) -> None:
    """Raises FormatError if a directory is a save in TorchRL's layout."""
    if any((path / name).exists() for name in _TORCHRL_FILES):
        raise FormatError(
            f"{path}: this is a save in TorchRL's layout, to which no process can attach; load it "
            "into a buffer with loads()",
            path=str(path),
        )
