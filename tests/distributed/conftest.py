"""Allows these tests to leave Ray's idle workers and restarted nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import holdings
from tests.conftest import _descendants, _killed_in_the_end, _passed, _read


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Applies the usual check, except to the cluster, which ends with its module."""
    processes, files = _descendants(), holdings.open_files_of_buffers()
    yield
    left = _killed_in_the_end(
        lambda: {pid for pid in _descendants() - processes if not is_of_the_cluster(pid)}
    )
    if request.node.stash.get(_passed, False):
        assert not left, "these processes were left running, and have been killed now"
        request.node.funcargs.clear()  # pytest keeps the values of fixtures until after they end
        leaked = holdings.gained(files, holdings.open_files_of_buffers)
        assert not leaked, "these files were left open"


def is_of_the_cluster(pid: int) -> bool:
    """True for an idle Ray worker and for the processes of a node."""
    command = _read(pid, "cmdline")
    return command.startswith((b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnv")) or any(
        name in command
        for name in (b"/default_worker.py", b"/raylet/raylet", b"/agent.py", b"/main.py")
    )
