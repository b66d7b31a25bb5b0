"""Files of columns, as `ReplayBuffer.to_parquet` and other programs write them."""

from __future__ import annotations

from pathlib import Path

from shmbuffer.replay.datasets.converted import FoundDataset
from shmbuffer.replay.parquet_file import File


def find(name: str) -> FoundDataset:
    """A file on this machine."""
    path = Path(name).absolute()
    file = File(path)
    version = path.stat().st_mtime_ns
    return FoundDataset("parquet", path.name, version, file.rows, lambda: file.batches(file.chunk))
