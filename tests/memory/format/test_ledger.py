"""The ledger file, which is made with the slots."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import CorruptBufferError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format import layout, ledger
from tests.memory.rows import schema, write


@pytest.fixture
def path(fast_path: Path) -> Path:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8)) as engine:
        write(engine.define(schema(8)), range(5))
    return path


def test_it_is_a_page_of_zeros_as_long_as_nobody_was_given_anything(path: Path) -> None:
    assert (path / layout.LEDGER).read_bytes() == bytes(layout.PAGE)
    assert _core.parts(8)["bytes"] > layout.PAGE


def test_a_directory_without_its_ledger_is_refused(path: Path) -> None:
    (path / layout.LEDGER).unlink()
    with pytest.raises(CorruptBufferError, match=r"ledger: is missing; restore it from a copy"):
        Engine.open(path, None)
    assert not (path / layout.LEDGER).exists()


@pytest.mark.parametrize("nbytes", [0, 100, 4095])
def test_one_that_is_too_short_is_refused(path: Path, nbytes: int) -> None:
    with open(path / layout.LEDGER, "r+b") as file:
        file.truncate(nbytes)
    with pytest.raises(
        CorruptBufferError, match=rf"ledger: the file has {nbytes} bytes instead of at least 4096"
    ):
        Engine.open(path, None)


def test_one_that_is_shorter_than_it_says_is_refused(path: Path) -> None:
    with open(path / layout.LEDGER, "r+b") as file:
        file.seek(2056)
        file.write((8192).to_bytes(8, "little"))
    with pytest.raises(
        CorruptBufferError, match=r"ledger: the file has 4096 bytes instead of at least 8192"
    ):
        Engine.open(path, None)


def test_leases_are_read_while_another_process_takes_and_ends_them() -> None:
    parts = _core.parts(64)
    content = mmap.mmap(-1, parts["consumers"] + parts["each"])
    np.frombuffer(content, ledger.HEAD, 1)["bytes"][0] = len(content)
    ids = np.frombuffer(content, ledger.LEASE, ledger.LEASES, parts["consumers"])["id"]
    pid = os.fork()
    if not pid:
        while True:
            ids[:] = 1
            ids[:] = 0
    try:
        for _ in range(5000):
            assert len(ledger.open_leases(content, 0, 64)) <= ledger.LEASES
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
