"""Resources that outlive a test are found, and others are not."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import holdings


@contextmanager
def gains(expected: str, look: Callable[[], Counter[str]] = holdings.held) -> Iterator[None]:
    """Checks that the block leaves a resource with that name."""
    before = look()
    yield
    gained = holdings.gained(before, look)
    assert [one for one in gained if expected in one], gained


def test_an_open_file_is_found(tmp_path: Path) -> None:
    with gains("open: pipe:"):
        reading, writing = os.pipe()
        os.close(writing)
    os.close(reading)
    with (tmp_path / "file").open("w"), gains(f"open: {tmp_path}/file"):
        again = os.open(tmp_path / "file", os.O_RDONLY)
    os.close(again)


def test_a_map_of_a_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with gains(f"mapped: {path}", holdings.mapped), path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with gains(f"mapped: {path}", holdings.mapped), path.open("r+b") as file:
        again = mmap.mmap(file.fileno(), 8192)
    mapped.close()
    again.close()


def test_both_ways_to_look_at_maps_see_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "removed"
    with path.open("w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    path.unlink()
    asked = holdings._shared_maps()
    assert os.fsencode(f"{path} (deleted)") in asked
    monkeypatch.setattr(holdings, "_PROCMAP_QUERY", 0)  # an older kernel does not know the query
    assert sorted(holdings._shared_maps()) == sorted(asked)
    mapped.close()


def test_a_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "PATIENCE_S", 0.01)
    end = threading.Event()
    with gains("thread: sleeper"):
        thread = threading.Thread(target=end.wait, name="sleeper")
        thread.start()
    end.set()
    thread.join()


def test_a_pool_that_is_garbage_is_no_gain() -> None:
    before = holdings.held()
    pool = ThreadPoolExecutor(2)
    pool.submit(int).result()
    del pool
    assert not holdings.gained(before)


def test_a_lock_is_found(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, gains("locked: FLOCK"):
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_locked_file_is_told_from_one_that_is_open(tmp_path: Path) -> None:
    with (tmp_path / "mine").open("w") as mine, (tmp_path / "free").open("w"):
        fcntl.lockf(mine, fcntl.LOCK_EX)
        assert [target for target, _ in holdings.locked_files()] == [str(tmp_path / "mine")]


def test_a_temporary_file_is_found() -> None:
    with gains("temporary files: forgotten-"):
        path = tempfile.mkdtemp(prefix="forgotten-")
    os.rmdir(path)


@pytest.mark.skipif(not os.access(holdings.IN_MEMORY, os.W_OK), reason="no file system in memory")
def test_a_file_in_memory_with_our_pid_in_its_name_is_found() -> None:
    with gains(f"{holdings.IN_MEMORY}: forgotten-{os.getpid()}"):
        path = Path(holdings.IN_MEMORY, f"forgotten-{os.getpid()}")
        path.touch()
    path.unlink()


def test_garbage_is_no_gain(tmp_path: Path) -> None:
    """An unreachable cycle keeps a file open until it is collected."""

    class Ring:
        me: Ring
        file: mmap.mmap

    before = holdings.mapped()
    gc.disable()
    ring = Ring()
    ring.me = ring
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4096)
        ring.file = mmap.mmap(file.fileno(), 4096)
    del ring
    assert holdings.mapped() - before
    gc.enable()
    assert not holdings.gained(before, holdings.mapped)
