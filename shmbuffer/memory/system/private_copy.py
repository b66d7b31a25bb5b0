"""Maps of files: shared, private, or of a private copy that the file's owner cannot reach.

A shared map of a file ends the process (SIGBUS) if another user cuts the file off. So what another
user may change is read with pread(2) into memory without a name, and that memory is mapped.
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
"""Parts of a file, as first byte and end."""


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
    """Maps an open file of a directory, or a private copy of it if nothing can be written there.

    A copy is always writable, and so is a ``private`` map: what is stored into it stays in this
    process (MAP_PRIVATE of mmap(2)). A copy has the ``parts`` that are going to be read. The file
    has to have ``size`` bytes, if the map is ``longer``, which a private map cannot be: it is a
    copy, too. ``dense``: see `private_copy`.
    """
    if not (directory.copying or (private and longer)):
        options: dict[str, Any] = {"twice": twice, "aligned": aligned, "private": private}
        return _core.Map(file.fd, nbytes, writable or private, **options)
    size, where = nbytes if size is None else size, directory.path / name
    options = {"size": size, "room": nbytes, "parts": parts, "dense": dense}
    with private_copy(file.fd, where, **options) as copy:
        return _core.Map(copy.fd, nbytes, twice=twice, aligned=aligned)


def private_copy(
    fd: int,
    where: Path,
    *,
    size: int,
    room: int,
    parts: Parts | None = None,
    dense: bool = False,
) -> _core.Descriptor:
    """Copies a file into memory without a name, and returns what owns that memory.

    Holes of the file stay holes, which take no memory.

    Args:
        fd: the file, open for reading.
        where: its path, for errors.
        size: bytes that the file has to have.
        room: bytes of the copy, which is zeros behind ``size``.
        parts: copy only these parts. The rest of the copy is zeros.
        dense: all of the copy is going to be read, holes too, if there are no ``parts``. That takes
            memory for the holes as well.

    Raises:
        CorruptBufferError: the file is shorter, or became shorter meanwhile.
        SpaceError: the copy is larger than the free memory.
    """
    ranges = [
        found
        for first, end in ([(0, size)] if parts is None else parts)
        for found in data_ranges(fd, first, min(end, size))
    ]
    needed, free = sum(end - first for first, end in ranges), free_memory_bytes()
    if dense and parts is None:
        needed = room
    if needed > free:
        raise SpaceError(
            f"{where}: {human_size(needed)} have to be copied into memory, because this process "
            f"may only read there, but only {human_size(free)} are free; do this as the owner of "
            "the directory, or on a machine with more memory",
            path=where,
            needed_bytes=needed,
            free_bytes=free,
        )
    copy = _core.Descriptor()
    try:
        copy.take(os.memfd_create, "shmbuffer-copy", os.MFD_CLOEXEC)
        os.ftruncate(copy.fd, room)
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
