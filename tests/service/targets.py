"""Functions that the tests let a coordinator spawn. None of them imports torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from shmbuffer import BufferInUseError, Coordinator
from shmbuffer.memory import attaching
from shmbuffer.memory.engine import Engine
from tests.service import items


def say_what_you_got(scratch_dir: Path, index: int, out: Connection, word: str) -> None:
    out.send((scratch_dir, index, word, os.getpid()))


def stay(scratch_dir: Path, index: int, out: Connection) -> None:
    """Attaches, reports it, and waits; reports again when it is asked to end."""
    with Engine.open(scratch_dir, None, role=attaching.role_of_this_process):
        try:
            out.send(("attached", index, os.getpid()))
            while True:  # pause() would miss a signal that comes just before it
                time.sleep(0.01)
        finally:
            out.send(("unwound", index, os.getpid()))


def write(scratch_dir: Path, index: int, out: Connection) -> None:
    """Writes one item after the other, without end."""
    with Engine.open(scratch_dir, None, role=attaching.role_of_this_process) as engine:
        number = 0
        while True:
            items.write(engine, [number])
            if number == 0:
                out.send(("wrote", index, os.getpid()))
            number += 1
            time.sleep(0.001)


def raise_an_error(scratch_dir: Path, index: int) -> None:
    raise ValueError("bug in my environment")


def return_at_once(scratch_dir: Path, index: int) -> None:
    """Ends normally."""


def stay_away(scratch_dir: Path, index: int, out: Connection) -> None:
    """Reports, but never attaches."""
    out.send(index)
    while True:
        time.sleep(0.01)


def die(scratch_dir: Path, index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(scratch_dir: Path, index: int) -> None:
    raise SystemExit(7)


def claim_and_die(scratch_dir: Path, index: int) -> None:
    """Dies with an open claim."""
    engine = Engine.open(scratch_dir, None, role=attaching.role_of_this_process)
    items.write(engine, [1])
    assert engine.ring() is not None
    engine.ring().claims.claim(4, timeout=5.0)
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm(scratch_dir: Path, index: int, out: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out.send(("deaf", index, os.getpid()))
    while True:
        signal.pause()


def have_a_child(scratch_dir: Path, index: int, out: Connection) -> None:
    """Leaves a child that holds all descriptors of its parent."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], close_fds=False
    )
    out.send(("child", index, child.pid))
    while True:
        time.sleep(0.01)


class Straggler:
    """An object that Python collects while it shuts down."""

    def __del__(self) -> None:
        print("collected", file=sys.stderr, flush=True)


class Writer:
    """Leaves an object in each buffer that a process has, and an open file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, scratch_dir: Path, index: int) -> None:
        self.file = self.path.open("w")
        self.file.write("a row\n")
        ctypes.CDLL(None).printf(b"a line of C\n")
        print("a line of Python")


def end_late(scratch_dir: Path, index: int, out: Connection) -> None:
    """Registers two exit functions, one of which sends a signal; stays attached."""
    atexit.register(out.send, ("at the end", index, os.getpid()))
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    sys.modules[__name__].straggler = Straggler()  # type: ignore[attr-defined]
    engine = Engine.open(scratch_dir, None, role=attaching.role_of_this_process)
    print("one line,", end=" ")
    out.send(("attached", index, os.getpid()))
    while not engine.closed:
        time.sleep(0.01)


def sleep(scratch_dir: Path, index: int, out: Connection) -> None:
    """Never attaches."""
    out.send(("asleep", index, os.getpid()))
    while True:
        time.sleep(0.01)


def wait(scratch_dir: Path, index: int) -> None:
    while True:
        time.sleep(0.01)


def stay_attached(scratch_dir: Path, index: int) -> None:
    with Engine.open(scratch_dir, None, role=attaching.role_of_this_process):
        wait(scratch_dir, index)


class Late:
    """An argument whose unpickling waits until a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return _load_late, (self.path,)


def _load_late(path: Path) -> Late:
    path.with_suffix(".begun").write_text(str(os.getpid()))
    while not path.exists():
        time.sleep(0.01)
    return Late(path)


def leave_a_mark(scratch_dir: Path, index: int, late: Late) -> None:
    late.path.with_suffix(".ran").touch()


def fail_here_or_there(scratch_dir: Path, index: int, there: Path) -> None:
    if there.exists():
        raise KeyError("there")
    raise ValueError(f"in process {os.getpid()}")


def take_over(scratch_dir: Path, index: int, out: Connection) -> None:
    """Becomes the coordinator if there is none, and ends the others of this name; leaves a mark."""
    out.send(("waits", index, os.getpid()))
    coordinator = None
    while coordinator is None:
        time.sleep(0.01)
        with suppress(BufferInUseError):
            coordinator = Coordinator(scratch_dir, on_existing="recover")
    with coordinator:
        coordinator.spawn(take_over, 0, out)
        scratch_dir.with_suffix(".taken").touch()
