"""A detached terminal: tmux on its own socket, with two panes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.programs import environment

_BETWEEN = "8<---- between two panes ---->8"
_GRACE_S = 20.0


def is_installed() -> bool:
    return shutil.which("tmux") is not None


class Terminal:
    """Runs two programs, one above the other, and ends both with the block.

    Args:
        upper: shell command of the upper pane.
        lower: shell command of the lower pane.
        width: width in columns.
        heights: number of lines of each pane.
        folder: working directory of both programs.
    """

    def __init__(
        self,
        upper: str,
        lower: str,
        *,
        width: int,
        heights: tuple[int, int],
        folder: Path,
    ) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="shmbuffer-tmux-"))
        # Neither the user's configuration nor a surrounding tmux server is used.
        inherited = {name: value for name, value in environment().items() if name != "TMUX"}
        self._environment = {
            **inherited,
            "TMUX_TMPDIR": str(self._sockets),
            "LC_ALL": "C.UTF-8",
        }
        size = ("-x", str(width), "-y", str(sum(heights) + 1))
        where = ("-c", str(folder))
        first = ("new-session", "-d", *size, *where, _staying(upper))
        second = ("split-window", "-v", "-l", str(heights[1]), *where, _staying(lower))
        try:
            self._tmux("-f", "/dev/null", *first, ";", *second)
        except BaseException:
            self._end()
            raise

    def captured(self) -> tuple[str, str]:
        """Returns the whole output of the upper pane, and the current content of the lower pane.

        Colours are included as escape sequences.
        """
        capture = ("capture-pane", "-p", "-e", "-t")
        first, second = (*capture, "0.0", "-S", "-"), (*capture, "0.1")
        said = self._tmux(*first, ";", "display-message", "-p", _BETWEEN, ";", *second)
        upper, _, lower = said.partition(f"{_BETWEEN}\n")
        return upper, lower

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Ends the programs first, because they have children of their own to end."""
        try:
            pids = [int(pid) for pid in self._tmux("list-panes", "-F", "#{pane_pid}").split()]
        except subprocess.CalledProcessError:  # no server is running
            pids = []
        for pid in pids:
            for child in _children(pid):
                os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while any(map(_children, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if pids:
            self._tmux("kill-server")
        shutil.rmtree(self._sockets)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", "recording", *words],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout


def _staying(command: str) -> str:
    """Wraps a command in a shell that stays after its end, so that its last lines stay visible."""
    return f"{command}; exec sleep infinity"


def _children(pid: int) -> list[int]:
    """Returns the processes that the shell of a pane has started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in found]
