"""Finds the buffer that a path refers to, and similar paths that contain buffers."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shmbuffer.errors import FormatError
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.path_checks import explain_errors

_OF_TORCHRL = ("buffer_metadata.json", "storage_metadata.json")
_NEIGHBOURS = 1000  # the largest number of entries that are examined in a directory


def _folders(where: Path) -> list[Path]:
    """Returns some of the subdirectories of a directory, sorted."""
    with suppress(OSError), os.scandir(where) as entries:
        first = islice(entries, _NEIGHBOURS)
        return sorted(Path(one) for one in first if one.is_dir(follow_symlinks=False))
    return []


def did_you_mean(where: Path) -> str:
    """Returns a question that names up to three nearby buffers; empty if there are none."""
    near = [where.parent, *_folders(where)]
    if not os.path.exists(where):  # one of its components may be misspelt
        there = next((one for one in where.parents if os.path.exists(one)), where)
        rest = where.relative_to(there).parts[1:]
        near += [one.joinpath(*rest) for one in _folders(there)]
    found = [str(one) for one in dict.fromkeys(near) if os.path.isfile(one / layout.CONTROL)]
    others = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"did you mean {', '.join(found[:3])}{others}?" if found else ""


def directory_of(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of the buffer at a path, which may be that of a save."""
    path = Path(path)
    inner = path / "storage"
    return inner if not is_buffer(path) and is_buffer(inner) else path


def is_buffer(path: Path) -> bool:
    """True if a directory contains the files of a buffer."""
    with explain_errors(path, reading=True):
        return (path / layout.CONTROL).exists()


def require_no_export(path: Path) -> None:
    """Raises FormatError for a save in TorchRL's layout."""
    if any((path / name).exists() for name in _OF_TORCHRL):
        raise FormatError(
            f"{path}: this is a save in TorchRL's layout, to which no process can attach; load it "
            "into a buffer with loads()",
            path=str(path),
        )
