"""Attaching to a directory by its path, or copying it if this process can only read there."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Literal, get_args

from shmbuffer.errors import AttachTimeout, BufferNotFoundError, EmptyBufferError
from shmbuffer.memory.directory.anonymous import Anonymous
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.neighbours import did_you_mean
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.opening import require_platform
from shmbuffer.memory.system.path_checks import explained
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import hearing
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.copied_buffer import copy_buffer, repair_copy

Role = Literal["client", "collector", "learner", "coordinator"]

role_of_this_process: Role = "client"
"""The default role of this process; "collector" if a coordinator spawned it."""

LOOK_S = 0.01
"""The interval at which a waiting ``attach`` looks for the buffer."""

SAY_S = 2.0
"""After so long a wait, ``attach`` logs where it looks."""

log = logging.getLogger("shmbuffer.service")


def attached(path: Path, timeout: float, role: Role | None, requested: Prefault) -> Engine:
    """A handle on the buffer of a directory, which need not exist yet, or AttachTimeout."""
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"timeout is a number of seconds, not {timeout!r}")
    role = role or role_of_this_process
    if role not in get_args(Role):
        raise ValueError(f"role is one of {', '.join(get_args(Role))}, not {role!r}")
    began_s, said = time.monotonic(), False
    deadline_s = began_s + timeout
    while (engine := _opened(path, role, deadline_s, requested)) is None:
        if (now_s := time.monotonic()) >= deadline_s:
            raise _nothing_there(path, timeout)
        if not said and now_s - began_s >= SAY_S:
            said = True
            log.warning(
                "%s: attach() has waited %g s for a buffer, and goes on for up to %g s; the path "
                "%s%s",
                *(path.absolute(), SAY_S, timeout - SAY_S, _state(path), _hint(path)),
            )
        time.sleep(LOOK_S)
    return engine


def copied(path: Path) -> tuple[Engine, int]:
    """A handle on a private copy, in memory, of a buffer that this process can only read.

    No other process sees the handle. Its ``report`` says which items of the copy were dropped.

    Returns:
        The handle, and how many elements were overwritten while they were copied.

    Raises:
        EmptyBufferError: nothing has been written yet.
        BufferInUseError, SpaceError: see `copy_buffer`.
    """
    require_platform()
    with Directory.open(path, reading=True) as directory:
        files = Files(directory)
        copy = copy_buffer(files)
        if copy.mapped is None:
            raise EmptyBufferError(f"{path}: nothing has been written yet, so there is no item")
        report = repair_copy(copy, copy.mapped)
        ground = Anonymous.around(files.dictionary())
    engine = Engine(Seat(ground, copy.found.control, layout.Role.CLIENT, copy.mapped))
    engine.report = report
    return engine, copy.changed


def _opened(path: Path, role: Role, deadline_s: float, prefault: Prefault) -> Engine | None:
    """Returns a handle, or None if there is no buffer now."""
    with explained(path):
        if not (path / layout.CONTROL).exists():
            return None
    remaining_s = max(0.0, deadline_s - time.monotonic())
    try:
        with hearing(prefault.on_progress):
            return Engine.open(path, None, role=role, timeout=remaining_s, prefault=prefault)
    except BufferNotFoundError:
        return None  # removed since; the next one may come


def _nothing_there(path: Path, timeout: float) -> AttachTimeout:
    return AttachTimeout(
        f"{path}: waited {timeout:g} s for a buffer, and it still {_state(path)}; start a "
        f"coordinator for it (shmbuffer serve {path} --capacity N), or check the path"
        f"{_hint(path)}",
        path=path,
        timeout_s=timeout,
        pids=[],
    )


def _state(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    return "holds no buffer" if path.is_dir() else "is no directory"


def _hint(path: Path) -> str:
    question = did_you_mean(path)
    return f"; {question}" if question else ""
