"""The kernel's own state shows whether it delays a writer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmbuffer.memory.system import writeback


@contextmanager
def a_child_that_reads_a_pipe(*, thread: bool = False) -> Iterator[int]:
    """Runs a child that reads a pipe, in a second thread if ``thread``.

    Yields its pid once it sleeps.
    """
    asleep, told = os.pipe()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        if thread:
            threading.Thread(target=os.read, args=(asleep, 1), daemon=True).start()
        os.write(tell, b"!")
        if thread:
            signal.pause()
        os.read(asleep, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in (asleep, told, ready, tell):
            os.close(fd)


def asleep_in(pid: int, name: str) -> str:
    """Waits until a process sleeps in a kernel function whose name contains ``name``.

    Returns the full name.
    """
    while not (found := [one for one in writeback.sleeps_in(pid) if name in one]):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "S" and not writeback.sleeps_in(pid):
            pytest.skip("this kernel does not say where a thread sleeps")
        time.sleep(0.001)
    return found[0]


@pytest.mark.parametrize("thread", [False, True])
def test_the_kernel_says_where_a_thread_sleeps(
    thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_child_that_reads_a_pipe(thread=thread) as child:
        name = asleep_in(child, "pipe_read")
        monkeypatch.setattr(writeback, "THROTTLE", name[:-1])
        assert writeback.throttled([child]) == [child]
        monkeypatch.setattr(writeback, "THROTTLE", f"{name}_elsewhere")
        assert writeback.throttled([child]) == []


def test_a_process_that_is_gone_sleeps_nowhere() -> None:
    with a_child_that_reads_a_pipe() as child:
        pass
    assert writeback.sleeps_in(child) == set()
    assert writeback.throttled([child]) == []


def test_waits_for_disks_are_counted_where_the_kernel_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "PRESSURE", tmp_path / "io")
    assert writeback.disk_wait_us() is None
    (tmp_path / "io").write_text(
        "some avg10=7.76 avg60=2.82 avg300=1.01 total=6855401\n"
        "full avg10=0.47 avg60=0.22 avg300=0.31 total=4292781\n"
    )
    assert writeback.disk_wait_us() == 6855401


def test_the_limit_of_dirty_pages_is_that_of_the_machine() -> None:
    dirty, limit = writeback.dirty_bytes()
    assert dirty >= 0
    assert limit > 2**20
