"""Files that store the pieces of an unfinished rollout until its items are committed to the ring.

    .shmbuffer/partials/<number of the reservation>

     created ──append──▶ ... ──committed (the reservation is DONE)──▶ removed ──▶ DONE is cleared
       └──its process dies: the kernel releases the lock──▶ another process continues the rollout

``docs/format/directory.md`` describes the bytes of a file.

Always true
  1. The process that writes a file has locked it (flock). No other process writes to this file. If
     the lock is free, the writer has died or has closed the file.
  2. If a piece is incomplete, this piece and all bytes after it are ignored. A process that
     continues the rollout first truncates the file at the end of the last complete piece.
  3. Items are never committed twice. The critical section that commits the items also sets the
     state of the reservation to DONE. The state stays DONE until the file is removed.
If a process dies here: the file remains for other processes. A file without a valid header contains
no rollout, and is removed. If the power fails, pieces can be lost, like all items that have not
been flushed.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shmbuffer._native import _core
from shmbuffer.errors import AttachTimeout, CorruptBufferError, UnsafePathError
from shmbuffer.memory.clients.locks import Lock, is_free
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.key_names import is_number
from shmbuffer.memory.format.ledger import RESERVATIONS
from shmbuffer.memory.system.filesystem import human_size, memory_bytes, read_at
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.region import Directory

_MAGIC = b"SHMPART\x01"
_HEAD = struct.Struct("<8sQQQQQQII")
_PIECE = struct.Struct("<QII")
# Time limit for taking a lock. Processes that list unfinished rollouts hold it for microseconds.
_PATIENCE_S = 0.2
_CHUNK_BYTES = 2**20  # number of bytes that are read at a time to compute a checksum
_NO_VERSION = 2**64 - 1
# Upper bound on the number of a reservation. The number and its index in the ledger have 64 bits
# together.
_NUMBERS = 2**64 // RESERVATIONS


@dataclass(frozen=True)
class Partial:
    """Description of an unfinished rollout, which was appended in pieces but not committed.

    If its process has died, `ReplayBuffer.resume` can continue the rollout in another process.
    """

    id: int  # number of the reservation
    pieces: int  # number of complete pieces
    items: int  # number of items in all pieces
    reserved: int  # number of items that were reserved for the rollout
    nbytes: int  # number of bytes reserved in the byte ring; 0 if unknown
    appended_bytes: int  # total size of all pieces
    version: int | None  # version of the policy, as given to the reservation
    pid: int  # pid of the process that made the reservation
    age_s: float  # seconds since the reservation was made


class PartialFile:
    """The file of one reservation, which this process has locked.

    `make` creates a file, and `take` opens an existing one.
    """

    def __init__(self, directory: Directory, lock: Lock, number: int) -> None:
        self._directory = directory
        self._lock = lock
        # offset of the end of the last complete piece; None if `cut` has to determine it
        self._end: int | None = None
        self._where = directory.path / _name(number)
        self.number = number

    @classmethod
    def make(
        cls, directory: Directory, number: int, rows: int, nbytes: int, version: int | None
    ) -> Self:
        """Creates a file without pieces.

        If a call that failed has left a file without pieces, this file is overwritten.

        Args:
            directory: The directory of the buffer.
            number: Number of the reservation.
            rows: Number of reserved items.
            nbytes: Number of bytes reserved in the byte ring, or 0.
            version: Version of the policy that generates the items, or None.

        Raises:
            CorruptBufferError: The file exists and contains pieces.
        """
        directory.make(layout.PARTIALS)
        partial = cls(directory, Lock(), number)
        try:
            partial._lock.hold(
                directory, _name(number), timeout=_PATIENCE_S, purpose="lists unfinished rollouts"
            )
            _core.reached("partial.made")
            found = partial.summarize()
            if found is not None and found.pieces:
                raise CorruptBufferError(
                    f"{partial._where}: the file already exists, although this reservation is new;"
                    " remove the file, or continue its rollout with resume()",
                    path=str(partial._where),
                )
            given = _NO_VERSION if version is None else version
            head = _HEAD.pack(
                *(_MAGIC, number, rows, nbytes, given, os.getpid(), time.time_ns(), 0, 0)
            )[:-8]
            partial._truncate(0)
            partial._write(head + struct.pack("<II", _core.crc32c(head), 0), 0)
        except BaseException:
            partial.close()
            raise
        return partial

    @classmethod
    def take(cls, directory: Directory, number: int) -> Self | None:
        """Takes over the file of a process that has died or closed the file.

        Returns:
            The file, or None if it does not exist or is in use.

        Raises:
            CorruptBufferError: The number is out of the range of reservation numbers.
        """
        _require_number(directory, number)
        lock = Lock()
        try:
            lock.hold(
                directory,
                _name(number),
                timeout=_PATIENCE_S,
                purpose="continues this rollout",
                make=False,
            )
        except (AttachTimeout, FileNotFoundError):
            return None
        return cls(directory, lock, number)

    def append(self, body: bytes | memoryview, items: int) -> None:
        """Appends a piece to the file.

        If the process is killed after this method has returned, the piece is not lost.

        Args:
            body: The encoded items.
            items: Number of items in the piece.
        """
        at = self.cut() if self._end is None else self._end
        self._end = None  # unknown until the piece is complete
        front = struct.pack("<QI", len(body), items)
        crc = _core.crc32c(body, _core.crc32c(front))
        self._write(front + struct.pack("<I", crc) + bytes(body), at)

    def summarize(self) -> Partial | None:
        """Reads the header and counts the pieces. Returns None if there is no valid header."""
        return _summarize(self._lock.fd, self.number, self._where)

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yields the number of items and the body of each piece.

        Stops before the first incomplete piece.
        """
        for items, size, at in _pieces(self._lock.fd, self._where):
            with explain_errors(self._where):
                try:
                    body = read_at(self._lock.fd, size, at)
                except MemoryError:
                    raise _too_large(self._where, size) from None
            yield items, body

    def cut(self) -> int:
        """Truncates the file after the last complete piece, and returns its new size in bytes.

        This removes the bytes of a write that was interrupted.
        """
        ends = [at + size for _, size, at in _pieces(self._lock.fd, self._where)]
        return self._truncate(ends[-1] if ends else _HEAD.size)

    def remove(self) -> None:
        """Removes the file. Its lock is held until `close` is called."""
        self._directory.unlink(_name(self.number))
        _core.reached("partial.removed")

    def close(self) -> None:
        """Unlocks the file, so that another process can continue the rollout. Idempotent."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _truncate(self, end: int) -> int:
        """Truncates the file to ``end`` bytes and returns ``end``."""
        with explain_errors(self._where):
            os.ftruncate(self._lock.fd, end)
        _core.reached("partial.cut")
        self._end = end
        return end

    def _write(self, data: bytes, at: int) -> None:
        """Writes data at the offset ``at``. The end of the data becomes the end of the pieces."""
        rest, end = memoryview(data), at + len(data)
        with explain_errors(self._where, needed=len(data)):
            while rest:
                rest = rest[os.pwrite(self._lock.fd, rest, end - len(rest)) :]
                _core.reached("partial.written")
        self._end = end


def numbers(directory: Directory) -> list[int]:
    """Returns the reservation numbers of all files in a buffer's directory."""
    if not directory.exists(layout.PARTIALS):
        return []
    names = directory.listdir(layout.PARTIALS)
    return sorted(int(name) for name in names if is_number(name))


def orphans(directory: Directory) -> list[int]:
    """Returns the reservation numbers of all files that no process has locked.

    Damaged files are included.
    """
    return [number for number in numbers(directory) if not _is_held(directory, number)]


def read_partial(directory: Directory, number: int) -> Partial | None:
    """Describes the rollout in a file that no process has locked. Does not lock the file.

    Returns:
        The description, or None if the file does not exist or has no valid header.

    Raises:
        CorruptBufferError: The file cannot belong to a reservation of this buffer.
        UnsafePathError: The file is not a regular file of this user.
    """
    _require_number(directory, number)
    with suppress(FileNotFoundError), directory.open_file(_name(number), writable=False) as file:
        return _summarize(file.fd, number, directory.path / _name(number))
    return None


def require_possible(directory: Directory, partial: Partial, items: int, nbytes: int) -> None:
    """Raises CorruptBufferError if a rollout has reserved more space than the buffer has.

    Args:
        directory: The directory of the buffer.
        partial: The description of the rollout.
        items: Number of items that the buffer can contain.
        nbytes: Size of the byte ring in bytes, or 0.
    """
    for what, reserved, most in (
        ("items", partial.reserved, items),
        ("bytes", partial.nbytes, nbytes),
    ):
        if reserved > most:
            raise _impossible(
                directory.path / _name(partial.id),
                f"{reserved:,} {what} are reserved, but the buffer has room for only {most:,}",
            )


def _is_held(directory: Directory, number: int) -> bool:
    """True if a process has locked the file of this reservation number."""
    try:
        return not is_free(directory, _name(number))
    except UnsafePathError:
        return False


def _name(number: int) -> str:
    """Returns the name of a reservation's file in the directory of the buffer."""
    return f"{layout.PARTIALS}/{number}"


def _require_number(directory: Directory, number: int) -> None:
    """Raises CorruptBufferError if no reservation can have this number."""
    if not 0 < number < _NUMBERS:
        raise _impossible(directory.path / _name(number), "no reservation can have this number")


def _impossible(where: Path, problem: str) -> CorruptBufferError:
    """Returns the error for a file that cannot belong to a reservation of this buffer."""
    return CorruptBufferError(
        f"{where}: {problem}; the file is damaged or belongs to another buffer, so remove it",
        path=str(where),
    )


def _too_large(where: Path, size: int) -> CorruptBufferError:
    """Returns the error for a piece that is larger than the memory of the machine."""
    return _impossible(where, f"a piece of {human_size(size)} does not fit into memory")


def _head_of(data: bytes, number: int) -> tuple[int, ...] | None:
    """Decodes the header of a file.

    Returns None if the header is damaged, or has another reservation number than ``number``.
    """
    if len(data) != _HEAD.size:
        return None
    magic, *head, crc, _ = _HEAD.unpack(data)
    is_valid = magic == _MAGIC and crc == _core.crc32c(data[:-8]) and head[0] == number
    return tuple(head) if is_valid else None


def _summarize(fd: int, number: int, where: Path) -> Partial | None:
    """Reads the header of an open file and counts its pieces.

    Returns None if the header is not valid.
    """
    with explain_errors(where):
        head = _head_of(read_at(fd, _HEAD.size, 0), number)
    if head is None:
        return None
    number, rows, nbytes, version, pid, made_ns = head
    if not rows or layout.VERSIONS <= version < _NO_VERSION:
        raise _impossible(where, f"{rows:,} items are reserved for a policy of version {version:,}")
    pieces = [(items, size) for items, size, _ in _pieces(fd, where)]
    return Partial(
        id=number,
        pieces=len(pieces),
        items=sum(items for items, _ in pieces),
        reserved=rows,
        nbytes=nbytes,
        appended_bytes=sum(size for _, size in pieces),
        version=None if version == _NO_VERSION else version,
        pid=pid,
        age_s=max(0.0, (time.time_ns() - made_ns) / 1e9),
    )


def _pieces(fd: int, where: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the number of items, the size and the offset of each piece's body.

    Stops before the first incomplete piece.
    """
    at = _HEAD.size
    with explain_errors(where):
        end = os.fstat(fd).st_size
        while end - at >= _PIECE.size:
            front = read_at(fd, _PIECE.size, at)
            if len(front) < _PIECE.size:  # another process has truncated the file
                return
            size, items, crc = _PIECE.unpack(front)
            at += _PIECE.size
            if size > end - at:
                return
            if size > memory_bytes():  # no process on this machine can have written this piece
                raise _too_large(where, size)
            if _checksum(fd, at, size, front[:12]) != crc:
                return
            yield items, size, at
            at += size


def _checksum(fd: int, at: int, size: int, front: bytes) -> int:
    """Computes the checksum of a piece, whose body is read in chunks.

    If another process has truncated the file, the checksum covers only the remaining bytes.

    Args:
        fd: Descriptor of the file.
        at: Offset of the body.
        size: Size of the body in bytes.
        front: The bytes before the checksum in the piece's header.
    """
    crc, end = _core.crc32c(front), at + size
    while at < end and (chunk := read_at(fd, min(_CHUNK_BYTES, end - at), at)):
        crc = _core.crc32c(chunk, crc)
        at += len(chunk)
    return crc
