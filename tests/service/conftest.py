"""Fixtures of the service tests: a directory, and a pipe for reports of processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Reports:
    """A pipe with one end for the children to send on, and one for the test to read."""

    out: Connection
    inbox: Connection

    def next(self) -> Any:
        assert self.inbox.poll(50), "nobody reported"
        return self.inbox.recv()

    def take(self, count: int) -> list[Any]:
        """Returns the next reports, sorted because processes report in any order."""
        return sorted(self.next() for _ in range(count))


@pytest.fixture
def reports() -> Iterator[Reports]:
    inbox, out = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with inbox, out:
        yield Reports(out, inbox)


@pytest.fixture
def scratch_dir(tmp_path: Path) -> Path:
    return tmp_path / "buffer"
