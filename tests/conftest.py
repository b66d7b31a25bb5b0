"""Rules for every test: whatever it starts, opens, maps, locks or creates must end with it.

This module imports neither torch nor numpy, because the crash tests and the sanitizer run start
without them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import holdings
from tests.mutants.mutant import mutants
from tests.selection import sample

# Draws are the same in each run, and hypothesis enforces no deadline.
hypothesis.settings.register_profile("shmbuffer", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.register_profile(
    "shmbuffer --full", hypothesis.settings.get_profile("shmbuffer"), max_examples=400
)

# Inherited by every program that a test starts, even if its parent has been killed since.
MARK = ("SHMBUFFER_TEST_SESSION", str(os.getpid()))
os.environ.update([MARK])

# The folder of sitecustomize.py is inherited, too. It comes last, because coverage has its own.
STARTUP = str(Path(__file__).parent / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))

# Helpers that live as long as the interpreter that started them, unlike forks of a forkserver.
HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")

# Longest time from a kill to the end of a process; a test that cleans up does not wait.
PATIENCE_S = 30.0

# A shell makes background programs ignore Ctrl-C, and our programs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_passed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--full``. The default run takes a sample of each product; see tests/selection.py."""
    parser.addoption(
        "--full",
        action="store_true",
        help="all cases of the tests that are marked 'product', and the tests marked 'full'",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets the hypothesis profile before tests are imported, because tests read it on import."""
    hypothesis.settings.load_profile("shmbuffer" + " --full" * config.getoption("full"))


@pytest.hookimpl(optionalhook=True)  # this hook exists only with pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Returns the scheduler for the groups of tests/groups.py with ``--dist loadgroup``."""
    from tests.groups import GroupScheduling

    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_sessionstart() -> None:
    """Disables garbage collection while tests are collected, as there is hardly any garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # runs before -k and -m, which do not change the sample
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests of this run, and sorts the longest ones first."""
    if not config.getoption("full"):
        left_out = _left_out(items) - _named(config, items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that only `--full` runs."""
    left_out = {item for item in items if item.get_closest_marker("full")}
    products: dict[tuple[str, tuple[str, ...], int | None], dict[str, pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("product")
        if marker and hasattr(item, "callspec") and item not in left_out:
            test = item.nodeid.partition("[")[0]
            few = marker.kwargs.get("few")
            products.setdefault((test, marker.args, few), {})[item.nodeid] = item
    for (_, together, few), cases in products.items():
        values = {name: item.callspec.params for name, item in cases.items()}  # type: ignore[attr-defined]
        taken = sample(values, together, few)
        left_out |= {item for name, item in cases.items() if name not in taken}
    return left_out


def _named(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that the command line names by their id, or that catch a seeded bug."""
    caught_by = {test for mutant in mutants() for test in mutant.caught_by}
    named = [argument for argument in config.args if "::" in argument]
    return {
        item
        for item in items
        if item.nodeid in caught_by
        or any(item.nodeid.endswith(it) or it.endswith(item.nodeid) for it in named)
    }


def pytest_collection_finish() -> None:
    """Excludes all existing objects from later garbage collections.

    The modules and tests of a session have a million objects. A collection that searches them takes
    longer than most tests, which need one whenever they leave a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    # pytest attaches handlers one by one, six times for each test, to loggers that do not
    # propagate. Most of these are torch's, which log little.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports to the fixture below whether the test itself has passed."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts temporary files into a directory to which no other process of the machine writes."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary files stay where they are
    path = Path(tempfile.mkdtemp(prefix="shmbuffer-tests-"))
    path.chmod(0o755)  # some tests switch to another user
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", str(path))
        yield
    # Runs after multiprocessing has removed its own directory in it, which has priority -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, args=[path], exitpriority=-200)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """True if a test that draws some of its cases itself has time for all of them."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Makes a directory in memory if possible, because syncs cost nothing there."""
    base = holdings.IN_MEMORY if os.access(holdings.IN_MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix=f"shmbuffer-test-{os.getpid()}-", dir=base))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """Makes a directory on a disk if possible, because pytest's directories may be in memory."""
    from shmbuffer.memory.system.region import Directory

    path = Path(tempfile.mkdtemp(prefix=f"shmbuffer-test-{os.getpid()}-"))
    with Directory.open(path) as directory:
        in_memory = directory.in_memory
    if in_memory:
        path.rmdir()
        pytest.skip("temporary files are in memory: let TMPDIR name a folder on a disk")
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a running process, or anything in `holdings`.

    After a failed test the processes are ended without a further error, because the report keeps
    the frames of the test, which hold its open objects.
    """
    processes, before = _descendants(), holdings.held()
    yield
    left = _killed_in_the_end(lambda: _descendants() - processes)
    if request.node.stash.get(_passed, False):
        assert not left, "these processes were left running, and have been killed now"
        request.node.funcargs.clear()  # pytest keeps the values of fixtures until after they end
        assert not holdings.gained(before), "this was not given back"


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind_for_long(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a module that leaves orphaned processes or memory maps.

    The check runs once for each module, because it searches all of /proc and collects garbage.
    """
    before, mapped, failed = _marked(), holdings.mapped(), request.session.testsfailed
    yield
    left = _killed_in_the_end(lambda: _marked() - before)
    assert not left, "these processes were left running by this module, and have been killed now"
    if request.session.testsfailed == failed:
        assert not holdings.gained(mapped, holdings.mapped), "this module left these maps"


def _killed_in_the_end(remaining: Callable[[], set[int]]) -> list[str]:
    """Waits until no process remains; kills and describes those that do not end by themselves."""
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
    """Returns every running descendant of this process, without multiprocessing's helpers."""
    found: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as after most tests
        return found
    ahead = [os.getpid()]
    while ahead:
        children = _children(ahead.pop())
        ahead += children
        found.update(pid for pid in children if _runs(pid) and not _is_helper(pid))
    return found


def _marked() -> set[int]:
    """Returns every running program with our mark in its environment, under any parent."""
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
    """True if the process is running, and is not a zombie."""
    _, _, after_name = _read(pid, "stat").rpartition(b") ")
    return after_name[:1] not in (b"", b"Z", b"X")


def _is_helper(pid: int) -> bool:
    """True for a helper itself; its forks have the same command line but another parent."""
    command = _read(pid, "cmdline")
    return any(helper in command for helper in HELPERS) and pid in _children(os.getpid())


def _command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    """Reads a file below /proc; returns b"" if the process is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
