"""Writing, drawing and weighing make no system call that could fail.

The process under test may not open, map, size, sync or stat any file; see quiet.py. It may check
once a second whether the control file exists. Only a negative answer counts.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferUnlinkedError
from shmbuffer.memory import Engine, Ring
from tests.crash.harness import (
    ended,
    fork,
    read_all,
    require_usable,
    sample,
    schema,
    settings,
    write,
)
from tests.faults.quiet import be_quiet, machine_is_known

pytestmark = pytest.mark.skipif(
    not machine_is_known(), reason="the numbers of its system calls are not in quiet.py"
)


_kept: list[Ring] = []


def ring_of(path: Path, kind: str) -> Ring:
    return Engine.open(path, settings(kind)).define(schema(kind))


def quietly(path: Path, kind: str, work: Callable[[Ring], object]) -> int:
    """Returns the exit status of a process that works on a ring without system calls."""

    def body() -> None:
        ring = ring_of(path, kind)
        _kept.append(ring)  # otherwise the ring would close its files
        fill(ring)
        sample(ring, 512)
        be_quiet(folder_of(ring))
        work(ring)

    return ended(fork(body))


def folder_of(ring: Ring) -> int:
    directory = ring.seat.backing.directory
    assert directory is not None
    return directory.file.fd


def fill(ring: Ring) -> None:
    for first in range(0, 12, 3):
        write(ring, range(first, first + 3))


def everything(ring: Ring) -> None:
    for round_ in range(50):
        require_usable(ring, 20 + round_)
        write(ring, range(100, 104))
        read_all(ring)
        ring.update(np.arange(8), np.linspace(0.5, 4.0, 8))
        ring.tree.set_alpha(0.5 + round_ / 100)
    ring.empty()
    fill(ring)
    sample(ring, 2000)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("kind", ["rows", "records", "short records"])
def test_the_hot_calls_need_no_file_and_no_descriptor(tmp_path: Path, kind: str) -> None:
    assert quietly(tmp_path / "buffer", kind, everything) == 0
    with Engine.open(tmp_path / "buffer", None) as engine:
        assert engine.ring() is not None
        found = sorted(read_all(engine.ring()).values())
        assert found
        # A short byte ring does not have space for all records.
        assert found == list(range(12))[-len(found) :]


@pytest.mark.parametrize(
    "call",
    [
        lambda _: os.stat("/"),
        lambda _: os.fstat(0),
        lambda _: os.dup(0),
        lambda ring: ring_of(Path("/"), "rows"),
    ],
)
def test_a_process_that_asks_for_a_file_is_killed(
    tmp_path: Path, call: Callable[[Ring], object]
) -> None:
    assert quietly(tmp_path / "buffer", "rows", call) == -signal.SIGSYS


def test_a_removed_directory_is_noticed_with_no_other_call(tmp_path: Path) -> None:
    def body() -> None:
        ring = ring_of(tmp_path / "buffer", "rows")
        fill(ring)
        shutil.rmtree(tmp_path / "buffer")
        be_quiet(folder_of(ring))
        try:
            while True:
                sample(ring, 4)
        except BufferUnlinkedError:
            os._exit(42)

    assert ended(fork(body)) == 42
