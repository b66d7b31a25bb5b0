"""Edits the files of a buffer from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def edited(path: Path, name: str) -> Iterator[Any]:
    """Yields the bytes of a file, and writes them back after the block."""
    data = np.fromfile(path / name, np.uint8)
    yield data
    with (path / name).open("r+b") as file:
        file.write(data.tobytes())
