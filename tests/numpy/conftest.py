"""Fixtures of the array tests: a directory, and both kinds of clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import shmbuffer
import shmbuffer.numpy
from shmbuffer import Coordinator


class Directory:
    """A buffer directory, and its clients, which are closed when the test ends."""

    def __init__(self, path: Path, held: ExitStack) -> None:
        self.path = path
        self._held = held

    def create(self, **options: Any) -> Coordinator:
        given = {"capacity": 64, **options}
        return self._held.enter_context(Coordinator(self.path, **given))

    def arrays(self, **options: Any) -> shmbuffer.numpy.ReplayBuffer:
        return self._held.enter_context(shmbuffer.numpy.attach(self.path, **options))

    def tensors(self, **options: Any) -> Any:
        buffer = shmbuffer.attach(self.path, **options)
        self._held.callback(buffer.close)
        return buffer

    @property
    def schema(self) -> bytes:
        return (self.path / ".shmbuffer" / "schema.json").read_bytes()


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def directory(tmp_path: Path, held: ExitStack) -> Directory:
    return Directory(tmp_path / "buffer", held)


@pytest.fixture
def other(tmp_path: Path, held: ExitStack) -> Directory:
    return Directory(tmp_path / "other", held)
