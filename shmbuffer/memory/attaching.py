"""Attaches to the buffer in a directory, or opens a save or a private copy of a buffer."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from shmbuffer.errors import (
    AttachTimeout,
    BufferNotFoundError,
    EmptyBufferError,
    ReadOnlyError,
    SchemaMismatchError,
    ShmBufferError,
    UnsafeFilesystemError,
    UnsafePathError,
)
from shmbuffer.memory.directory.anonymous import Anonymous
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.neighbours import (
    did_you_mean,
    directory_of,
    is_buffer,
    require_no_export,
)
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.opening import require_platform
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import report_to
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.copied_buffer import copy_buffer, repair_copy

Role = Literal["client", "collector", "learner", "coordinator"]

OnExisting = Literal["attach", "recover"]
"""How a save is opened: only for reading, or by turning it into a live buffer."""

role_of_this_process: Role = "client"
"""The default role of new clients. It is "collector" in a process that a coordinator spawned."""

POLL_S = 0.01
"""Seconds between the checks of a waiting ``attach`` whether the buffer exists."""

LOG_AFTER_S = 2.0
"""Seconds after which a waiting ``attach`` logs a warning with the path."""

log = logging.getLogger("shmbuffer.service")


def attach_engine(
    path: Path,
    timeout: float,
    role: Role | None,
    requested: Prefault,
    on_existing: OnExisting = "attach",
) -> Engine:
    """Attaches to the buffer in a directory, and waits if the buffer does not exist yet.

    Args:
        path: The directory of the buffer, or of a save.
        timeout: Maximum number of seconds to wait.
        role: Role of the client, or None for the default of this process.
        requested: The prefault settings of the handle.
        on_existing: How a save is opened.

    Raises:
        AttachTimeout: There is still no buffer after ``timeout`` seconds.
        ValueError: An argument is invalid.
    """
    if on_existing not in get_args(OnExisting):
        raise ValueError(
            f"on_existing must be one of {', '.join(get_args(OnExisting))}, but is {on_existing!r}"
        )
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"timeout must be a number of seconds of at least 0, but is {timeout!r}")
    role = role or role_of_this_process
    if role not in get_args(Role):
        raise ValueError(f"role must be one of {', '.join(get_args(Role))}, but is {role!r}")
    began_s, is_logged = time.monotonic(), False
    deadline_s = began_s + timeout
    while (engine := _open_if_present(path, role, deadline_s, requested, on_existing)) is None:
        if (now_s := time.monotonic()) >= deadline_s:
            raise _timeout(path, timeout)
        if not is_logged and now_s - began_s >= LOG_AFTER_S:
            is_logged = True
            log.warning(
                "%s: attach() has waited %g s for a buffer, and will wait up to %g s more; the "
                "path %s%s",
                *(path.absolute(), LOG_AFTER_S, timeout - LOG_AFTER_S, _state(path), _hint(path)),
            )
        time.sleep(POLL_S)
    return engine


def open_save(path: Path, *, verify: bool) -> Engine:
    """Opens a save for reading.

    Changes of priorities and consumers stay in this process. No lock is taken, and other processes
    do not see the handle. Every write raises ReadOnlyError.

    Args:
        path: The directory of the save.
        verify: Whether every item is compared with its checksum. The ``report`` of the handle
            contains the number of items that were dropped.
    """
    with Directory.open(path, reading=True, allow_unsafe_fs=True) as directory:
        return _open_private(Files(directory, private=True), verify=verify)[0]


def open_copy(path: Path) -> tuple[Engine, int]:
    """Opens a private copy, in memory, of a buffer that this process can only read.

    Other processes do not see the handle. Its ``report`` contains the number of items that were
    dropped.

    Returns:
        The handle, and the number of elements that were overwritten during the copy.

    Raises:
        EmptyBufferError: Nothing has been written yet.
        BufferInUseError, SpaceError: See `copy_buffer`.
    """
    with Directory.open(path, reading=True) as directory:
        return _open_private(Files(directory), verify=True)


def _open_private(files: Files, *, verify: bool) -> tuple[Engine, int]:
    """Opens a private copy of a buffer or save.

    Returns:
        The handle, and the number of elements that were overwritten during the copy.
    """
    require_platform()
    copy = copy_buffer(files)
    if copy.mapped is None:
        raise EmptyBufferError(
            f"{files.path}: the buffer has no items, because nothing has been written yet; write"
            " items first"
        )
    report = repair_copy(copy, copy.mapped, verify=verify)
    backing = Anonymous.wrap(files.dictionary(), str(files.path))
    engine = Engine(Seat(backing, copy.found.control, layout.Role.CLIENT, copy.mapped))
    engine.report = report
    return engine, copy.changed


def _open_if_present(
    path: Path, role: Role, deadline_s: float, prefault: Prefault, on_existing: OnExisting
) -> Engine | None:
    """Opens the buffer or save in a directory. Returns None if there is none at this time."""
    path = directory_of(path)
    if not is_buffer(path):
        require_no_export(path)
        return None
    remaining_s = max(0.0, deadline_s - time.monotonic())
    try:
        with report_to(prefault.on_progress):
            return Engine.open(
                *(path, None),
                existing=on_existing,
                role=role,
                timeout=remaining_s,
                prefault=prefault,
            )
    except (ReadOnlyError, UnsafeFilesystemError, UnsafePathError):
        if on_existing != "attach" or not _is_readable_save(path):
            raise
        return _with_leaves(open_save(path, verify=False))
    except BufferNotFoundError:
        return None  # the buffer was removed in the meantime; another one may be created


def _is_readable_save(path: Path) -> bool:
    """True if a directory is a save of any user that this process can read."""
    with suppress(ShmBufferError, OSError):
        return is_save(path)
    return False


def _with_leaves(engine: Engine) -> Engine:
    """Returns the handle of a save unless its items are Python objects, which have no leaves.

    Raises:
        SchemaMismatchError: The items are Python objects. The handle is closed.
    """
    ring = engine.ring()
    if ring is not None and ring.schema.structure.get("kind") == layout.OBJECTS:
        engine.close()
        require_no_export(Path(engine.where))
        raise SchemaMismatchError(
            f"{engine.where}: the save contains Python objects, which processes cannot share; "
            "load the save with loads() into a storage of the same class"
        )
    return engine


def _timeout(path: Path, timeout: float) -> AttachTimeout:
    """Returns the error for a path at which no buffer was created within ``timeout`` seconds."""
    return AttachTimeout(
        f"{path}: waited {timeout:g} s for a buffer, but the path still {_state(path)}; start a "
        f"coordinator for it (shmbuffer serve {path} --capacity N), or check the path"
        f"{_hint(path)}",
        path=path,
        timeout_s=timeout,
        pids=[],
    )


def _state(path: Path) -> str:
    """Returns a predicate about a path without a buffer, such as "does not exist"."""
    if not path.exists():
        return "does not exist"
    return "contains no buffer" if path.is_dir() else "is not a directory"


def _hint(path: Path) -> str:
    """Returns a clause that suggests a similar existing path, or "" if there is none."""
    question = did_you_mean(path)
    return f"; {question}" if question else ""
