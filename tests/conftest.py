"""What every test is held to: nothing that it starts, opens, maps, locks or makes outlives it.

Free of torch and numpy, because the crash tests and the sanitizer run start without them.
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

# Draws repeat from run to run, and no test asserts a longest time.
hypothesis.settings.register_profile("shmbuffer", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.register_profile(
    "shmbuffer --full", hypothesis.settings.get_profile("shmbuffer"), max_examples=400
)

# Inherited by every program that a test starts, also by one whose parent has been killed since.
MARK = ("SHMBUFFER_TEST_SESSION", str(os.getpid()))
os.environ.update([MARK])

# So is the folder of its sitecustomize.py; last, because a run for coverage has one of its own.
STARTUP = str(Path(__file__).parent / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))

# These live as long as the interpreter that started them. What a forkserver forks does not.
HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")

# How long a process may take from its kill to its end; a test that cleans up waits for nothing.
PATIENCE_S = 30.0

# A shell ignores Ctrl-C for what it starts in the background, and so would every program of ours.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_passed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The default run takes a sample of each product; see tests/selection.py."""
    parser.addoption(
        "--full",
        action="store_true",
        help="all cases of the tests that are marked 'product', and the tests marked 'full'",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: each takes what its profile says of itself."""
    hypothesis.settings.load_profile("shmbuffer" + " --full" * config.getoption("full"))


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``--dist loadgroup``: the groups of tests/groups.py."""
    from tests.groups import GroupScheduling

    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are collected: there is next to none."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before -k and -m, which do not change the sample
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what the run is for, and begin with what takes longest."""
    if not config.getoption("full"):
        left_out = _left_out(items) - _named(config, items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What only `--full` runs."""
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
    """What the command line names by its whole id, and what has to catch a seeded bug."""
    caught_by = {test for mutant in mutants() for test in mutant.caught_by}
    named = [argument for argument in config.args if "::" in argument]
    return {
        item
        for item in items
        if item.nodeid in caught_by
        or any(item.nodeid.endswith(it) or it.endswith(item.nodeid) for it in named)
    }


def pytest_collection_finish() -> None:
    """Keep what is there now out of every later search for garbage.

    A session has a million objects in its modules and its tests, and a search that goes through
    them takes longer than most tests, which ask for one as soon as they leave a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    # To loggers that keep what they hear to themselves pytest listens one by one, six times a test.
    # Most are torch's, which says little.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the fixture below whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files get a directory that no other process of the machine writes to."""
    tmp_path_factory.getbasetemp()  # pytest's own stay where they are
    path = Path(tempfile.mkdtemp(prefix="shmbuffer-tests-"))
    path.chmod(0o755)  # some tests become another user
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", str(path))
        yield
    # Behind multiprocessing, which removes its own directory in it at exit, with priority -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, args=[path], exitpriority=-200)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether there is time for all of a test that draws some of its cases by itself."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory where there is one: syncs cost nothing there."""
    base = holdings.IN_MEMORY if os.access(holdings.IN_MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix=f"shmbuffer-test-{os.getpid()}-", dir=base))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory on a disk, where there is one: those of pytest may be in memory."""
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
    """Fail a test that leaves a process running, or anything of `holdings`.

    After a test that failed the processes are ended and nothing more is said: its frames are kept
    for the report, and they hold what they opened.
    """
    processes, before = _descendants(), holdings.held()
    yield
    left = _killed_in_the_end(lambda: _descendants() - processes)
    if request.node.stash.get(_passed, False):
        assert not left, "these processes were left running, and have been killed now"
        request.node.funcargs.clear()  # pytest keeps what fixtures gave until after their end
        assert not holdings.gained(before), "this was not given back"


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind_for_long(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for processes whose parent died before them, and for maps.

    Once a module, because it looks through all of /proc, and collects garbage.
    """
    before, mapped, failed = _marked(), holdings.mapped(), request.session.testsfailed
    yield
    left = _killed_in_the_end(lambda: _marked() - before)
    assert not left, "these processes were left running by this module, and have been killed now"
    if request.session.testsfailed == failed:
        assert not holdings.gained(mapped, holdings.mapped), "this module left these maps"


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
    """Every running program with our mark in its environment, under any parent."""
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
