"""What a directory is like: its buffer, who is alive in it, and why it has to be recovered.

Made once, under init.lock, and handed on to those who act on it: opening, recovery, removal, check.
A look without the lock (`inspect`, `item_stats`) may be old by the time it is read.
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
"""The reason of a recovery within one boot, of the directory that was left."""


@dataclass(frozen=True)
class Diagnosis:
    """A directory with a buffer in it."""

    files: Files
    control: Control  # its control file, mapped
    superblock: Superblock
    registry: Registry

    @classmethod
    def of(cls, files: Files, *, writable: bool = True) -> Diagnosis:
        """Looks at a directory."""
        files.require_control()
        return cls.of_control(files, files.open_control(writable=writable))

    @classmethod
    def of_control(cls, files: Files, control: Control) -> Diagnosis:
        """Diagnose a directory whose control file is mapped already."""
        return cls(files, control, control.superblock(), Registry(control, files.directory))

    def settings(self) -> Settings:
        """The recorded settings of the buffer."""
        return Settings.recorded(self.superblock.settings, self.files.path)

    @cached_property
    def schema(self) -> Schema | None:
        """The schema, read once; None before the first write."""
        return self.files.recorded_schema(self.superblock)

    def load(self, *, writable: bool = True) -> Mapped | None:
        """Maps what was built; None before the first write."""
        if self.superblock.schema_sha256 == bytes(32):
            return None
        return self.files.load(self.superblock, vars(self).get("schema"), writable=writable)

    def reason_to_recover(self) -> str | None:
        """Why the directory has to be recovered first; None if somebody alive uses it.

        A lock that is held proves life whatever the boot ids say: containers may have their own. A
        boot id that cannot be read proves neither a reboot nor that there was none, so what can be
        verified is.
        """
        superblock = self.superblock
        if self.is_save():
            return "copy"  # of the buffer that was saved
        if self.control.file != (superblock.device, superblock.inode):
            return "copy"
        if superblock.state != BufferState.RECOVERING and self.registry.alive():
            return None  # nobody joins while somebody recovers
        here, verifiable = identity.boot_id(), bool(superblock.flags & Flag.CHECKSUM)
        if identity.UNKNOWN_BOOT in (superblock.boot_id, here):
            return "reboot" if verifiable else NO_CLIENT_ALIVE
        if superblock.boot_id != here:
            return "reboot"
        return "restored" if verifiable and self._is_restored() else NO_CLIENT_ALIVE

    def is_save(self) -> bool:
        """True if it is a save that no process has continued in."""
        return bool(self.superblock.flags & Flag.SAVE)

    def was_left_whole(self) -> bool:
        """True if everybody has left in order, so that nobody has died in the middle of anything.

        Only where a file that somebody else has changed since would have been noticed.
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
        """True if somebody else has changed the files since the last store; see `restored`."""
        schema: Schema | None = None
        with suppress(BufferNotFoundError, CorruptBufferError):
            schema = self.schema
            return restored.is_restored(self.files.directory, self.control, schema)
        return True  # it may have been damaged on that way; the one who needs it says so

    def owner_is_dead(self) -> bool:
        """True if the owner is proven dead: a zombie is, once nobody holds a liveness file."""
        owner = self.superblock.owner
        here = owner.pid_namespace == identity.current().pid_namespace
        here |= identity.is_of_another_boot(owner)  # nobody there holds a lock, or for good
        return identity.prove_dead(owner, lambda: here and not self.registry.alive())

    def is_abandoned(self) -> bool:
        """True if the directory is temporary, and neither its owner nor a client is alive."""
        return (
            bool(self.superblock.flags & Flag.TEMPORARY)
            and self.owner_is_dead()
            and self.reason_to_recover() is not None
        )


def is_save(path: Path) -> bool:
    """True if a directory is a save that no process has continued in."""
    with Directory.open(path, reading=True, allow_unsafe_fs=True) as directory:
        return Diagnosis.of(Files(directory, private=True), writable=False).is_save()
