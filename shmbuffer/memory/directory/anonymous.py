"""Keeps a buffer in anonymous memory (memfd), for one process and its spawned children.

One file without a name contains the control file, the size and JSON of the schema, the slots, each
leaf and the ledger. Each section starts on a new page. Pages that were never written use no memory.
The file disappears when the last process that has it open exits, so recovery and cleanup are not
needed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, SpaceError
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Flag
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control, first_superblock
from shmbuffer.memory.mapped.native import Mapped
from shmbuffer.memory.system import filesystem
from shmbuffer.memory.system.path_checks import explain_errors

WHERE = "anonymous memory"


class Anonymous:
    """The memory of a buffer without a directory: one memfd, which this object owns as ``file``."""

    directory = None
    path = None
    in_memory = True

    def __init__(self, file: _core.Descriptor, where: str = WHERE) -> None:
        self.file = file
        self.where = where  # for messages
        self._dictionary: bytes | None = None

    @classmethod
    def create(cls, settings: dict[str, Any], flags: Flag) -> tuple[Anonymous, Control]:
        """Creates a memfd that contains a formatted control file, and maps the control file."""
        backing = cls(_core.Descriptor())
        with _explain_errors(layout.CONTROL_BYTES):
            fd = backing.file.take(os.memfd_create, "shmbuffer", os.MFD_CLOEXEC)
            os.ftruncate(fd, layout.CONTROL_BYTES)
            _core.reached("file.sized")
            found = os.fstat(fd)
        control = backing.open_control()
        control.format(first_superblock(settings, flags, (found.st_dev, found.st_ino)))
        return backing, control

    @classmethod
    def wrap(cls, dictionary: bytes | None, where: str) -> Anonymous:
        """Creates a backing for a buffer that is already mapped, and only by this process.

        Args:
            dictionary: The dictionary for compressing records, or None.
            where: Description of the buffer for messages, such as the path of a save.
        """
        backing = cls(_core.Descriptor(), where)
        with _explain_errors():
            backing.file.take(os.memfd_create, "shmbuffer", os.MFD_CLOEXEC)
        backing._dictionary = dictionary
        return backing

    def open_control(self) -> Control:
        """Maps the control file."""
        with _explain_errors(layout.CONTROL_BYTES):
            return Control(_core.Map(self.file.fd, layout.CONTROL_BYTES), WHERE)

    def extra_files(self) -> tuple[tuple[str, int], ...]:
        """Returns an empty tuple, because a buffer in memory has no history and no weights file."""
        return ()

    def to_picklable(self) -> Any:
        """Returns a picklable duplicate of the memfd, for a process that is being spawned."""
        from multiprocessing import context, reduction

        if self.where != WHERE:
            raise RuntimeError(
                f"{self.where}: is open for reading in this process only; attach to it in the "
                "other process instead"
            )
        if context.get_spawning_popen() is None:
            raise RuntimeError(
                f"{WHERE}: a buffer in memory that has items can be pickled only for a process "
                "that is being spawned with it; save it with dumps() or state_dict(), or create it "
                "in a directory (LazyMemmapStorage with scratch_dir), to which any process can "
                "attach"
            )
        return reduction.DupFd(self.file.fd)

    def lock(self, timeout: float) -> _JoinLock:
        """Returns the lock that one process holds while it defines or joins the buffer."""
        return _JoinLock(self.file.fd, timeout)

    def lock_growth(self, timeout: float) -> AbstractContextManager[None]:
        """Returns a context that takes no lock, because no space is allocated in steps."""
        return nullcontext()

    def build(self, schema: Schema, *, slots: int, adopt: bool) -> Mapped:
        """Extends the memfd by the sections of a schema, stores the schema, and maps the sections.

        If ``slots`` is not 0, the memory of all sections is allocated at once. ``adopt`` has no
        effect.
        """
        data = schema.to_json()
        size, offsets = _section_offsets(schema, len(data))
        try:
            # The file never becomes shorter, because views of an earlier definition would fault.
            if os.fstat(self.file.fd).st_size < size:
                os.ftruncate(self.file.fd, size)
            _core.reached("file.sized")
            if slots:
                os.posix_fallocate(self.file.fd, 0, size)
                _core.reached("file.sized")
            content = len(data).to_bytes(8, "little") + data
            if os.pwrite(self.file.fd, content, layout.CONTROL_BYTES) != len(content):
                raise OSError(errno.EIO, "only a part of the schema was written")
            _core.reached("file.written")
            return self._map(schema, offsets)
        except (OSError, OverflowError) as error:
            raise SpaceError(
                f"{WHERE}: {size} bytes are needed, but cannot be allocated ({error}); "
                "use a smaller max_size, or a LazyMemmapStorage on a disk",
                needed_bytes=size,
                free_bytes=filesystem.free_memory_bytes(),
            ) from error

    def load(self, superblock: Any) -> Mapped:
        """Reads the schema that another process has stored, and maps its sections."""
        return self._map(*self._read_schema())

    def extend_ledger(self, start: int, nbytes: int) -> None:
        """Allocates ``nbytes`` bytes of the ledger, from the byte ``start``, under `lock`.

        Raises SpaceError if there is not enough free memory.
        """
        if self.where != WHERE:
            return  # a wrapped buffer has a map of the whole ledger
        _, (*_, first) = self._read_schema()
        with _explain_errors(nbytes):
            free = filesystem.free_memory_bytes()
            filesystem.allocate_part(self.file.fd, first + start, nbytes, free=free)

    def _read_schema(self) -> tuple[Schema, list[int]]:
        """Returns the schema that is stored in the memfd, and the offsets of the sections."""
        with _explain_errors():
            size = int.from_bytes(os.pread(self.file.fd, 8, layout.CONTROL_BYTES), "little")
            data = os.pread(self.file.fd, size, layout.CONTROL_BYTES + 8)
        schema = Schema.from_json(data, WHERE)
        return schema, _section_offsets(schema, size)[1]

    def dictionary(self) -> bytes | None:
        """Returns the dictionary for compressing records, or None before one is published."""
        return self._dictionary

    def publish_dictionary(self, data: bytes) -> bytes:
        """Stores the dictionary for compressing records in this object, unless there is one.

        Returns the stored dictionary.
        """
        self._dictionary = self._dictionary or data
        return self._dictionary

    def discard_unfinished(self) -> None:
        """Does nothing, because an unfinished definition is built again in place."""

    def prepare_discard(self) -> Callable[[], None]:
        """Returns a function that frees the memory of all sections after the control file.

        Their bytes are then read as zeros.
        """
        with _explain_errors():
            size = os.fstat(self.file.fd).st_size - layout.CONTROL_BYTES
            content = mmap.mmap(self.file.fd, size, offset=layout.CONTROL_BYTES)

        def discard() -> None:
            with content:
                content.madvise(mmap.MADV_REMOVE)

        return discard

    def _map(self, schema: Schema, offsets: list[int]) -> Mapped:
        """Maps the slots, the leaves and the ledger of the memfd, which start at these offsets."""
        with _explain_errors(schema.sections["bytes"] + sum(schema.map_bytes)):
            slots = _core.Map(self.file.fd, schema.sections["bytes"], offset=offsets[0])
            leaves = [
                _core.Map(self.file.fd, nbytes, offset=offset, twice=bool(schema.record_bytes))
                for nbytes, offset in zip(schema.map_bytes, offsets[1:-1], strict=True)
            ]
            ledger = _core.Map(self.file.fd, schema.ledger_bytes, offset=offsets[-1])
        return Mapped(schema, slots, leaves, ledger)

    def close(self) -> None:
        """Closes the descriptor. The maps stay valid until they are garbage collected."""
        self.file.close()


class _JoinLock(Lock):
    """A lock (flock) on the memfd, through a descriptor that is not shared with children."""

    def __init__(self, fd: int, timeout: float) -> None:
        super().__init__()
        self._name = f"/proc/self/fd/{fd}"
        self._timeout = timeout

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._timeout
        try:
            with _explain_errors():
                self.take(os.open, self._name, os.O_RDWR | os.O_CLOEXEC)
            while True:
                try:
                    with _explain_errors():
                        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return self
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise AttachTimeout(
                            f"{WHERE}: another process has been creating this buffer for more than"
                            f" {self._timeout:g} s; pass a longer timeout, or try again",
                            timeout=self._timeout,
                        ) from None
                    time.sleep(0.002)
        except BaseException:
            self.close()
            raise


def _explain_errors(needed: int = 0) -> AbstractContextManager[None]:
    return explain_errors(Path(WHERE), needed=needed, free=filesystem.free_memory_bytes)


def _section_offsets(schema: Schema, schema_bytes: int) -> tuple[int, list[int]]:
    """Returns the size of the memfd, and the offsets of the slots, each leaf and the ledger."""
    at = layout.CONTROL_BYTES + _round_to_pages(8 + schema_bytes)
    offsets = []
    for nbytes in (schema.sections["bytes"], *schema.map_bytes):
        offsets.append(at)
        at += _round_to_pages(nbytes)
    return at + layout.PAGE, [*offsets, at]


def _round_to_pages(nbytes: int) -> int:
    return -(-nbytes // layout.PAGE) * layout.PAGE
