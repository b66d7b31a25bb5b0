"""Maps files directly, or as a private copy that the owner of the file cannot change.

If another user truncates a file, a process that maps it is killed by SIGBUS. Files that another
user may change are therefore read with pread(2) into anonymous memory, which is then mapped.
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
"""Parts of a file, as pairs of first byte and end."""


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
    """Maps an open file of a directory, or a private copy if the directory may only be read.

    Copies and ``private`` maps are always writable, and stores into them stay in this process
    (MAP_PRIVATE of mmap(2)). A copy contains only ``parts``, if they are given. If the map is
    ``longer`` than the file, the file must have ``size`` bytes. Private maps cannot be longer than
    their file, so a copy is mapped in that case. ``dense`` is described in `private_copy`.
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
    """Copies a file into anonymous memory and returns the owner of its descriptor.

    Holes of the file remain holes, which take no memory.

    Args:
        fd: The file, open for reading.
        where: Its path, for errors.
        size: The bytes that the file must have.
        copy_size: The size of the copy in bytes. It is zero beyond ``size``.
        parts: Copies only these parts. The rest of the copy is zero.
        dense: Counts the memory of holes too if there are no ``parts``, because all of the copy
            will be read.

    Raises:
        CorruptBufferError: The file is shorter than ``size``, or was truncated during the copy.
        SpaceError: The copy is larger than the free memory.
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
            f"{where}: {human_size(needed)} must be copied into memory, because this process may "
            f"only read the directory, but only {human_size(free)} are free; run this as the owner "
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
