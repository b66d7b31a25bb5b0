"""How much of a file is in memory according to the kernel, in total or by windows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmbuffer.memory.system import residency as module
from shmbuffer.memory.system.residency import Residency, residency, resident_bytes

SMALL, LARGE = 2**20, 2**27


@pytest.fixture(autouse=True)
def _the_kernel_tells(tmp_path: Path) -> None:
    with open(tmp_path / "probe", "w+b") as file:
        if residency(file.fileno(), 0) is None:
            pytest.skip("the kernel has no cachestat(2), which came with Linux 6.5")


def test_a_write_is_in_memory_and_not_yet_on_the_disk(on_disk: Path) -> None:
    with open(on_disk / "file", "w+b") as file:
        file.write(bytes(SMALL // 2))
        file.truncate(SMALL)
        file.flush()
        assert residency(file.fileno(), SMALL) == Residency(SMALL // 2, SMALL // 2)
        os.fsync(file.fileno())
        assert residency(file.fileno(), SMALL) == Residency(SMALL // 2, 0)


def test_of_a_large_file_it_is_an_estimate(fast_path: Path) -> None:
    with open(fast_path / "file", "w+b") as file:
        file.truncate(LARGE)
        found = residency(file.fileno(), LARGE)
        assert found is not None
        assert found.cached == 0
        file.write(bytes(LARGE // 4))
        file.flush()
        found = residency(file.fileno(), LARGE)
        assert found is not None
        assert LARGE * 0.2 < found.cached < LARGE * 0.3


def test_without_an_answer_of_the_kernel_nothing_is_reported(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHESTAT", 10**6)
    with open(fast_path / "file", "w+b") as file:
        assert residency(file.fileno(), 4096) is None


def test_a_process_says_what_it_has_mapped() -> None:
    found = resident_bytes(os.getpid())
    assert found is not None
    assert found > 2**20
    assert resident_bytes(2**22 + 1) is None
