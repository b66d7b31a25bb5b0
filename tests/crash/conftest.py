from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer.memory import Engine
from tests.crash.harness import schema, settings


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory if there is one, because these tests create hundreds of buffers."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="shmbuffer-crash-", dir=base))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["rows", "records"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kinds of items."""
    return str(request.param)


@pytest.fixture
def survivor(tmp_path: Path, kind: str) -> Iterator[Engine]:
    """A living client of a buffer with a schema, in ``tmp_path / "buffer"``."""
    with Engine.open(tmp_path / "buffer", settings(kind)) as engine:
        engine.define(schema(kind))
        yield engine
