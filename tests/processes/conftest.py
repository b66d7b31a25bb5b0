from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer.memory import Engine, Settings
from tests.memory.rows import schema, write


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    """A buffer of eight slots with the items 0 to 7."""
    with Engine.open(fast_path / "buffer", Settings(capacity=8, alpha=1.0)) as engine:
        write(engine.define(schema()), range(8))
        yield engine
