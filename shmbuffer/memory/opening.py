"""Opens a directory: removes, recovers or creates its buffer before this process joins."""

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
    """Raises UnsupportedPlatformError if the engine's locks may not work on this machine."""
    if os.name != "posix" or not os.path.exists("/proc/self/stat") or machine() == 0:
        raise UnsupportedPlatformError(
            "shmbuffer needs Linux with glibc on x86-64 or aarch64; on this machine its locks "
            "would not survive the death of their holder"
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
    """Takes a seat at the buffer of a directory; see `Engine.open`."""
    if settings is not None:
        to_record(settings, path)  # check them before a buffer is removed
    while True:
        try:
            return _open_once(path, settings, existing, role, timeout, temporary=temporary)
        except BufferUnlinkedError:
            continue  # removed before the lock was taken: try again


def _open_once(
    path: str | os.PathLike[str],
    settings: Settings | None,
    existing: Existing,
    role: Role,
    timeout: float,
    *,
    temporary: bool,
) -> tuple[Seat, RecoveryReport | None]:
    """Opens the directory once; raises BufferUnlinkedError if it is removed during the call."""
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
            # first, because no lock file must be created next to files of another program
            flags = control.superblock().flags
            if flags & Flag.SAVE and existing == "attach" and not creating:
                raise ReadOnlyError(
                    f"{files.path}: this is a save, which would be changed; attach() opens it for "
                    "reading, and attach(..., on_existing='recover') continues in it",
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
    """Recovers or removes an existing buffer; returns its control file, the report and the maps."""
    if control is None:
        return None, None, None
    found = Diagnosis.from_control(files, control)
    if found.superblock.state == BufferState.CLOSING:
        removal.finish(found, keep_lock=creating)  # completes the removal of a process that died
        return None, None, None
    if existing == "error":
        raise BufferExistsError(
            f"{files.path}: contains a buffer already; attach() to it, or continue with it "
            "(on_existing='recover' of a Coordinator, existsok=True of a storage), or let a "
            "Coordinator replace it (on_existing='overwrite')",
            path=str(files.path),
        )
    reason = found.reason_to_recover()
    if reason is None and existing in ("overwrite", "verify"):
        pids = found.registry.pids()
        raise BufferInUseError(
            f"{files.path}: living processes use this buffer (pids "
            f"{', '.join(map(str, pids))}); end them first",
            pids=pids,
        )
    if existing == "overwrite":
        removal.begin(found, keep_lock=True)
        return None, None, None
    if reason is None:
        return control, None, None
    is_clean = reason == NO_CLIENT_ALIVE and existing == "attach" and found.was_left_in_order()
    return control, *recover_directory(
        found, reason, verify=existing == "verify", left_in_order=is_clean
    )


def _create(files: Files, settings: Settings | None, *, temporary: bool) -> Control:
    """Creates the control file, and removes it again if that fails."""
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
