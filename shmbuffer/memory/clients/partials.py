"""The pieces of an unfinished rollout, in a separate file beside the ring.

    .shmbuffer/partials/<number of the reservation>

     created ──append──▶ ... ──committed (the reservation is DONE)──▶ removed ──▶ DONE is cleared
       └──its process dies: the kernel frees the lock──▶ found by others, one of them continues it

``docs/format/directory.md`` describes the bytes of the file.

Always true
  1. The process that holds the file has locked it (flock), and no other process writes it. A free
     lock proves that the holder is gone.
  2. A piece is complete, or it and all later bytes are ignored. A process that continues the
     rollout truncates the file there first.
  3. Committed items are not committed again. The reservation becomes DONE in the critical section
     in which its items appear, and stays DONE until the file is removed.
If a process dies here: the file remains for other processes. A file without a head belongs to no
rollout, and is removed. A power cut may lose pieces, like items that no `flush` covered.
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
_PATIENCE_S = 0.2  # another process that lists the directory tests the lock for some microseconds
_CHUNK_BYTES = 2**20  # of a piece, read at once for its checksum
_NO_VERSION = 2**64 - 1
_NUMBERS = 2**64 // RESERVATIONS  # a number and its place in the ledger have 64 bits together


@dataclass(frozen=True)
class Partial:
    """The pieces of a rollout whose process died or left before they were committed.

    `ReplayBuffer.resume` continues it, in one process.
    """

    id: int  # of the reservation
    pieces: int
    items: int  # in all pieces
    reserved: int  # items that were reserved for the rollout
    nbytes: int  # reserved in the byte ring; 0 if unknown
    appended_bytes: int  # of all pieces
    version: int | None  # of the policy, from the reservation
    pid: int  # of the process that made the reservation
    age_s: float  # seconds since the reservation


class PartialFile:
    """The file of one reservation, locked by this process. Created by `make` or `take`."""

    def __init__(self, directory: Directory, lock: Lock, number: int) -> None:
        self._directory = directory
        self._lock = lock
        self._end: int | None = None  # end of the last complete piece; None if unknown, see `cut`
        self._where = directory.path / _name(number)
        self.number = number

    @classmethod
    def make(
        cls, directory: Directory, number: int, rows: int, nbytes: int, version: int | None
    ) -> Self:
        """Creates a file without pieces, or replaces one without pieces of a call that failed."""
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
                    f"{partial._where}: already exists, although no reservation has had this "
                    "number; remove it, or continue it with resume()",
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
        """Takes over the file of a process that is gone; None if it is missing or in use.

        Raises:
            CorruptBufferError: No reservation can have this number.
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
        """Adds a piece. It survives if the process is killed after this method has returned."""
        at = self.cut() if self._end is None else self._end
        self._end = None  # until the piece is complete
        front = struct.pack("<QI", len(body), items)
        crc = _core.crc32c(body, _core.crc32c(front))
        self._write(front + struct.pack("<I", crc) + bytes(body), at)

    def summarize(self) -> Partial | None:
        """Returns the head and the number of pieces; None if there is no head."""
        return _summarize(self._lock.fd, self.number, self._where)

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yields (items, body) of each piece, up to the first incomplete one."""
        for items, size, at in _pieces(self._lock.fd, self._where):
            with explain_errors(self._where):
                try:
                    body = read_at(self._lock.fd, size, at)
                except MemoryError:
                    raise _too_large(self._where, size) from None
            yield items, body

    def cut(self) -> int:
        """Removes bytes of an interrupted write after the last complete piece; returns its end."""
        ends = [at + size for _, size, at in _pieces(self._lock.fd, self._where)]
        return self._truncate(ends[-1] if ends else _HEAD.size)

    def remove(self) -> None:
        """Removes the file, which remains locked until `close`."""
        self._directory.unlink(_name(self.number))
        _core.reached("partial.removed")

    def close(self) -> None:
        """Unlocks the file, so that other processes may continue the rollout. Idempotent."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _truncate(self, end: int) -> int:
        """Truncates the file and returns its new end."""
        with explain_errors(self._where):
            os.ftruncate(self._lock.fd, end)
        _core.reached("partial.cut")
        self._end = end
        return end

    def _write(self, data: bytes, at: int) -> None:
        """Writes data at an offset, and sets the end of the file after it."""
        rest, end = memoryview(data), at + len(data)
        with explain_errors(self._where, needed=len(data)):
            while rest:
                rest = rest[os.pwrite(self._lock.fd, rest, end - len(rest)) :]
                _core.reached("partial.written")
        self._end = end


def numbers(directory: Directory) -> list[int]:
    """Returns the numbers of all files."""
    if not directory.exists(layout.PARTIALS):
        return []
    names = directory.listdir(layout.PARTIALS)
    return sorted(int(name) for name in names if is_number(name))


def orphans(directory: Directory) -> list[int]:
    """Returns the numbers of files that no process holds, including damaged ones."""
    return [number for number in numbers(directory) if not _is_held(directory, number)]


def read_partial(directory: Directory, number: int) -> Partial | None:
    """Reads a file that no process holds, without taking it; None if it is missing or has no head.

    Raises:
        CorruptBufferError: The file cannot belong to a reservation of this buffer.
        UnsafePathError: The file is not a regular file of this user.
    """
    _require_number(directory, number)
    with suppress(FileNotFoundError), directory.open_file(_name(number), writable=False) as file:
        return _summarize(file.fd, number, directory.path / _name(number))
    return None


def require_possible(directory: Directory, partial: Partial, items: int, nbytes: int) -> None:
    """Raises CorruptBufferError if more is reserved than a buffer of this size can contain."""
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
    """True if a process holds the file."""
    try:
        return not is_free(directory, _name(number))
    except UnsafePathError:
        return False


def _name(number: int) -> str:
    return f"{layout.PARTIALS}/{number}"


def _require_number(directory: Directory, number: int) -> None:
    if not 0 < number < _NUMBERS:
        raise _impossible(directory.path / _name(number), "no reservation can have this number")


def _impossible(where: Path, problem: str) -> CorruptBufferError:
    return CorruptBufferError(
        f"{where}: {problem}; the file is damaged or belongs to another buffer, so remove it",
        path=str(where),
    )


def _too_large(where: Path, size: int) -> CorruptBufferError:
    return _impossible(where, f"a piece of {human_size(size)} does not fit into the memory")


def _head_of(data: bytes, number: int) -> tuple[int, ...] | None:
    """Decodes the head of a file; None if it is damaged or of another reservation."""
    if len(data) != _HEAD.size:
        return None
    magic, *head, crc, _ = _HEAD.unpack(data)
    is_valid = magic == _MAGIC and crc == _core.crc32c(data[:-8]) and head[0] == number
    return tuple(head) if is_valid else None


def _summarize(fd: int, number: int, where: Path) -> Partial | None:
    """Reads the head of a file and counts its pieces; None if there is no head."""
    with explain_errors(where):
        head = _head_of(read_at(fd, _HEAD.size, 0), number)
    if head is None:
        return None
    number, rows, nbytes, version, pid, made_ns = head
    if not rows or layout.VERSIONS <= version < _NO_VERSION:
        raise _impossible(where, f"{rows:,} items are reserved, of version {version:,}")
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
    """Yields (items, size, start) of each piece, up to the first incomplete one."""
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
            if size > memory_bytes():  # no process here could have had it in memory
                raise _too_large(where, size)
            if _checksum(fd, at, size, front[:12]) != crc:
                return
            yield items, size, at
            at += size


def _checksum(fd: int, at: int, size: int, front: bytes) -> int:
    """Computes the checksum of a piece in parts; stops early if the file was truncated."""
    crc, end = _core.crc32c(front), at + size
    while at < end and (chunk := read_at(fd, min(_CHUNK_BYTES, end - at), at)):
        crc = _core.crc32c(chunk, crc)
        at += len(chunk)
    return crc
