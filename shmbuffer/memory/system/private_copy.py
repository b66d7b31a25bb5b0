"""Maps files directly, or maps a private copy that the owner of the file cannot change.

If a file is truncated while a process maps it, the process can be killed by SIGBUS. A file that
belongs to another user is therefore read into anonymous memory with pread(2), and this copy is
mapped instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import SpaceError
from shmbuffer.memory.system.filesystem import data_ranges, free_memory_bytes, human_size
from shmbuffer.memory.system.path_checks import wrong_size
from shmbuffer.memory.system.region import Directory

_CHUNK_BYTES = 2**20

Parts = Iterable[tuple[int, int]]
"""Byte ranges of a file: pairs of the first offset and the offset after the last byte."""


def map_file(
    directory: Directory,
    name: str,
    file: _core.Descriptor,
    nbytes: int,
    *,
    writable: bool = True,
    size: int | None = None,
    parts: Parts | None = None,
    dense: bool = False,
    twice: bool = False,
    aligned: bool = False,
    private: bool = False,
    longer: bool = False,
) -> _core.Map:
    """Maps an open file, or a private copy of the file if this process can only read the directory.

    Copies and private maps are always writable, but other processes do not see what is stored in
    them (MAP_PRIVATE of mmap(2)).

    Args:
        directory: The directory that contains the file. It decides whether the file is copied.
        name: Name of the file in the directory, for error messages.
        file: Owner of the file's descriptor.
        nbytes: Length of the map in bytes.
        writable: Whether the map can be written.
        size: Expected size of the file in bytes if it is copied. None means ``nbytes``.
        parts: Byte ranges to copy if the file is copied. If None, copies the whole file.
        dense: Passed to `private_copy`.
        twice: Whether the file is mapped twice in succession, as a ring of bytes needs it.
        aligned: Whether the map is aligned for huge pages.
        private: Maps the file with MAP_PRIVATE.
        longer: Whether ``nbytes`` exceeds the size of the file. A private map cannot be longer than
            its file, so a file with ``private`` is copied in this case.
    """
    if not (directory.copying or (private and longer)):
        options: dict[str, Any] = {"twice": twice, "aligned": aligned, "private": private}
        return _core.Map(file.fd, nbytes, writable or private, **options)
    size, where = nbytes if size is None else size, directory.path / name
    options = {"size": size, "copy_size": nbytes, "parts": parts, "dense": dense}
    with private_copy(file.fd, where, **options) as copy:
        return _core.Map(copy.fd, nbytes, twice=twice, aligned=aligned)


def private_copy(
    fd: int,
    where: Path,
    *,
    size: int,
    copy_size: int,
    parts: Parts | None = None,
    dense: bool = False,
) -> _core.Descriptor:
    """Copies a file into anonymous memory and returns the owner of the copy's descriptor.

    Holes in the file remain holes in the copy, so they take no memory.

    Args:
        fd: Descriptor of the file, which is open for reading.
        where: Path of the file, for error messages.
        size: Minimum size of the file in bytes.
        copy_size: Size of the copy in bytes. Bytes from offset ``size`` on are zero.
        parts: Byte ranges to copy. All other bytes of the copy are zero. If None, copies all bytes.
        dense: If all bytes are copied, whether the memory check also counts the holes. Set it if
            the caller will touch every page of the copy.

    Raises:
        CorruptBufferError: The file is shorter than ``size``, or was truncated during the copy.
        SpaceError: The machine does not have enough free memory for the copy.
    """
    ranges = [
        found
        for first, end in ([(0, size)] if parts is None else parts)
        for found in data_ranges(fd, first, min(end, size))
    ]
    needed, free = sum(end - first for first, end in ranges), free_memory_bytes()
    if dense and parts is None:
        needed = copy_size
    if needed > free:
        raise SpaceError(
            f"{where}: {human_size(needed)} must be copied into memory, because this process can "
            f"only read the directory, but only {human_size(free)} are free; run it as the owner "
            "of the directory, or on a machine with more memory",
            path=where,
            needed_bytes=needed,
            free_bytes=free,
        )
    copy = _core.Descriptor()
    try:
        copy.take(os.memfd_create, "shmbuffer-copy", os.MFD_CLOEXEC)
        os.ftruncate(copy.fd, copy_size)
        for first, end in ranges:
            while first < end:
                data = os.pread(fd, min(_CHUNK_BYTES, end - first), first)
                if not data:
                    break
                first += os.pwrite(copy.fd, data, first)
        found = os.fstat(fd).st_size
        if found < size:
            raise wrong_size(where, str(size), size, found)
    except BaseException:
        copy.close()
        raise
    return copy
