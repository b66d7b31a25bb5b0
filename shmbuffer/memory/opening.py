"""Opens the buffer in a directory: removes, recovers or creates it, and then joins it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferExistsError,
    BufferInUseError,
    BufferNotFoundError,
    BufferUnlinkedError,
    ReadOnlyError,
    ShmBufferError,
    UnsupportedPlatformError,
)
from shmbuffer.memory.directory import removal
from shmbuffer.memory.directory.diagnosis import NO_CLIENT_ALIVE, Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState, Flag, Role
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.recorded import to_record
from shmbuffer.memory.mapped.settings import Settings
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.recovery import recover_directory
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport

Existing = Literal["attach", "error", "recover", "verify", "overwrite", "adopt"]


def require_platform(machine: Callable[[], int] = lambda: layout.ARCHITECTURE) -> None:
    """Raises UnsupportedPlatformError unless locks are known to work on this machine.

    Args:
        machine: Function that returns the number of the processor architecture, 0 if it is not
            supported. Tests replace it.
    """
    if os.name != "posix" or not os.path.exists("/proc/self/stat") or machine() == 0:
        raise UnsupportedPlatformError(
            "shmbuffer needs Linux with glibc on x86-64 or aarch64; on this machine, its locks "
            "may not be released when the process that holds them dies"
        )


def open_seat(
    path: str | os.PathLike[str],
    settings: Settings | None,
    existing: Existing,
    role: Role,
    *,
    timeout: float,
    temporary: bool,
) -> tuple[Seat, RecoveryReport | None]:
    """Opens a directory and registers this process as a client (`Engine.open`).

    Returns:
        The seat of the new handle, and the report of the recovery if there was one.
    """
    if settings is not None:
        to_record(settings, path)  # raises an error for invalid settings before a buffer is removed
    while True:
        try:
            return _open_once(path, settings, existing, role, timeout, temporary=temporary)
        except BufferUnlinkedError:
            continue  # the buffer was removed before the lock was taken


def _open_once(
    path: str | os.PathLike[str],
    settings: Settings | None,
    existing: Existing,
    role: Role,
    timeout: float,
    *,
    temporary: bool,
) -> tuple[Seat, RecoveryReport | None]:
    """Tries once to open a directory, with the arguments and result of `open_seat`.

    Raises:
        BufferUnlinkedError: Another process has removed the buffer during the call.
    """
    creating = settings is not None
    files = Files(Directory.open(path, create=creating))
    try:
        if not creating:
            files.require_control(
                "check the path, or create one with Coordinator or "
                "LazyMemmapStorage(scratch_dir=..., shared_init=True)"
            )
        control = files.control_if_there()
        if control is not None:
            # The superblock is read before the lock is taken, because no lock file must be created
            # in a directory of another program.
            flags = control.superblock().flags
            if flags & Flag.SAVE and existing == "attach" and not creating:
                raise ReadOnlyError(
                    f"{files.path}: this directory is a save, which this call would change; use"
                    " attach() to open the save for reading, or attach(..., on_existing='recover')"
                    " to turn it into a live buffer",
                    path=str(files.path),
                )
        with files.lock(timeout, creating=creating):
            _core.reached("open.locked")
            control = files.control_if_there(control)
            control, report, mapped = _recover_or_remove(
                files, control, existing, creating=creating
            )
            if control is None:
                control = _create(files, settings, temporary=temporary)
            return Seat(files, control, role, mapped), report
    except BaseException:
        files.close()
        raise


def _recover_or_remove(
    files: Files, control: Control | None, existing: Existing, *, creating: bool
) -> tuple[Control | None, RecoveryReport | None, Mapped | None]:
    """Recovers or removes an existing buffer, as ``existing`` requires. The lock must be held.

    Returns:
        The control file, the report of the recovery and the mapped files. All are None if there is
        no buffer or it was removed. The report and the maps are None without a recovery.
    """
    if control is None:
        return None, None, None
    found = Diagnosis.from_control(files, control)
    if found.superblock.state == BufferState.CLOSING:
        # A process has died while it removed this buffer.
        removal.finish(found, keep_lock=creating)
        return None, None, None
    if existing == "error":
        raise BufferExistsError(
            f"{files.path}: this directory already contains a buffer; use attach(), continue with"
            " the buffer (on_existing='recover' for a Coordinator, existsok=True for a storage), or"
            " replace it (on_existing='overwrite' for a Coordinator)",
            path=str(files.path),
        )
    reason = found.reason_to_recover()
    if reason is None and existing in ("overwrite", "verify"):
        pids = found.registry.pids()
        raise BufferInUseError(
            f"{files.path}: living processes use this buffer (pids "
            f"{', '.join(map(str, pids))}); end these processes first",
            pids=pids,
        )
    if existing == "overwrite":
        removal.begin(found, keep_lock=True)
        return None, None, None
    if reason is None:
        return control, None, None
    is_clean = reason == NO_CLIENT_ALIVE and existing == "attach" and found.was_closed_cleanly()
    return control, *recover_directory(
        found, reason, verify=existing == "verify", left_in_order=is_clean
    )


def _create(files: Files, settings: Settings | None, *, temporary: bool) -> Control:
    """Creates the control file of a new buffer. If an error is raised, the files are removed."""
    if settings is None:
        raise BufferNotFoundError(
            f"{files.path}: the buffer was removed while this process was attaching; create it"
            " again",
            path=str(files.path),
        )
    flags = settings.flags
    if temporary or files.directory.created:
        flags |= Flag.CREATED_DIRECTORY
    if temporary:
        flags |= Flag.TEMPORARY
    try:
        return files.create_control(to_record(settings, files.path), flags)
    except BaseException:
        with suppress(ShmBufferError, OSError):
            files.remove(created_directory=files.directory.created)
        raise
