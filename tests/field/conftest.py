"""A small buffer in a directory, on which known failures of other projects are tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer.memory import Engine, Ring, Settings
from tests.kit.rings import ring_of
from tests.memory.rows import CAPACITY, schema, write

SETTINGS = Settings(capacity=CAPACITY, alpha=1.0)


@pytest.fixture
def path(fast_path: Path) -> Path:
    return fast_path / "buffer"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    """Makes a buffer of eight slots with the items 0 to 7."""
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(CAPACITY))
        yield engine


@pytest.fixture
def ring(engine: Engine) -> Ring:
    return ring_of(engine)
