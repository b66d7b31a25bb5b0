"""torchrl in the benchmarks: every operation that they compare runs, on few items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.library import (
    AFTER_WRITE,
    COMPRESSED,
    ELSEWHERE,
    GIVEN_ZSTD,
    IN_FILES,
    IN_MEMORY,
    IN_PLACE,
    INDEX,
    LAZY_STACK,
    LOADS,
    NESTED,
    PADDED,
    QUIET,
    TENSORDICT,
    Operation,
)
from tests.compat import family  # noqa: F401  # skips where torchrl is not installed

from benchmarks.peers.torchrl import TorchRL  # isort: skip

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def peer() -> Iterator[TorchRL]:
    made = TorchRL()
    yield made
    made.close()


def took(peer: TorchRL, operation: Operation) -> list[float]:
    assert peer.prepare(operation, 1e-4)
    return peer.round(operation, 2)


@pytest.mark.parametrize("prioritized", [False, True])
def test_its_calls_are_timed(peer: TorchRL, tmp_path: Path, prioritized: bool) -> None:
    assert peer.open(str(tmp_path), "S", 300, prioritized)
    operations = [Operation("add"), Operation("extend", 32), Operation("sample", 256)]
    operations += [Operation("mixed", 256, form) for form in (IN_MEMORY, IN_FILES)]
    operations += [Operation("windows", 8, form) for form in (QUIET, AFTER_WRITE)]
    if prioritized:
        operations += [
            Operation("update", 256, INDEX),
            Operation("cycle", 256, INDEX),
            Operation("cycle", 256, TENSORDICT),
            Operation("attach", 1, LOADS),
            Operation("save", 1, IN_PLACE),
            Operation("save", 1, ELSEWHERE),
        ]
    for operation in operations:
        assert min(took(peer, operation)) > 0
    assert not peer.prepare(Operation("sample", 256, "arrays"), 1e-4)


def test_others_write_meanwhile(peer: TorchRL, tmp_path: Path) -> None:
    peer.open(str(tmp_path), "S", 300, True)
    assert peer.share(1, 32) == 1
    found = peer.contend(1, 32, 0.05)
    assert all(found[name] > 0 for name in ("items", "cycles", "p99"))


@pytest.mark.parametrize("storage", [COMPRESSED, GIVEN_ZSTD, LAZY_STACK])
def test_items_of_any_size_are_timed(peer: TorchRL, tmp_path: Path, storage: str) -> None:
    sequences = storage == LAZY_STACK
    peer.open(str(tmp_path), "sequences" if sequences else "frames", 16, False, storage)
    for form in (TENSORDICT, PADDED, NESTED) if sequences else (TENSORDICT,):
        assert min(took(peer, Operation("sample", 4, form))) > 0
    assert min(took(peer, Operation("extend", 4))) > 0
    if not sequences:
        assert peer.shrinks() > 1
