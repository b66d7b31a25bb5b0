"""What these tests may leave behind: Ray's idle workers, and nodes that were started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import holdings
from tests.conftest import _descendants, _killed_in_the_end, _passed, _read


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere, but for what belongs to the cluster, which ends with its module."""
    processes, files = _descendants(), holdings.open_files_of_buffers()
    yield
    left = _killed_in_the_end(
        lambda: {pid for pid in _descendants() - processes if not is_of_the_cluster(pid)}
    )
    if request.node.stash.get(_passed, False):
        assert not left, "these processes were left running, and have been killed now"
        request.node.funcargs.clear()  # pytest keeps what fixtures gave until after their end
        leaked = holdings.gained(files, holdings.open_files_of_buffers)
        assert not leaked, "these files were left open"


def is_of_the_cluster(pid: int) -> bool:
    """A worker that Ray keeps idle for the next actor, or what a node consists of."""
    command = _read(pid, "cmdline")
    return command.startswith((b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnv")) or any(
        name in command
        for name in (b"/default_worker.py", b"/raylet/raylet", b"/agent.py", b"/main.py")
    )
