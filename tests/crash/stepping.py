"""Runs a victim through a deed one instruction at a time and keeps every state of shared memory.

The states come from the processor and do not depend on the crash points. They contain everything
that a kill at any instruction can leave behind. Each state is put back and repaired. The mutex is
put back as the kernel hands it on: a word that names a dead thread gets OWNER_DIED (futex(2),
robust futexes).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.format import layout
from tests.crash.harness import fork

TRACE_ME, SINGLE_STEP = 0, 9
OWNER_DIED, WAITERS, THREAD = 0x40000000, 0x80000000, 0x3FFFFFFF
AFTERWARDS = 400
"""Number of instructions that are followed after the mutex was released for the last time."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def trace(request: int, pid: int = 0) -> None:
    if _libc.ptrace(request, pid, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "ptrace")


@dataclass
class Walk:
    """The states of one victim.

    Attributes:
        states: the bytes of each file, after each change.
        instructions: number of instructions of the victim.
    """

    states: list[dict[Path, bytes]]
    instructions: int


def walk(path: Path, deed: Callable[[Engine], None], releases: int) -> Walk:
    """Follows a victim from the time when it holds the mutex to its ``releases``-th release."""

    def works() -> None:
        engine = Engine.open(path, None)
        _stop_at("mutex.locked")
        deed(engine)

    return _walk(path, works, releases)


def walk_of_a_mender(path: Path) -> Walk:
    """Follows a process that takes the mutex of a dead one, from its first read of the remains."""

    def joins() -> None:
        _stop_at("repair.waiters")
        Engine.open(path, None)

    return _walk(path, joins, 1)


def _stop_at(point: str) -> None:
    trace(TRACE_ME)
    _core.arm(point, "stop")


def _walk(path: Path, body: Callable[[], None], releases: int) -> Walk:

    pid = fork(body)
    try:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status), f"the victim ended with {status}"
        return _followed(path, pid, releases)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _followed(path: Path, pid: int, releases: int) -> Walk:
    files = {file: np.memmap(file, np.uint8, "r") for file in _files(path)}
    word = files[path / layout.CONTROL][layout.RUNTIME_OFFSET :][:4].view("<u4")
    seen = {file: view.tobytes() for file, view in files.items()}
    held, left, steps, states = True, AFTERWARDS, 0, [dict(seen)]
    while left:
        trace(SINGLE_STEP, pid)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status), f"the victim ended with {status}"
        steps += 1
        changed = [file for file, view in files.items() if view.tobytes() != seen[file]]
        if changed:
            seen |= {file: files[file].tobytes() for file in changed}
            states.append(_as_after_the_death(dict(seen), path, pid))
        holds = int(word[0]) & THREAD == pid
        releases -= held and not holds
        held = holds
        left -= releases <= 0
    states[0] = _as_after_the_death(states[0], path, pid)
    return Walk(states, steps)


def _as_after_the_death(state: dict[Path, bytes], path: Path, pid: int) -> dict[Path, bytes]:
    control = bytearray(state[path / layout.CONTROL])
    at = slice(layout.RUNTIME_OFFSET, layout.RUNTIME_OFFSET + 4)
    word = int.from_bytes(control[at], "little")
    if word & THREAD == pid:
        control[at] = (word & WAITERS | OWNER_DIED).to_bytes(4, "little")
    return state | {path / layout.CONTROL: bytes(control)}


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def put_back(state: dict[Path, bytes]) -> None:
    """Writes the bytes of a state to the files."""
    for file, content in state.items():
        with open(file, "r+b") as target:
            target.write(content)
