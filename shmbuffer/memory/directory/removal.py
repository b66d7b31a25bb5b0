"""Removes buffers and their directories.

    temporary directory      removed when its owner exits or gets SIGTERM or SIGINT; if the owner is
                             killed, the next process of this user that starts removes it
    the user's directory     removed on request; only the files that this package created

The superblock gets the state CLOSING before the first file is removed. If the process dies, the
next process that takes init.lock completes the removal. Processes that have the buffer open keep
their maps: reads continue, and writes raise BufferClosedError.
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
"""Seconds that `remove` waits for init.lock."""

_EXIT_TIMEOUT_S = 0.5
"""Seconds that an exiting process waits for init.lock."""


def own(path: Path, uuid: bytes) -> cleanup.Ownership:
    """Makes this process remove the buffer with this uuid in the directory ``path`` when it exits.

    The removal waits only briefly for init.lock, because the main thread may hold the lock when a
    signal interrupts it. If the wait times out, the next process that starts removes the directory.
    """
    return cleanup.own(path, lambda: remove(path, uuid, timeout=_EXIT_TIMEOUT_S))


def take_ownership(found: Diagnosis) -> bool:
    """Makes this process the owner of a temporary directory whose owner is dead.

    The caller holds init.lock. Returns False if the directory is not temporary, or its owner may be
    alive.
    """
    if not found.superblock.flags & Flag.TEMPORARY or not found.owner_is_dead():
        return False
    found.control.write(found.superblock.with_owner())
    return True


def remove(path: Path, uuid: bytes, *, timeout: float = TIMEOUT_S) -> bool:
    """Removes the buffer with this uuid, and returns True if it existed."""
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
                return False  # another buffer has replaced this one
            return begin(found)
        return False


def begin(found: Diagnosis, *, keep_lock: bool = False) -> bool:
    """Sets the state CLOSING, then removes the files. Returns True if the buffer existed.

    The caller holds init.lock. If it dies, the state lets any other process complete the removal.
    """
    found.control.write(replace(found.superblock, state=BufferState.CLOSING))
    _core.reached("remove.closing")
    return finish(found, keep_lock=keep_lock)


def finish(found: Diagnosis, *, keep_lock: bool = False) -> bool:
    """Removes the files of a buffer whose superblock is CLOSING; the caller holds init.lock."""
    files, control = found.files, found.control
    control.runtime["state"] = BufferState.CLOSING
    _core.reached("remove.state")
    control.sync()  # otherwise a power cut could bring the buffer back without the removed files
    _core.reached("remove.synced")
    created = bool(found.superblock.flags & Flag.CREATED_DIRECTORY)
    files.directory.created |= created
    return files.remove(created_directory=created and not keep_lock, keep_lock=keep_lock)


def sweep(excluding: Path | None = None) -> list[Path]:
    """Removes the temporary directories of this user's killed processes, and returns their paths.

    The directory ``excluding`` is kept.
    """

    def is_abandoned(path: Path) -> bool:
        if excluding is not None and excluding.exists() and path.samefile(excluding):
            return False
        return _is_abandoned(path)

    return cleanup.janitor(is_abandoned, _remove_abandoned)


def abandoned() -> list[Path]:
    """Returns the paths of the directories that `sweep` would remove now."""
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
            return False  # another process is opening the directory


def _is_unneeded(files: Files) -> bool:
    """True if the directory contains no buffer, or an abandoned buffer."""
    return not files.has_control() or Diagnosis.read(files).is_abandoned()
