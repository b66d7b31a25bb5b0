"""Programs in processes of their own, which report in lines, and children that are forked."""

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
    """The environment of a child: it imports the package and the tests from this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


class Program(subprocess.Popen[str]):
    """A running process; it is killed at the end of the block if it still runs.

    Args:
        command: the program and its arguments.
        stdin: `subprocess.PIPE` for a program that `tell` sends lines to.
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
        """The next line of its output; fails with what it said on stderr if there is none."""
        assert self.stdout is not None
        line = self.stdout.readline()
        if not line:
            assert self.stderr is not None
            raise AssertionError(f"the program ended: {self.stderr.read()}")
        return line.rstrip("\n")

    def json(self) -> Any:
        """The next line of its output, as JSON."""
        return json.loads(self.line())

    def tell(self, line: str = "") -> None:
        """Sends a line to Python source that waits in `input()`."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Waits for its end: exit status, negative for a signal, the rest of stdout, stderr."""
        out, err = self.communicate()
        return self.returncode, out, err

    def kill(self) -> None:
        """Ends it with SIGKILL. What it said last is not read: a child may hold the pipe open."""
        super().kill()
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in filter(None, (self.stdin, self.stdout, self.stderr)):
            with contextlib.suppress(BrokenPipeError):  # it ended before it read all lines
                pipe.close()


def run(*argv: object, **extra: str) -> tuple[int, str, str]:
    """Runs the command line to its end."""
    with Program(sys.executable, "-m", "shmbuffer", *map(str, argv), **extra) as program:
        return program.end()


def in_fork(work: Callable[[], object]) -> int:
    """Run a function in a forked child and return its exit status: 0, or 1 if it raised."""
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
    """Runs it in a forked child that has a file system of its own there; skips where none may be.

    Args:
        path: a directory.
        options: of the tmpfs, as mount takes them.
        run: fails by what it raises.
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
    """Give up root; in a forked child."""
    codecs.lookup("ascii")  # a module that this user may not be allowed to import
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
