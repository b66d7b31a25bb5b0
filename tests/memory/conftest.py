"""Fixtures that run one suite on buffers in anonymous memory and in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer.memory import Engine, Ring
from tests.kit.rings import ring_of
from tests.memory.rows import Maker


@pytest.fixture(params=["anonymous", "files"])
def make(request: pytest.FixtureRequest, fast_path: Path) -> Iterator[Maker]:
    maker = Maker(request.param, fast_path, [])
    yield maker
    for engine in maker.made:
        engine.close()


@pytest.fixture
def make_files(fast_path: Path) -> Iterator[Maker]:
    """Makes buffers in files only, for tests of file names."""
    maker = Maker("files", fast_path, [])
    yield maker
    for engine in maker.made:
        engine.close()


@pytest.fixture
def path(fast_path: Path) -> Path:
    """Returns a path for a new buffer."""
    return fast_path / "buffer"


@pytest.fixture
def engine(make: Maker) -> Engine:
    """Makes an empty prioritized buffer of 8 slots."""
    return make(alpha=0.5, eps=0.0)


@pytest.fixture
def ring(engine: Engine) -> Ring:
    return ring_of(engine)
