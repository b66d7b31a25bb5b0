"""Reads Parquet files that were written by `ReplayBuffer.to_parquet` or by other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from shmbuffer.datasets.converted import FoundDataset, identity_of
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.parquet_file import File, part_files
from shmbuffer.saves.safe_files import open_file

_END_BYTES = 8  # size of the footer's length and the magic number at the end of a file


def find(name: str, rename: Mapping[str, str] | None = None) -> FoundDataset:
    """Finds a file or a folder of part files on this machine. The path can be a symbolic link."""
    path = resolve_path(name)
    identity = _identity(path, rename)
    file = File(path, rename)
    return FoundDataset(
        kind="parquet",
        name=str(path),
        identity=identity,
        identify=lambda: _identity(path, rename),
        items=file.rows,
        batches=lambda: file.batches(file.chunk),
        losses={},
    )


def _identity(path: Path, rename: Mapping[str, str] | None) -> str:
    files = part_files(path)
    metadata = json.dumps(sorted((rename or {}).items())).encode()
    return identity_of(files, metadata + b"".join(map(_footer, files)))


def _footer(file: Path) -> bytes:
    """Returns the bytes of the metadata at the end of a Parquet file."""
    with open_file(file) as fd:
        size = os.fstat(fd).st_size
        end = os.pread(fd, _END_BYTES, max(0, size - _END_BYTES))
        footer = min(size, int.from_bytes(end[:4], "little") + _END_BYTES)
        return os.pread(fd, footer, size - footer)
