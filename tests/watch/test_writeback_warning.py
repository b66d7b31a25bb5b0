"""The coordinator of a buffer on a slow disk warns once and adds up the delays."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from shmbuffer import Coordinator
from shmbuffer.memory.system import writeback
from shmbuffer.service import supervisor
from shmbuffer.service.supervisor import SCAN_S
from shmbuffer.watch import writeback_warning
from shmbuffer.watch.writeback_warning import MIN_THROTTLED, WritebackWarning
from tests.kit.rings import engine_of


@pytest.fixture
def waited_us(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Sets the kernel's next answers about waits for disks; the last answer is repeated."""
    said: list[int | None] = [0]
    monkeypatch.setattr(
        writeback, "disk_wait_us", lambda: said.pop(0) if len(said) > 1 else said[0]
    )
    return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(writeback_warning.time, "monotonic", lambda: now[0])
    return now


def looked(it: WritebackWarning, clock: list[float], times: int) -> None:
    for _ in range(times):
        clock[0] += SCAN_S
        it.check([7, 8])


def test_a_writer_that_is_held_back_again_and_again_is_worth_a_warning(
    waited_us: list[int | None],
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writeback, "throttled", lambda pids: [pid for pid in pids if pid == 8])
    monkeypatch.setattr(writeback, "dirty_bytes", lambda: (3 * 2**30, 4 * 2**30))
    waited_us[:] = [None]
    it = WritebackWarning(Path("run/replay"))
    looked(it, clock, MIN_THROTTLED - 1)
    assert caplog.messages == []
    looked(it, clock, 5)
    assert caplog.messages == [
        "run/replay: the kernel throttles writers because the disk cannot keep up (pid 8 in 3 of "
        "the last 3 checks; 3.0 GiB (3221225472 bytes) are waiting to be written on this machine, "
        "the limit is 4.0 GiB (4294967296 bytes)). Put the buffer in memory (/dev/shm), or raise "
        "vm.dirty_bytes; see docs/memory.md"
    ]
    assert it.seconds == SCAN_S * (MIN_THROTTLED + 4)
    clock[0] += writeback_warning.WARN_EVERY_S
    looked(it, clock, 1)
    assert len(caplog.messages) == 2


def test_where_nobody_waits_for_a_disk_nobody_is_looked_at(
    waited_us: list[int | None], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(writeback, "throttled", lambda pids: asked.append(pids) or [])
    waited_us[:] = [0, 9_999, 9_999 + 10_000]
    it = WritebackWarning(Path("run/replay"))
    looked(it, clock, 1)
    assert asked == []
    looked(it, clock, 1)
    assert asked == [[7, 8]]
    looked(it, clock, 1)
    assert asked == [[7, 8]]
    assert it.seconds == 0.0


def test_a_wait_now_and_then_is_not_worth_a_warning(
    waited_us: list[int | None],
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = iter(range(1000))
    monkeypatch.setattr(writeback, "throttled", lambda pids: [7] if next(turns) % 10 == 0 else [])
    waited_us[:] = [None]
    looked(WritebackWarning(Path("run/replay")), clock, 100)
    assert caplog.messages == []


def test_a_coordinator_looks_after_a_buffer_on_a_disk(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch_dir = on_disk / "buffer"
    monkeypatch.setattr(supervisor, "SCAN_S", 0.01)
    monkeypatch.setattr(writeback, "disk_wait_us", lambda: None)
    monkeypatch.setattr(writeback, "throttled", list)
    caplog.set_level(logging.WARNING, "shmbuffer.service")
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        assert engine_of(coordinator).on_disk
        while not caplog.messages:
            time.sleep(0.001)
        assert coordinator.stats()["held_back_s"] > 0
    assert caplog.messages[0].startswith(f"{scratch_dir}: the kernel throttles writers")


def test_a_buffer_in_memory_has_no_disk_that_could_be_behind(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Coordinator(fast_path / "buffer", capacity=8) as coordinator:
        if engine_of(coordinator).on_disk:
            pytest.skip("there is no file system in memory")
        assert coordinator._supervisor._writeback is None
        assert coordinator.stats()["held_back_s"] == 0.0
