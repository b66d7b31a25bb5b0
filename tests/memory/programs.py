"""Programs and children that a test starts, talks to by pipe, and ends before it ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, users or namespaces")


@contextmanager
def program(
    source: str, *arguments: object, before: tuple[str, ...] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run Python source with pipes on all three streams; it is killed at the end, if it still runs.

    Args:
        source: the program.
        arguments: its `sys.argv[1:]`.
        before: what the command line begins with, such as `unshare`.
        environment: more environment variables.
    """
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [*before, sys.executable, "-c", dedent(source), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints; its error output, if it ends instead."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line.strip()


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """Send a line to a program that waits in `input()`."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a program: status, negative for a signal, and what it still said."""
    output, errors = process.communicate()
    return process.returncode, output, errors


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
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
