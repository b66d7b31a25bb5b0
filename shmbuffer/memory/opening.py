"""What happens to a directory before this process joins: cleared, recovered or created."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Literal

from shmbuffer.errors import (
    BufferExistsError,
    BufferInUseError,
    BufferNotFoundError,
    ShmBufferError,
)
from shmbuffer.memory import removal
from shmbuffer.memory.control import Control
from shmbuffer.memory.files import Files
from shmbuffer.memory.layout import BufferState, Flag
from shmbuffer.memory.recovery import RecoveryReport, reason_to_recover, recover_directory
from shmbuffer.memory.registry import Registry
from shmbuffer.memory.settings import Settings

Existing = Literal["attach", "error", "recover", "verify", "overwrite", "adopt"]


def clear_the_way(files: Files, existing: Existing, *, creating: bool) -> RecoveryReport | None:
    """What has to happen to a buffer that is there before anybody joins; under init.lock."""
    if files.has_control() and files.open_control().superblock().state == BufferState.CLOSING:
        removal.finish(files, keep_lock=creating)  # for somebody who died in it
    if not files.has_control():
        return None
    if existing == "error":
        raise BufferExistsError(
            f"{files.path}: there is a buffer already; attach() to it, or go on with it "
            "(on_existing='recover' of a Coordinator, existsok=True of a storage), or have a "
            "Coordinator replace it (on_existing='overwrite')",
            path=str(files.path),
        )
    control = files.open_control()
    registry = Registry(control, files.directory)
    reason = reason_to_recover(files, control, registry)
    if reason is None and existing in ("overwrite", "verify"):
        pids = registry.pids()
        raise BufferInUseError(
            f"{files.path}: living processes use this buffer (pids "
            f"{', '.join(map(str, pids))}); end them first",
            pids=pids,
        )
    if existing == "overwrite":
        control.write(replace(control.superblock(), state=BufferState.CLOSING))
        removal.finish(files, keep_lock=True)
        return None
    if reason is None:
        return None
    return recover_directory(files, control, reason, verify=existing == "verify")


def create_or_open(files: Files, settings: Settings | None, *, temporary: bool) -> Control:
    """The control file that is there, or a new one; under init.lock."""
    if files.has_control():
        return files.open_control()
    if settings is None:
        raise BufferNotFoundError(
            f"{files.path}: the buffer was removed while this process was attaching",
            path=str(files.path),
        )
    flags = settings.flags
    if temporary or files.directory.created:
        flags |= Flag.CREATED_DIRECTORY
    if temporary:
        flags |= Flag.TEMPORARY
    try:
        return files.create_control(asdict(settings), flags)
    except BaseException:
        with suppress(ShmBufferError, OSError):
            files.remove(created_directory=files.directory.created)
        raise
