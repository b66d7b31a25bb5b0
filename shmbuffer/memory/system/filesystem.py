"""The file system below a buffer: whether it can be relied on, and how much room it has.

A buffer needs four things of it: maps of one file share their pages, a file lock ends with its
holder, room that was reserved stays reserved, and every process that opens the file runs on this
machine. The last is why cluster file systems are refused although their maps are coherent: the rule
of death compares boot ids, and another node has another one while it lives. What is refused is
listed; what the list does not know is accepted: new local file systems come more often than new
networks.
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
    0x958458F6: "hugetlbfs",  # local, but the size of a file is a number of huge pages there
}
"""Magic numbers of statfs(2), with the names to show."""

IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems without a disk, in the same way."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of linux/falloc.h

UNLIMITED = sys.maxsize
"""The room of a file system that has no limit, such as ramfs."""


def filesystem_type(fd: int) -> int:
    """The magic number of an open file's file system, by ctypes: `os.statvfs` has no type."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(512)  # struct statfs: 120 bytes, f_type is its first long
    if libc.fstatfs(ctypes.c_int(fd), answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


def is_read_only(fd: int) -> bool:
    """True if the file system of an open file is mounted read-only."""
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def shut(fd: int) -> None:
    """Close a descriptor, errors ignored: the number is free, and what counts was synced before."""
    with suppress(OSError):
        os.close(fd)


def require_safe(fd: int, where: Path) -> None:
    """Raise UnsafeFilesystemError if a buffer cannot rely on the file system of an open file."""
    kind = filesystem_type(fd)
    if kind in UNSAFE:
        raise UnsafeFilesystemError(
            f"{where}: lies on {UNSAFE[kind]}, where shared maps, file locks or reserved space"
            " cannot be relied on; choose a directory on a local disk or in /dev/shm",
            path=where,
            filesystem=UNSAFE[kind],
            magic=kind,
        )


def free_bytes(fd: int) -> int:
    """How much an unprivileged process may still write to the file system of an open file."""
    return _free_bytes(os.fstatvfs(fd))


def _free_bytes(room: os.statvfs_result) -> int:
    if room.f_blocks == 0:  # ramfs, and tmpfs mounted with size=0
        return UNLIMITED
    return room.f_bavail * room.f_frsize


def free_memory_bytes() -> int:
    """How much memory the kernel says it can still give to processes, swap included."""
    return _memory_bytes("MemAvailable", "SwapFree")


def memory_bytes() -> int:
    """How much memory and swap the machine has. A process has no more."""
    return _memory_bytes("MemTotal", "SwapTotal")


def _memory_bytes(*names: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return UNLIMITED
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return sum(kib[name] for name in names) * 1024


def allocate(fd: int, nbytes: int, *, reserve: bool, free: int) -> None:
    """Give a new, empty file its size, and with `reserve` its room.

    Compares with `free` first: tmpfs takes page after page before it sees that one is missing, and
    the machine may be out of memory before that.
    """
    if not reserve:
        os.ftruncate(fd, nbytes)
    elif nbytes > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif nbytes:  # posix_fallocate refuses 0
        os.posix_fallocate(fd, 0, nbytes)
    _core.reached("file.sized")
    if nbytes and (found := os.fstat(fd).st_size) != nbytes:  # a lock may have been signed already
        raise OSError(errno.EIO, f"the file has {found} bytes after {nbytes} were allocated")


def read_at(fd: int, nbytes: int, at: int) -> bytes:
    """So many bytes of a file, or up to its end: one pread may return fewer."""
    data = bytearray()
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), at + len(data))):
        data += more
    return bytes(data)


def data_ranges(fd: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields where a part of a file has data, as first and end (lseek(2), SEEK_DATA).

    If the file system knows of no holes, all of the part is data.
    """
    while first < end:
        try:
            first = os.lseek(fd, first, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # it knows of no holes; else there are no more data
                yield first, end
            return
        hole = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        if first < hole:
            yield first, hole
        first = hole if first < hole else end


def allocate_part(fd: int, start: int, nbytes: int, *, free: int) -> None:
    """Give a part of a sparse file its room."""
    if nbytes > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, start, nbytes)
    _core.reached("file.sized")


def release_part(fd: int, start: int, nbytes: int) -> None:
    """Give the room of a part of a file back; it reads as zeros.

    Does nothing where the file system cannot do so (fallocate(2), FALLOC_FL_PUNCH_HOLE).
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
    """The error for something that does not fit, with the two numbers that matter.

    Args:
        what: that does not fit: a path, or what is to be made at one.
        needed: its bytes; 0: unknown, or none, as of a directory.
        free: how many bytes there are; None: those of the file system at the path ``what``.
        why: the error of the system.
        sparse_allowed: ``reserve=False`` would help.
    """
    if needed == 0 and why == errno.EFBIG:
        return too_large(what)
    free = _free_at(Path(what)) if free is None else free if isinstance(free, int) else free()
    match why:
        case errno.EFBIG:
            advice = f"but {_largest_file()}"
        case errno.ENOMEM if (most := _soft(resource.RLIMIT_AS)) is not None:
            advice = f"but this process may map {human_size(most)} in all: raise `ulimit -v`"
        case errno.EDQUOT:
            advice = "but your quota is used up: remove something, or choose another disk"
        case errno.ENOSPC if needed <= free:
            advice = "but the disk is reported as full: check `df -i`, or choose another one"
        case _:
            advice = "make room, make the buffer smaller, or choose another place"
    if sparse_allowed:
        advice += "; reserve=False makes sparse files, whose writers die of SIGBUS on a full disk"
    if needed:
        problem = f"needs {human_size(needed)}, {human_size(free)} are free"
    else:
        problem = f"does not fit there, and {human_size(free)} are free"
    return SpaceError(
        f"{what}: {problem}; {advice}",
        path=what,
        needed_bytes=needed,
        free_bytes=free,
    )


def _free_at(path: Path) -> int:
    """`free_bytes`, of the file system that a path would lie on."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            return _free_bytes(os.statvfs(folder))
    return 0


def too_large(what: Path | str) -> SpaceError:
    """The error for a file that may not grow (EFBIG), where nobody knows how far it was to."""
    return SpaceError(
        f"{what}: a file there would be too large: {_largest_file()}",
        path=what,
        needed_bytes=0,
        free_bytes=_soft(resource.RLIMIT_FSIZE) or 0,
    )


def _largest_file() -> str:
    """Why no file may be larger, and what to do about it."""
    most = _soft(resource.RLIMIT_FSIZE)
    if most is None:
        return "the file system takes no file of that size: choose another disk"
    return f"this process may write files of {human_size(most)} at most: raise `ulimit -f`"


def _soft(limit: int) -> int | None:
    """A limit of this process; None: there is none."""
    found = resource.getrlimit(limit)[0]
    return None if found == resource.RLIM_INFINITY else found


def human_size(nbytes: int) -> str:
    """`4096 bytes`, or `1.5 GiB (1610612736 bytes)`."""
    if nbytes < 2**20:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB ({nbytes} bytes)"
