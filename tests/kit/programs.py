"""Programs in processes of their own that report in lines, and forked children."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, users or namespaces")


def environment(**extra: str) -> dict[str, str]:
    """Returns the environment of a child, which imports the package and tests of this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


class Program(subprocess.Popen[str]):
    """A running process, which is killed at the end of the block if it is still running.

    Args:
        command: the program and its arguments.
        stdin: `subprocess.PIPE` for a program to which `tell` sends lines.
        extra: more environment variables.
    """

    def __init__(self, *command: str, stdin: int = subprocess.DEVNULL, **extra: str) -> None:
        super().__init__(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**extra),
        )

    @classmethod
    def python(cls, source: str, *argv: object, before: tuple[str, ...] = (), **extra: str) -> Self:
        """Runs Python source; the command line begins with ``before``, such as `unshare`."""
        command = (*before, sys.executable, "-c", dedent(source), *map(str, argv))
        return cls(*command, stdin=subprocess.PIPE, **extra)

    @classmethod
    def shmbuffer(cls, *argv: object) -> Self:
        """Runs the command line."""
        return cls(sys.executable, "-m", "shmbuffer", *map(str, argv))

    def line(self) -> str:
        """Returns the next line of its output; fails with its stderr if there is none."""
        assert self.stdout is not None
        line = self.stdout.readline()
        if not line:
            assert self.stderr is not None
            raise AssertionError(f"the program ended: {self.stderr.read()}")
        return line.rstrip("\n")

    def json(self) -> Any:
        """Returns the next line of its output, parsed as JSON."""
        return json.loads(self.line())

    def tell(self, line: str = "") -> None:
        """Sends a line to Python source that waits in `input()`."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Waits for its end; returns the exit status (negative for a signal), stdout and stderr."""
        out, err = self.communicate()
        return self.returncode, out, err

    def kill(self) -> None:
        """Kills the process.

        Its last output is not read, because a child may hold the pipe open.
        """
        super().kill()
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in filter(None, (self.stdin, self.stdout, self.stderr)):
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read all lines
                pipe.close()


def run(*argv: object, **extra: str) -> tuple[int, str, str]:
    """Runs the command line to its end."""
    with Program(sys.executable, "-m", "shmbuffer", *map(str, argv), **extra) as program:
        return program.end()


def in_fork(work: Callable[[], object]) -> int:
    """Runs a function in a forked child and returns its exit status: 0, or 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_tmpfs(path: Path, options: bytes, run: Callable[[], object]) -> None:
    """Runs a function in a forked child with a tmpfs on ``path``; skips if mounts are not allowed.

    Args:
        path: a directory.
        options: mount options of the tmpfs.
        run: the function, which fails if it raises.
    """

    def mount_and_run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS
            os._exit(77)
        libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
        if libc.mount(b"none", bytes(path), b"tmpfs", 0, options):
            os._exit(77)
        run()

    code = in_fork(mount_and_run)
    if code == 77:
        pytest.skip("no mounts in a namespace of one's own")
    assert code == 0, "the child failed; its traceback is above"


def as_nobody() -> None:
    """Gives up root in a forked child."""
    codecs.lookup("ascii")  # this user may not be allowed to import the module
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
