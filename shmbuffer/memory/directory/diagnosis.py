"""Diagnoses a directory: its buffer, its living clients, and whether it needs recovery.

A process diagnoses a directory once, under init.lock, and passes the result to the functions that
open, recover, remove and check a buffer. A diagnosis that is made without the lock (`inspect`,
`item_stats`) may be outdated when it is used.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shmbuffer.errors import BufferNotFoundError, CorruptBufferError
from shmbuffer.memory.clients.registry import Registry
from shmbuffer.memory.directory import restored
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format.layout import BufferState, EntryState, Flag, Phase
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control, Superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.mapped.settings import Settings
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.region import Directory

NO_CLIENT_ALIVE = "no client alive"
"""Reason for a recovery if the machine was not rebooted and the directory is not a copy."""


@dataclass(frozen=True)
class Diagnosis:
    """The state of a directory that contains a buffer."""

    files: Files
    control: Control  # the mapped control file
    superblock: Superblock
    registry: Registry

    @classmethod
    def read(cls, files: Files, *, writable: bool = True) -> Diagnosis:
        """Diagnoses a directory."""
        files.require_control()
        return cls.from_control(files, files.open_control(writable=writable))

    @classmethod
    def from_control(cls, files: Files, control: Control) -> Diagnosis:
        """Diagnoses a directory whose control file is already mapped."""
        return cls(files, control, control.superblock(), Registry(control, files.directory))

    def settings(self) -> Settings:
        """Returns the recorded settings of the buffer."""
        return Settings.recorded(self.superblock.settings, self.files.path)

    @cached_property
    def schema(self) -> Schema | None:
        """The schema of the buffer, or None before the first write. The file is read once."""
        return self.files.recorded_schema(self.superblock)

    def load(self, *, writable: bool = True) -> Mapped | None:
        """Maps the files of the schema. Returns None before the first write."""
        if self.superblock.schema_sha256 == bytes(32):
            return None
        return self.files.load(self.superblock, vars(self).get("schema"), writable=writable)

    def reason_to_recover(self) -> str | None:
        """Returns why the directory must be recovered before use; None if a living client uses it.

        A held lock proves that a client is alive, even if the boot ids differ, because containers
        may have their own boot id. If the boot id cannot be read, the machine may have been
        rebooted, and recovery verifies all items.
        """
        superblock = self.superblock
        if self.is_save():
            return "copy"  # a save is a copy of the buffer that was saved
        if self.control.file != (superblock.device, superblock.inode):
            return "copy"
        if superblock.state != BufferState.RECOVERING and self.registry.alive():
            return None  # no client joins during a recovery
        here, verifiable = identity.boot_id(), bool(superblock.flags & Flag.CHECKSUM)
        if identity.UNKNOWN_BOOT in (superblock.boot_id, here):
            return "reboot" if verifiable else NO_CLIENT_ALIVE
        if superblock.boot_id != here:
            return "reboot"
        return "restored" if verifiable and self._is_restored() else NO_CLIENT_ALIVE

    def is_save(self) -> bool:
        """True if the directory is a save that no process has turned into a live buffer."""
        return bool(self.superblock.flags & Flag.SAVE)

    def was_closed_cleanly(self) -> bool:
        """True if all clients have detached cleanly, so that no process died during a change.

        Returns False for buffers without checksums, because changes by other programs could not be
        detected.
        """
        entries, runtime = self.control.entries, self.control.runtime[0]
        return (
            bool(self.superblock.flags & Flag.CHECKSUM)
            and self.superblock.state == int(runtime["state"]) == BufferState.READY
            and not (entries["state"] != EntryState.FREE).any()
            and not (entries["phase"] != Phase.IDLE).any()
            and not any(runtime["mutex"].tobytes()[:4])
        )

    def _is_restored(self) -> bool:
        """True if other programs changed the files since the last store; see `restored`."""
        schema: Schema | None = None
        with suppress(BufferNotFoundError, CorruptBufferError):
            schema = self.schema
            return restored.is_restored(self.files.directory, self.control, schema)
        return True  # the function that needs the schema raises the error for the damage

    def owner_is_dead(self) -> bool:
        """True if the owner of the directory is proved to be dead. A zombie counts as dead."""
        owner = self.superblock.owner
        here = owner.pid_namespace == identity.current().pid_namespace
        # a held lock proves that a client in another container is alive
        here |= identity.is_of_another_boot(owner)
        return identity.prove_dead(owner, lambda: here and not self.registry.alive())

    def is_abandoned(self) -> bool:
        """True if the directory is temporary, and neither its owner nor a client is alive."""
        return (
            bool(self.superblock.flags & Flag.TEMPORARY)
            and self.owner_is_dead()
            and self.reason_to_recover() is not None
        )


def is_save(path: Path) -> bool:
    """True if a directory is a save that no process has turned into a live buffer."""
    with Directory.open(path, reading=True, allow_unsafe_fs=True) as directory:
        return Diagnosis.read(Files(directory, private=True), writable=False).is_save()
