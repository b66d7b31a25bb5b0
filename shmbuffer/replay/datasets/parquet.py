"""Files of columns, as `ReplayBuffer.to_parquet` and other programs write them."""

from __future__ import annotations

import os
from pathlib import Path

from shmbuffer.memory.system.path_checks import followed
from shmbuffer.replay.datasets.converted import FoundDataset, identity_of
from shmbuffer.replay.parquet_file import File
from shmbuffer.replay.safe_files import open_file

_END_BYTES = 8  # the length of the footer, and the magic number


def find(name: str) -> FoundDataset:
    """Finds a file on this machine; the path may be a link to it."""
    path = followed(name)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file; check the path")
    identity = _identity(path)
    file = File(path)
    return FoundDataset(
        kind="parquet",
        name=str(path),
        identity=identity,
        identify=lambda: _identity(path),
        items=file.rows,
        batches=lambda: file.batches(file.chunk),
        losses={},
    )


def _identity(path: Path) -> str:
    with open_file(path) as fd:
        size = os.fstat(fd).st_size
        end = os.pread(fd, _END_BYTES, max(0, size - _END_BYTES))
        footer = min(size, int.from_bytes(end[:4], "little") + _END_BYTES)
        return identity_of([path], os.pread(fd, footer, size - footer))
