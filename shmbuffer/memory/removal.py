"""Removing a buffer: who owns a directory, and how its files go.

    temporary directory     removed by its owner's exit, SIGTERM or SIGINT; else by the next start
    directory of the user   removed when he says so; only what we made, by list

The superblock says CLOSING before the first file goes. Whoever finds it so under init.lock finishes
what a remover began and did not live to end. Processes that have the buffer open keep their maps:
reads go on, writes raise BufferClosedError.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import BufferNotFoundError
from shmbuffer.memory import cleanup, identity
from shmbuffer.memory.control import Control, Superblock
from shmbuffer.memory.files import Files
from shmbuffer.memory.identity import Identity
from shmbuffer.memory.layout import BufferState, Flag
from shmbuffer.memory.recovery import reason_to_recover
from shmbuffer.memory.region import Directory
from shmbuffer.memory.registry import Registry

TIMEOUT_S = 10.0


def own(path: Path, uuid: bytes) -> cleanup.Ownership:
    """Makes this process remove the buffer of that uuid in ``path`` at its end."""
    return cleanup.own(path, lambda: remove(path, uuid))


def take_ownership(control: Control) -> bool:
    """Takes over a temporary directory whose owner is dead; under init.lock.

    Returns:
        False if it is not temporary, or its owner lives.
    """
    superblock = control.superblock()
    if not superblock.flags & Flag.TEMPORARY or not owner_is_dead(superblock):
        return False
    me = identity.current()
    control.write(
        replace(
            superblock,
            owner_pid=me.pid,
            owner_start_time=me.start_time,
            owner_pid_namespace=me.pid_namespace,
            owner_boot_id=me.boot_id,
        )
    )
    return True


def owner_is_dead(superblock: Superblock) -> bool:
    """Whether the process that owns the directory is proven dead."""
    owner = Identity(
        superblock.owner_pid,
        superblock.owner_start_time,
        superblock.owner_boot_id,
        superblock.owner_pid_namespace,
    )
    return identity.prove_dead(owner, lambda: False)


def remove(path: Path, uuid: bytes, *, timeout: float = TIMEOUT_S) -> bool:
    """Removes the buffer of that uuid, if it is still there.

    Returns:
        Whether it was.

    Raises:
        AttachTimeout: somebody holds init.lock.
    """
    try:
        directory = Directory.open(path)
    except BufferNotFoundError:
        return False
    with directory:
        files = Files(directory)
        if not files.has_control():
            return False
        with files.lock(timeout):
            if not files.has_control():
                return False
            control = files.open_control()
            superblock = control.superblock()
            if superblock.uuid != uuid:
                return False  # another buffer is there by now
            control.write(replace(superblock, state=BufferState.CLOSING))
            _core.reached("remove.closing")
            return finish(files)


def finish(files: Files, *, keep_lock: bool = False) -> bool:
    """Removes by list; under init.lock, when the superblock says CLOSING.

    Args:
        files: the directory.
        keep_lock: a buffer is made there next.
    """
    control = files.open_control()
    control.runtime["state"] = BufferState.CLOSING
    created = bool(control.superblock().flags & Flag.CREATED_DIRECTORY)
    return files.remove(created_directory=created and not keep_lock, keep_lock=keep_lock)


def sweep() -> list[Path]:
    """Removes the temporary directories that killed owners of this user left, and returns them."""
    return cleanup.janitor(_is_abandoned, _remove_abandoned)


def _is_abandoned(path: Path) -> bool:
    with Directory.open(path) as directory:
        files = Files(directory)
        if not files.has_control():
            return True
        control = files.open_control()
        superblock = control.superblock()
        return (
            bool(superblock.flags & Flag.TEMPORARY)
            and owner_is_dead(superblock)
            and reason_to_recover(files, superblock, Registry(control, directory)) is not None
        )


def _remove_abandoned(path: Path) -> bool:
    with Directory.open(path) as directory:
        files = Files(directory)
        with files.lock(0.0):
            return files.remove(created_directory=True)
