"""Changes to the files of a buffer from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def edited(path: Path, name: str) -> Iterator[Any]:
    """Gives the bytes of a file, and writes back what the block has made of them."""
    data = np.fromfile(path / name, np.uint8)
    yield data
    with (path / name).open("r+b") as file:
        file.write(data.tobytes())
