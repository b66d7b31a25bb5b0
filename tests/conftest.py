"""What every test is held to: no process and no open file of a buffer outlives it.

Free of torch and numpy, because the crash tests and the sanitizer run start without them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest

# Draws repeat from run to run, and no test asserts a longest time.
hypothesis.settings.register_profile("shmbuffer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("shmbuffer")

# Inherited by every program that a test starts, also by one whose parent has been killed since.
MARK = ("SHMBUFFER_TEST_SESSION", str(os.getpid()))
os.environ.update([MARK])

# These live as long as the interpreter that started them. What a forkserver forks does not.
HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")

# How long a process may take from its kill to its end; a test that cleans up waits for nothing.
PATIENCE_S = 5.0

_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the fixture below whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process running, or a file below `.shmbuffer` open.

    After a test that failed the processes are ended and nothing more is said: its frames are kept
    for the report, and they hold what they opened.
    """
    processes, files = _descendants(), _open_files()
    yield
    left = _killed_in_the_end(lambda: _descendants() - processes)
    if request.node.stash.get(_passed, False):
        assert not left, "these processes were left running, and have been killed now"
        leaked = _open_files() - files
        assert not leaked, "these files were left open"


@pytest.fixture(autouse=True, scope="module")
def _no_orphan_is_left_behind() -> Iterator[None]:
    """The same for processes whose parent died before them.

    Once a module, because it looks through all of /proc.
    """
    before = _marked()
    yield
    left = _killed_in_the_end(lambda: _marked() - before)
    assert not left, "these processes were left running by this module, and have been killed now"


def _killed_in_the_end(remaining: Callable[[], set[int]]) -> list[str]:
    """Wait until no process remains; kill and describe those that do not end by themselves."""
    deadline = time.monotonic() + PATIENCE_S
    while processes := remaining():
        if time.monotonic() > deadline:
            described = [f"{pid}: {_command_of(pid)}" for pid in processes]
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return described
        time.sleep(0.01)
    return []


def _descendants() -> set[int]:
    """Every running process below this one, without the helpers that multiprocessing keeps."""
    found: set[int] = set()
    ahead = [os.getpid()]
    while ahead:
        children = _children(ahead.pop())
        ahead += children
        found.update(pid for pid in children if _runs(pid) and not _is_helper(pid))
    return found


def _marked() -> set[int]:
    """Every running program with our mark in its environment, whoever its parent is now."""
    mark = "=".join(MARK).encode()
    return {
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if pid != os.getpid() and mark in _read(pid, "environ").split(b"\0") and not _is_helper(pid)
    }


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    return [
        int(child) for thread in threads for child in _read(pid, f"task/{thread}/children").split()
    ]


def _runs(pid: int) -> bool:
    """Whether the process is more than an exit status that nobody has read yet."""
    _, _, after_name = _read(pid, "stat").rpartition(b") ")
    return after_name[:1] not in (b"", b"Z", b"X")


def _is_helper(pid: int) -> bool:
    """What a forkserver forks has its command line too, but not our process as parent."""
    command = _read(pid, "cmdline")
    return any(helper in command for helper in HELPERS) and pid in _children(os.getpid())


def _command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    """A file below /proc; empty where the process is gone, or not ours to look at."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _open_files() -> Counter[str]:
    """The files of buffers that this process holds open, and how often."""
    files: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if "/.shmbuffer/" in target:
                files[target] += 1
    return files
