"""The mapped control file: superblock, runtime page and registry of a buffer.

The superblock contains the identity, state and settings of the buffer. It changes only under
init.lock: when the buffer is created, defined, recovered or flushed, and when its settings change.
Reads and writes of items never change it.

There are two copies of the superblock, in separate pages. A change overwrites the older copy, so
there is always one valid copy. The valid copy with the higher sequence number is used. This copy is
synced before the other one is overwritten, because a power cut can destroy every page that is not
on the disk yet.

If a process dies while it writes a copy, the checksum of this copy is wrong and the other copy is
used.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError, FormatError, IncompatibleVersionError
from shmbuffer.memory.format import layout, limiter
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.format.limiter import NO_LIMIT, NUMBERS, Quota, RateLimiter
from shmbuffer.memory.mapped.settings import as_json
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.identity import Identity
from shmbuffer.memory.system.path_checks import not_durable

if TYPE_CHECKING:
    from shmbuffer.memory.format.schema import Schema

_LAYOUT = _core.layout()
NO_FLAGS = Flag(0)


@dataclass(frozen=True)
class Superblock:
    """The values in a copy of the superblock. ``docs/format/directory.md`` describes its fields."""

    format_minor: int = layout.FORMAT_MINOR
    sequence: int = 0
    uuid: bytes = b""
    boot_id: bytes = b""
    epoch: int = 0
    state: BufferState = BufferState.NO_SCHEMA
    flags: Flag = NO_FLAGS
    capacity: int = 0
    lanes: int = 0
    leaves: int = 0
    schema_sha256: bytes = bytes(32)
    slots_bytes: int = 0
    device: int = 0
    inode: int = 0
    durable_ticket: int = 0
    durable_epoch: int = 0
    owner_pid: int = 0
    owner_start_time: int = 0
    owner_pid_namespace: int = 0
    owner_boot_id: bytes = bytes(16)
    salt: int = 0
    created_ns: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self) -> Identity:
        """The process that removes the buffer when it closes its handle."""
        return Identity(
            self.owner_pid, self.owner_start_time, self.owner_boot_id, self.owner_pid_namespace
        )

    def with_owner(self, **others: Any) -> Superblock:
        """Returns a copy with this process as the owner, in which ``others`` are also replaced."""
        me = identity.current()
        return replace(
            self,
            owner_pid=me.pid,
            owner_start_time=me.start_time,
            owner_pid_namespace=me.pid_namespace,
            owner_boot_id=me.boot_id,
            **others,
        )

    def with_schema(self, schema: Schema, slots_bytes: int) -> Superblock:
        """Returns a copy in the state READY, with the fields that describe the schema.

        Args:
            schema: The schema of the buffer.
            slots_bytes: Size of the slots file in bytes.
        """
        return replace(
            self,
            state=BufferState.READY,
            capacity=schema.capacity,
            lanes=schema.width,
            leaves=len(schema.leaves),
            schema_sha256=schema.digest,
            slots_bytes=slots_bytes,
            salt=_core.crc32c(schema.digest),
        )

    def pack(self) -> bytes:
        """Encodes the superblock as 4096 bytes, including its checksum."""
        settings = as_json(self.settings)
        page = np.zeros((), layout.SUPERBLOCK)
        for name in _NUMBERS:
            page[name] = int(getattr(self, name))
        for name in _BYTES:
            page[name] = np.void(getattr(self, name))
        page["magic"] = np.void(layout.MAGIC)
        page["format_major"] = layout.FORMAT_MAJOR
        page["endian"] = layout.ENDIAN_TAG
        page["entries"] = layout.ENTRIES
        page["architecture"] = layout.ARCHITECTURE
        page["mutex_bytes"] = _LAYOUT["mutex_bytes"]
        page["mutex_align"] = _LAYOUT["mutex_align"]
        page["page"] = layout.PAGE
        page["settings_bytes"] = len(settings)
        page["settings"] = np.void(settings.ljust(page["settings"].itemsize, b"\0"))
        data = page.tobytes()[:-4]
        return data + int(_core.crc32c(data)).to_bytes(4, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Superblock | None:
        """Decodes a copy. Returns None if its checksum is wrong or a value is impossible."""
        if len(data) != layout.SUPERBLOCK_BYTES or not _is_intact(data):
            return None
        page = np.frombuffer(data, layout.SUPERBLOCK)[0]
        numbers: dict[str, Any] = {name: int(page[name]) for name in _NUMBERS}
        size = min(int(page["settings_bytes"]), layout.SUPERBLOCK["settings"].itemsize)
        try:
            numbers["state"] = BufferState(numbers["state"])
            numbers["flags"] = Flag(numbers["flags"])
            settings = json.loads(page["settings"].tobytes()[:size])
        except (ValueError, RecursionError):
            return None
        grown = any(numbers[name] > limit for name, limit in _LIMITS.items())
        if grown or not isinstance(settings, dict):
            return None
        strings = {name: page[name].tobytes() for name in _BYTES}
        return cls(**numbers, **strings, settings=settings)


_BYTES = ("uuid", "boot_id", "schema_sha256", "owner_boot_id")
_NUMBERS = tuple(
    field.name for field in fields(Superblock) if field.name not in (*_BYTES, "settings")
)
# The arguments of a limiter that are stored in its ages.
_AGES = frozenset(("max_staleness", "items_per_version"))
# The highest valid values of fields that are incremented. Tickets run out at 2**62.
_LIMITS = {"sequence": 2**64 - 2**32, "epoch": 2**64 - 2**32, "durable_ticket": 2**62}


class Control:
    """A mapped control file.

    Attributes:
        map: The map of the file.
        where: Path of the buffer, for messages.
        runtime: NumPy view of the runtime page: one structured value.
        entries: NumPy view of the registry: 256 structured values.
        file: Device and inode number of the file. None if there is no file.
        repaired: True if one of the two superblock copies was damaged when they were last read.
        limiter_version: View of the limiter's version. Writes and samples read it to find out
            whether there is a limiter (0 if there is none). Costs 40 ns.
    """

    def __init__(self, mapping: Any, where: str, file: tuple[int, int] | None = None) -> None:
        self.map = mapping
        self.where = where
        self.file = file
        self._known: dict[bytes, Superblock | None] = {}  # decoded superblocks by page content
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.runtime: np.ndarray[Any, Any] = self._bytes[
            layout.RUNTIME_OFFSET : layout.REGISTRY_OFFSET
        ].view(layout.RUNTIME)[0:1]
        self.entries: np.ndarray[Any, Any] = self._bytes[layout.REGISTRY_OFFSET :].view(
            layout.ENTRY
        )
        self.repaired = False
        copies = self._bytes[: 2 * layout.SUPERBLOCK_BYTES].view(layout.SUPERBLOCK)
        self.limiter_version: memoryview = self.runtime["limiter_version"].data
        self._sequences = [copies[at : at + 1]["sequence"].data for at in (0, 1)]

    @property
    def sequences(self) -> tuple[int, int]:
        """The sequence numbers of both superblock copies. A change increments one of them.

        Costs 0.2 µs.
        """
        first, second = self._sequences
        return first[0], second[0]

    def format(self, first: Superblock) -> None:
        """Initializes a new control file: the mutex, runtime page and both superblock copies."""
        for name, value in (("max_priority", -1.0), ("alpha", 1.0)):
            self.runtime[name] = value
            _core.reached("create.runtime")
        _core.format_mutex(self.map)
        for copy in (0, 1):
            self._store(copy, replace(first, sequence=copy + 1))

    def limit(self, wanted: RateLimiter | Quota | None) -> None:
        """Sets a limiter before the buffer has a ring, or removes it.

        The caller must hold init.lock. Once there is a ring, the C core sets the limiter.
        """
        version = int(self.runtime["limiter_version"][0]) + 1
        block, ages = self.limiter_block(version), self.ages_block(version)
        numbers = dict(
            zip(NUMBERS, NO_LIMIT if wanted is None else wanted.to_numbers(), strict=True)
        )
        initial = {"inserts_base": numbers["min_size"], "samples_base": 0, "queue_next": 0}
        ages["inserts_base"] = 0
        _core.reached("limit.stored")
        ages["version_base"] = self.runtime["consumer_version"]
        _core.reached("limit.stored")
        for name, value in (numbers | initial).items():  # SYNC limiter-reuse, release
            (ages if name in _AGES else block)[name] = value
            _core.reached("limit.stored")
        self.runtime["limiter_version"] = version  # SYNC limiter-set, release
        _core.reached("limit.published")

    def limits(self) -> RateLimiter | None:
        """Returns the active rate limiter, or None if there is none."""
        return limiter.read(self.runtime[0])

    def limiter_block(self, version: int) -> np.ndarray[Any, Any]:
        """Returns a view of the limiter with this version in shared memory: one structured value.

        There are two limiters, which versions use alternately.
        """
        at = layout.RUNTIME_OFFSET + layout.RUNTIME.fields["limiters"][1]  # type: ignore[index]
        at += (version & 1) * layout.LIMITER.itemsize
        return self._bytes[at : at + layout.LIMITER.itemsize].view(layout.LIMITER)

    def ages_block(self, version: int) -> np.ndarray[Any, Any]:
        """Returns a view of the age limits with this version in shared memory."""
        at = layout.RUNTIME_OFFSET + layout.RUNTIME.fields["ages"][1]  # type: ignore[index]
        at += (version & 1) * limiter.AGES.itemsize
        return self._bytes[at : at + limiter.AGES.itemsize].view(limiter.AGES)

    def superblock(self) -> Superblock:
        """Returns the valid copy of the superblock with the higher sequence number.

        Copies that have not changed since the last call are not decoded again.

        Raises:
            FormatError: The file is not a control file.
            IncompatibleVersionError: Another version or architecture has written the file.
            CorruptBufferError: Both copies are damaged.
        """
        pages = self._pages()
        if not all(page in self._known for page in pages):
            self._require_compatible(pages)
            known = self._known
            self._known = {
                page: known[page] if page in known else Superblock.unpack(page) for page in pages
            }
        copies = [copy for copy in map(self._known.get, pages) if copy is not None]
        self.repaired = len(copies) < 2
        if not copies:
            if not any(page.startswith(layout.MAGIC) for page in pages):
                raise FormatError(
                    f"{self.where}: this is not a control file of shmbuffer; check the path."
                    " Nothing was changed",
                    path=self.where,
                )
            raise CorruptBufferError(
                f"{self.where}: both copies of the superblock are damaged; "
                "try to read the items with TensorDict.load_memmap",
                path=self.where,
            )
        return max(copies, key=lambda copy: copy.sequence)

    def write(self, superblock: Superblock) -> Superblock:
        """Stores a superblock in place of the older copy, after a sync of the newer copy.

        Returns:
            The superblock with its new sequence number.
        """
        newest = self.superblock()
        self.sync()
        following = replace(superblock, sequence=newest.sequence + 1)
        first = self._known.get(self._page(0))
        self._store(1 if first is not None and first.sequence == newest.sequence else 0, following)
        return following

    def withdraw(self, superblock: Superblock) -> None:
        """Overwrites both copies with a superblock, because the newer one could not be synced."""
        sequence = self.superblock().sequence
        for copy in (0, 1):
            self._store(copy, replace(superblock, sequence=sequence + 1 + copy))

    def note_recovery(self, found: Mapping[str, Any]) -> None:
        """Stores the report of a recovery in the runtime page.

        Args:
            found: The values of the fields in `layout.RECOVERY`, by name.
        """
        page = np.zeros((), layout.RECOVERY)
        for name, value in found.items():
            page[name] = value
        data = page.tobytes()[:-4]
        data += int(_core.crc32c(data)).to_bytes(4, "little")
        self._bytes[layout.RECOVERY_OFFSET : layout.REGISTRY_OFFSET] = np.frombuffer(data, np.uint8)
        _core.reached("recover.noted")

    def last_recovery(self) -> dict[str, Any] | None:
        """Returns the report of the last recovery, or None if it is missing or damaged."""
        data = self._bytes[layout.RECOVERY_OFFSET : layout.REGISTRY_OFFSET].tobytes()
        record = np.frombuffer(data, layout.RECOVERY)[0]
        if int(_core.crc32c(data[:-4])) != record["crc32c"]:
            return None
        assert layout.RECOVERY.names is not None
        found = {name: record[name].item() for name in layout.RECOVERY.names if name != "crc32c"}
        return {**found, "reason": found["reason"].decode("ascii", "replace")}

    def spare(self, superblock: Superblock) -> list[NDArray[np.uint8]]:
        """Returns views of all bytes that have no meaning, in the runtime page and the registry.

        Returns an empty list if a later version of the format may use these bytes.
        """
        if superblock.format_minor > layout.FORMAT_MINOR:
            return []
        return [self.runtime["spare"], self.entries["spare"]]

    def clear_spare(self, superblock: Superblock) -> None:
        """Sets all bytes in `spare` to zero."""
        for part in self.spare(superblock):
            part[:] = 0
            _core.reached("recover.spare")

    def touch(self) -> None:
        """Stores the current time, as the C core does in each read and write (`restored`)."""
        self.runtime["touched_ns"] = time.time_ns()
        _core.reached("control.touched")

    def mutex_owner(self) -> int:
        """Returns the thread ID of the thread that holds the mutex, or 0 if the mutex is free.

        The ID consists of the low 30 bits of the futex word (futex(2)). It is valid in the pid
        namespace of that thread, so use it only for display.
        """
        return int(_core.mutex_owner(self.map))

    def sync(self) -> None:
        """Syncs the whole file to the disk. Raises DurabilityError if the sync fails."""
        try:
            self.map.sync()
        except OSError as error:
            raise not_durable(self.where, error) from error

    def _pages(self) -> list[bytes]:
        """Returns the bytes of both superblock copies, consistently if they are being changed.

        Damaged pages are read again until their content no longer changes.
        """
        pages = [self._page(0), self._page(1)]
        while not all(map(_is_intact, pages)):
            again = [self._page(0), self._page(1)]
            if again == pages:
                break
            pages = again
        return pages

    def _page(self, copy: int) -> bytes:
        """Returns the bytes of one copy of the superblock, 0 or 1."""
        at = copy * layout.SUPERBLOCK_BYTES
        return self._bytes[at : at + layout.SUPERBLOCK_BYTES].tobytes()

    def _store(self, copy: int, superblock: Superblock) -> None:
        """Overwrites one copy of the superblock in two halves, between which tests can stop."""
        at = copy * layout.SUPERBLOCK_BYTES
        data = np.frombuffer(superblock.pack(), np.uint8)
        half = layout.SUPERBLOCK_BYTES // 2
        self._bytes[at : at + half] = data[:half]
        _core.reached("superblock.half")
        self._bytes[at + half : at + layout.SUPERBLOCK_BYTES] = data[half:]
        _core.reached("superblock.stored")

    def _require_compatible(self, pages: list[bytes]) -> None:
        """Raises IncompatibleVersionError if this build cannot use the control file.

        The header of the newest intact copy is checked. If both copies are damaged, only the format
        version is checked, provided that it is the same in both.
        """
        fields = {
            "format_major": (layout.FORMAT_MAJOR, "format version"),
            "endian": (layout.ENDIAN_TAG, "byte order"),
            "entries": (layout.ENTRIES, "number of registry entries"),
            "architecture": (layout.ARCHITECTURE, "processor architecture"),
            "mutex_bytes": (_LAYOUT["mutex_bytes"], "size of a mutex"),
            "page": (layout.PAGE, "page size"),
        }
        headers = [np.frombuffer(page, layout.SUPERBLOCK)[0] for page in pages]
        intact = [header for header, page in zip(headers, pages, strict=True) if _is_intact(page)]
        if intact:
            found = max(intact, key=lambda header: int(header["sequence"]))
        elif (
            all(page.startswith(layout.MAGIC) for page in pages)
            and headers[0]["format_major"] == headers[1]["format_major"]
        ):
            found, fields = headers[0], {"format_major": fields["format_major"]}
        else:
            return
        for name, (here, what) in fields.items():
            if int(found[name]) != here:
                raise IncompatibleVersionError(
                    f"{self.where}: the {what} is {int(found[name]):#x}, but this build needs "
                    f"{here:#x}; open the buffer with the version that wrote it, on the same kind"
                    " of machine",
                    path=self.where,
                    field=name,
                    found=int(found[name]),
                    expected=here,
                )


def _is_intact(page: bytes) -> bool:
    """True if this copy of the superblock begins with the magic number and has a valid checksum."""
    checksum = int.from_bytes(page[-4:], "little")
    return page.startswith(layout.MAGIC) and _core.crc32c(page[:-4]) == checksum


def first_superblock(settings: dict[str, Any], flags: Flag, file: tuple[int, int]) -> Superblock:
    """Returns the superblock of a new buffer, which this process owns.

    Args:
        settings: The settings of the buffer, as JSON values.
        flags: The flags of the buffer.
        file: Device and inode number of the control file.
    """
    return Superblock().with_owner(
        uuid=uuid.uuid4().bytes,
        boot_id=identity.current().boot_id,
        flags=flags,
        device=file[0],
        inode=file[1],
        created_ns=time.time_ns(),
        settings=settings,
    )
