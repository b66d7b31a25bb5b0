"""Checks whether a file system is reliable enough for a buffer, and how much free space it has.

A buffer needs a file system with four properties:

* all maps of a file share the same pages;
* a file lock is released when the process that holds it ends;
* space that has been allocated for a file stays available;
* all processes that open a file run on the same machine.

Cluster file systems lack the last property, so they are refused although their maps are coherent:
shmbuffer compares boot ids to prove that a process is dead, and a living process on another node
has another boot id. File systems that are known to be unsafe are listed. All others are accepted,
because new local file systems are more common than new network file systems.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import SpaceError, UnsafeFilesystemError

UNSAFE = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x564C: "NCP",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x786F4256: "VirtualBox shared folders",
    0xBACBACBC: "VMware shared folders",
    0x7C7C6673: "Parallels shared folders",
    0x958458F6: "hugetlbfs",  # local, but file sizes must be multiples of a huge page
}
"""File systems that are refused: the magic number from statfs(2), and the name for messages."""

IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems in memory: the magic number from statfs(2), and the name for messages."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of linux/falloc.h

UNLIMITED = sys.maxsize
"""Free space that is reported for a file system without a size limit, such as ramfs."""


def filesystem_type(fd: int) -> int:
    """Returns the magic number of an open file's file system.

    This function calls fstatfs(2) through ctypes, because `os.statvfs` does not return the number.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # struct statfs has 120 bytes, and its first field is f_type, a long.
    answer = ctypes.create_string_buffer(512)
    if libc.fstatfs(ctypes.c_int(fd), answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


def is_read_only(fd: int) -> bool:
    """True if the file system of an open file is mounted read-only."""
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def require_safe(fd: int, where: Path) -> None:
    """Raises UnsafeFilesystemError if a buffer cannot rely on the file system of an open file."""
    kind = filesystem_type(fd)
    if kind in UNSAFE:
        raise UnsafeFilesystemError(
            f"{where}: this directory is on {UNSAFE[kind]}, where shared maps, file locks or"
            " reserved space are not reliable; choose a directory on a local disk or in /dev/shm",
            path=where,
            filesystem=UNSAFE[kind],
            magic=kind,
        )


def free_bytes(fd: int) -> int:
    """Returns the free space of an open file's file system for unprivileged users, in bytes."""
    return _free_bytes(os.fstatvfs(fd))


def _free_bytes(status: os.statvfs_result) -> int:
    """Returns the free space for unprivileged users in bytes, or `UNLIMITED`."""
    if status.f_blocks == 0:  # ramfs, and tmpfs mounted with size=0
        return UNLIMITED
    return status.f_bavail * status.f_frsize


def free_memory_bytes() -> int:
    """Returns the memory and swap that is available to processes, in bytes."""
    return _memory_bytes("MemAvailable", "SwapFree")


def memory_bytes() -> int:
    """Returns the total memory and swap of the machine, in bytes."""
    return _memory_bytes("MemTotal", "SwapTotal")


def _memory_bytes(*names: str) -> int:
    """Returns the sum of the named entries of /proc/meminfo in bytes.

    Returns `UNLIMITED` if the file cannot be read.
    """
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return UNLIMITED
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return sum(kib[name] for name in names) * 1024


def allocate(fd: int, nbytes: int, *, reserve: bool, free: int) -> None:
    """Extends a new, empty file to ``nbytes`` bytes, and allocates its space if ``reserve`` is set.

    Args:
        fd: Descriptor of the file.
        nbytes: Size of the file in bytes.
        reserve: Whether space is allocated. If not, the file is sparse.
        free: Free bytes of the file system. A larger file is refused before anything is allocated,
            because tmpfs allocates page by page, and the machine may run out of memory before tmpfs
            reports an error.

    Raises:
        OSError: With ENOSPC if there is not enough space, or EIO if the file has the wrong size.
    """
    if not reserve:
        os.ftruncate(fd, nbytes)
    elif nbytes > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif nbytes:  # posix_fallocate fails with EINVAL for 0 bytes
        os.posix_fallocate(fd, 0, nbytes)
    _core.reached("file.sized")
    # Another process may already have written to a new lock file, whose size here is 0.
    if nbytes and (found := os.fstat(fd).st_size) != nbytes:
        raise OSError(errno.EIO, f"the file has {found} bytes after {nbytes} were allocated")


def read_at(fd: int, nbytes: int, at: int) -> bytes:
    """Reads ``nbytes`` bytes at the offset ``at``. The result is shorter only at the end of file.

    A single call of pread(2) may return fewer bytes than requested, so it is repeated.
    """
    data = bytearray()
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), at + len(data))):
        data += more
    return bytes(data)


def data_ranges(fd: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges with data (not holes) between the offsets ``first`` and ``end``.

    Ranges are pairs of a first offset and an end offset, found by lseek(2) with SEEK_DATA. If the
    file system does not report holes, the whole range counts as data.
    """
    while first < end:
        try:
            first = os.lseek(fd, first, os.SEEK_DATA)
        except OSError as error:
            # ENXIO means that no data follow. Any other error means that the file system does not
            # report holes.
            if error.errno != errno.ENXIO:
                yield first, end
            return
        hole = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        if first < hole:
            yield first, hole
        first = hole if first < hole else end


def allocate_part(fd: int, start: int, nbytes: int, *, free: int) -> None:
    """Allocates the space of ``nbytes`` bytes of a sparse file, from the offset ``start``.

    Raises OSError with ENOSPC if this exceeds ``free``, the free bytes of the file system.
    """
    if nbytes > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, start, nbytes)
    _core.reached("file.sized")


def release_part(fd: int, start: int, nbytes: int) -> None:
    """Frees the space of ``nbytes`` bytes of a file, which then read as zeros.

    The space is freed with fallocate(2) and FALLOC_FL_PUNCH_HOLE. Nothing happens if the file
    system does not support this.
    """
    import ctypes

    call = ctypes.CDLL(None).fallocate64
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call(fd, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes)
    _core.reached("space.released")


def space_error(
    what: Path | str,
    needed: int,
    free: int | Callable[[], int] | None,
    *,
    why: int = errno.ENOSPC,
    sparse_allowed: bool = False,
) -> SpaceError:
    """Returns the error for an allocation that does not fit on a disk or into memory.

    Args:
        what: Path of the file, or a description of it that begins with the path.
        needed: Number of bytes to allocate, or 0 if it is unknown or zero, as for a directory.
        free: Number of free bytes, or a function that returns it. None means the free bytes of the
            file system at the path ``what``.
        why: Error number of the system call.
        sparse_allowed: Whether the message suggests ``reserve=False``.
    """
    if needed == 0 and why == errno.EFBIG:
        return too_large(what)
    free = _free_at(Path(what)) if free is None else free if isinstance(free, int) else free()
    match why:
        case errno.EFBIG:
            advice = f"but {_largest_file()}"
        case errno.ENOMEM if (most := _soft(resource.RLIMIT_AS)) is not None:
            advice = f"but this process can map at most {human_size(most)}: raise `ulimit -v`"
        case errno.EDQUOT:
            advice = "but your quota is used up: remove files, or choose another disk"
        case errno.ENOSPC if needed <= free:
            advice = "but the disk is reported as full: check `df -i`, or choose another disk"
        case _:
            advice = "free some space, make the buffer smaller, or choose another directory"
    if sparse_allowed:
        advice += (
            "; reserve=False would create sparse files instead, but a writer is then killed by"
            " SIGBUS if the disk is full"
        )
    if needed:
        problem = f"{human_size(needed)} are needed, and {human_size(free)} are free"
    else:
        problem = f"there is not enough space, and {human_size(free)} are free"
    return SpaceError(
        f"{what}: {problem}; {advice}",
        path=what,
        needed_bytes=needed,
        free_bytes=free,
    )


def _free_at(path: Path) -> int:
    """Returns the free bytes of the file system that contains a path, even if it does not exist."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            return _free_bytes(os.statvfs(folder))
    return 0


def too_large(what: Path | str) -> SpaceError:
    """Returns the error for a file that cannot grow (EFBIG) to a size that is not known here."""
    return SpaceError(
        f"{what}: the file would be too large: {_largest_file()}",
        path=what,
        needed_bytes=0,
        free_bytes=_soft(resource.RLIMIT_FSIZE) or 0,
    )


def _largest_file() -> str:
    """Returns a phrase that explains the limit for the size of a file, and how to raise it."""
    most = _soft(resource.RLIMIT_FSIZE)
    if most is None:
        return "the file system does not support files of that size: choose another disk"
    return f"this process can write files of at most {human_size(most)}: raise `ulimit -f`"


def _soft(limit: int) -> int | None:
    """Returns the soft limit of this process for a resource, or None if it is unlimited."""
    found = resource.getrlimit(limit)[0]
    return None if found == resource.RLIM_INFINITY else found


def human_size(nbytes: int) -> str:
    """Formats a number of bytes, such as `4096 bytes` or `1.5 GiB (1610612736 bytes)`."""
    if nbytes < 2**20:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB ({nbytes} bytes)"
