"""Lists the system resources that a process holds, to compare them before and after a test.

Each resource is a line of text, and duplicates count. Resources that the interpreter keeps until it
ends, such as the helpers of multiprocessing, are not listed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import re
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

IN_MEMORY = "/dev/shm"

# struct procmap_query (linux/fs.h): size, flags, address; then start, end, flags, page, offset,
# inode and device of the result; sizes and addresses of its name and of its build id.
_QUERY = struct.Struct("=9Q4I2Q")
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_SHARED_FILE_AT_OR_BEHIND = 0x08 | 0x10 | 0x20
_END = 4
# The equivalent line in text: "...-... rw-s offset device inode path".
_SHARED_MAP = re.compile(rb"s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9][0-9]* +(.*)\n")
# Memory that multiprocessing keeps and shares out, for example to a barrier, and files of installed
# packages, such as fonts.
_KEPT_FILES = re.compile(rf"^{IN_MEMORY}/pym-|/site-packages/")
_KEPT_MAPS = re.compile(r"/gconv-modules\.cache$")
# Directories that multiprocessing and torch make once for each process.
_KEPT_NAMES = ("pymp-", "torchinductor_")
# Files with which `tempfile.gettempdir` checks that it can write to a directory. It removes them
# immediately, unless the process is killed. Its other names begin with "tmp".
_PROBE = re.compile(r"[a-z0-9_]{8}")

#: Longest time for a thread to end; there is no wait if no thread is left.
PATIENCE_S = 30.0


def held() -> Counter[str]:
    """Returns open files, threads, file locks and names of files. Takes 0.1 ms."""
    return Counter(line for kind in (_files, _threads, _names) for line in kind())


def open_files_of_buffers() -> Counter[str]:
    """Returns the open files below `.shmbuffer`, for a test in which other files stay open."""
    return Counter(line for line in _files() if "/.shmbuffer/" in line)


def locked_files() -> Iterator[tuple[str, str]]:
    """Yields the locked files that are open here, each with its lock: type, inode, bytes.

    The kernel reports the locks of a descriptor immediately. Reading /proc/locks would wait for all
    processors, which takes several milliseconds, longer than most tests.
    """
    for descriptor, target in _open():
        for lock in _locks(descriptor, target):
            yield target, lock


def mapped() -> Counter[str]:
    """Returns the mapped files. Maps of a buffer stay until Python collects its garbage."""
    return Counter(_maps())


def gained(before: Counter[str], look: Callable[[], Counter[str]] = held) -> list[str]:
    """Returns the resources that were added since ``before``, after collecting garbage."""
    for young in (0, 1):  # most garbage of a test is young, and a full collection takes far longer
        if not look() - before:
            return []
        gc.collect(young)
    deadline = time.monotonic() + PATIENCE_S
    while more := look() - before:
        gc.collect()
        threads = [one for one in threading.enumerate() if f"thread: {one.name}" in more]
        if not threads or time.monotonic() > deadline:
            break
        # A pool that is no longer referenced keeps objects alive while it works. Then it becomes
        # garbage itself, and its threads end.
        threads[0].join(0.05)
    return sorted((look() - before).elements())


def _files() -> Iterator[str]:
    """Yields open files and the locks on them."""
    kept = set(map(str, _pipes_of_multiprocessing()))
    for descriptor, target in _open():
        if descriptor not in kept and not _KEPT_FILES.search(target):
            yield f"open: {target}"
        for lock in _locks(descriptor, target):
            yield f"locked: {lock}"


def _open() -> Iterator[tuple[str, str]]:
    """Yields each descriptor and its target."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            yield descriptor, os.readlink(f"/proc/self/fd/{descriptor}")


def _locks(descriptor: str, target: str) -> Iterator[str]:
    if target.startswith("/"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            for line in _read(f"/proc/self/fdinfo/{descriptor}").splitlines():
                if line.startswith(b"lock:"):
                    _, _, *what, _, inode, start, end = line.decode().split()
                    yield f"{' '.join(what)} {inode} {start}-{end}"


def _pipes_of_multiprocessing() -> Iterator[int | None]:
    """Yields the descriptors of the helpers that multiprocessing starts on demand."""
    if "multiprocessing.resource_tracker" in sys.modules:
        yield sys.modules["multiprocessing.resource_tracker"]._resource_tracker._fd
    if "multiprocessing.forkserver" in sys.modules:
        yield sys.modules["multiprocessing.forkserver"]._forkserver._forkserver_alive_fd


def _maps() -> Iterator[str]:
    for name in map(os.fsdecode, _shared_maps()):
        if not _KEPT_FILES.search(name) and not _KEPT_MAPS.search(name.removesuffix(" (deleted)")):
            yield f"mapped: {name}"


def _shared_maps() -> list[bytes]:
    """Returns the names of the files, using a query (Linux 6.11) that skips all other maps."""
    name = ctypes.create_string_buffer(4096)
    found: list[bytes] = []
    at = 0
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        while True:
            asked = (_QUERY.size, _SHARED_FILE_AT_OR_BEHIND, at, *[0] * 8, len(name), 0)
            query = bytearray(_QUERY.pack(*asked, ctypes.addressof(name), 0))
            try:
                fcntl.ioctl(maps, _PROCMAP_QUERY, query)
            except FileNotFoundError:
                return found
            except OSError as error:
                if error.errno not in (errno.ENOTTY, errno.ENOSYS):  # an older kernel, qemu
                    raise
                return _SHARED_MAP.findall(maps.readall())
            at = _QUERY.unpack(query)[_END]
            found.append(name.value)


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread: {thread.name}"


def _names() -> Iterator[str]:
    """Yields the names in this process's temporary directory and in memory."""
    folder = tempfile.gettempdir()
    for name in os.listdir(folder):
        if name.startswith(_KEPT_NAMES) or _PROBE.fullmatch(name):
            continue
        if os.path.join(folder, name) not in _owned():
            yield f"left in the directory for temporary files: {name}"
    if os.path.isdir(IN_MEMORY):
        pid = str(os.getpid())
        mine = re.compile(rf"(?<![0-9]){pid}(?![0-9])")
        for name in os.listdir(IN_MEMORY):
            # a regular expression takes longer, and there are hundreds of names
            if pid in name and mine.search(name):
                yield f"left in {IN_MEMORY}: {name}"


def _owned() -> set[str]:
    """Returns the directories that this process removes at exit."""
    cleanup = sys.modules.get("shmbuffer.memory.directory.cleanup")
    return {str(one.path) for one in cleanup._owned} if cleanup else set()


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
