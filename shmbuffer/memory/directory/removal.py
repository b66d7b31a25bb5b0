"""Removes buffers and their directories.

    temporary directory     removed by its owner's exit, SIGTERM or SIGINT; else by the next start
    directory of the user   removed on request; only files that this package created, by list

The superblock gets the state CLOSING before the first file is removed. A process that finds this
state under init.lock completes the removal of a process that died. Processes that have the buffer
open keep their maps: reads continue, and writes raise BufferClosedError.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, BufferNotFoundError, BufferUnlinkedError
from shmbuffer.memory.directory import cleanup
from shmbuffer.memory.directory.diagnosis import Diagnosis
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.system.region import Directory

TIMEOUT_S = 10.0
PATIENCE_AT_THE_END_S = 0.5


def own(path: Path, uuid: bytes) -> cleanup.Ownership:
    """Makes this process remove the buffer with that uuid in ``path`` when it ends.

    The removal waits only briefly for init.lock, because the main thread that the signal
    interrupted may hold it. The next start removes what remains.
    """
    return cleanup.own(path, lambda: remove(path, uuid, timeout=PATIENCE_AT_THE_END_S))


def take_ownership(found: Diagnosis) -> bool:
    """Takes over a temporary directory whose owner is dead; under init.lock. False otherwise."""
    if not found.superblock.flags & Flag.TEMPORARY or not found.owner_is_dead():
        return False
    found.control.write(found.superblock.with_owner())
    return True


def remove(path: Path, uuid: bytes, *, timeout: float = TIMEOUT_S) -> bool:
    """Removes the buffer with that uuid, if it still exists; returns whether it was removed."""
    try:
        directory = Directory.open(path)
    except BufferNotFoundError:
        return False
    with directory:
        files = Files(directory)
        with suppress(BufferUnlinkedError), files.lock(timeout):
            if not files.has_control():
                return False
            found = Diagnosis.read(files)
            if found.superblock.uuid != uuid:
                return False  # another buffer has replaced it
            return begin(found)
        return False


def begin(found: Diagnosis, *, keep_lock: bool = False) -> bool:
    """Sets the state CLOSING, so that any process can complete the removal, and removes the files.

    The caller holds init.lock.
    """
    found.control.write(replace(found.superblock, state=BufferState.CLOSING))
    _core.reached("remove.closing")
    return finish(found, keep_lock=keep_lock)


def finish(found: Diagnosis, *, keep_lock: bool = False) -> bool:
    """Removes the files by list, after the superblock became CLOSING; under init.lock."""
    files, control = found.files, found.control
    control.runtime["state"] = BufferState.CLOSING
    _core.reached("remove.state")
    control.sync()  # otherwise a power cut could bring the buffer back without the removed files
    _core.reached("remove.synced")
    created = bool(found.superblock.flags & Flag.CREATED_DIRECTORY)
    files.directory.created |= created
    return files.remove(created_directory=created and not keep_lock, keep_lock=keep_lock)


def sweep(excluding: Path | None = None) -> list[Path]:
    """Removes and returns the temporary directories that killed owners of this user left."""

    def is_abandoned(path: Path) -> bool:
        if excluding is not None and excluding.exists() and path.samefile(excluding):
            return False
        return _is_abandoned(path)

    return cleanup.janitor(is_abandoned, _remove_abandoned)


def abandoned() -> list[Path]:
    """Returns the directories that `sweep` would remove now."""
    return [
        path for path in cleanup.left_behind() if not any(path.iterdir()) or _is_abandoned(path)
    ]


def _is_abandoned(path: Path) -> bool:
    with Directory.open(path) as directory:
        return _is_unneeded(Files(directory))


def _remove_abandoned(path: Path) -> bool:
    """Removes an abandoned directory, unless another process is opening it."""
    with Directory.open(path) as directory:
        files = Files(directory)
        try:
            with files.lock(0.0, creating=True):
                # Check again, because another process may have attached before the lock was taken.
                if not _is_unneeded(files):
                    return False
                if files.has_control():
                    return begin(Diagnosis.read(files))
                return files.remove(created_directory=True)
        except AttachTimeout:
            return False  # another process is opening it


def _is_unneeded(files: Files) -> bool:
    """True if there is no buffer, or it is abandoned."""
    return not files.has_control() or Diagnosis.read(files).is_abandoned()
