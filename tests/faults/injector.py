"""Builds, loads and controls the preloaded library (interposer.c), which makes calls fail.

A process that was started with `preloaded_environment()` counts its libc calls on watched files
while an injector is armed, and makes the n-th of them fail. A first run without a fault finds the
calls. A fault therefore consists of the number of a call and an errno that the call may return.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "interposer.c"
#: For a read or a write: half of the bytes are transferred, without an error.
SHORT = -1
_LIBRARY = "SHMBUFFER_FAULTS_LIBRARY"


@dataclass(frozen=True)
class Call:
    """A call of libc on a watched file."""

    kind: str
    path: str


@dataclass(frozen=True)
class Fault:
    """The call ``at`` fails with ``error``, and if ``sticky``, later calls that may return it."""

    at: int
    error: int
    sticky: bool

    def __str__(self) -> str:
        how = "from then on" if self.sticky else "once"
        return f"call {self.at}: {name_of(self.error)} {how}"


_BROKEN = (errno.EIO,)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES)

#: Errors that each kind of call may return, by its manual page and by experience on Linux.
PLAUSIBLE: dict[str, tuple[int, ...]] = {
    "open": (*_NO_DESCRIPTOR, *_BROKEN, errno.ENOMEM, errno.EACCES, errno.ESTALE, errno.EINTR),
    "open_rw": (*_NO_DESCRIPTOR, *_BROKEN, *_NOT_ALLOWED, errno.ENOMEM, errno.ESTALE, errno.EINTR),
    "create": (*_NO_ROOM, *_NO_DESCRIPTOR, *_BROKEN, *_NOT_ALLOWED, errno.ENOMEM, errno.EINTR),
    "close": (*_BROKEN, *_NO_ROOM, errno.EINTR),
    "stat": (*_BROKEN, errno.ENOMEM, errno.EACCES, errno.ESTALE),
    "fstat": (*_BROKEN, errno.ENOMEM, errno.ESTALE),
    "access": (*_BROKEN, errno.EACCES, errno.ENOMEM),
    "statfs": (*_BROKEN, errno.ENOSYS, errno.ENOMEM, errno.EINTR),
    "statvfs": (*_BROKEN, errno.ENOSYS, errno.ENOMEM, errno.EINTR),
    "mkdir": (*_NO_ROOM, *_BROKEN, *_NOT_ALLOWED, errno.ENOMEM),
    "rmdir": (*_BROKEN, *_NOT_ALLOWED, errno.EBUSY, errno.ENOMEM),
    "unlink": (*_BROKEN, *_NOT_ALLOWED, errno.EPERM, errno.EBUSY, errno.ENOMEM),
    "rename": (*_NO_ROOM, *_BROKEN, *_NOT_ALLOWED, errno.EBUSY, errno.ENOMEM),
    "exchange": (errno.ENOSYS, errno.EINVAL, *_NO_ROOM, *_BROKEN, *_NOT_ALLOWED),
    "link": (*_NO_ROOM, *_BROKEN, *_NOT_ALLOWED, errno.EPERM),
    "chmod": (*_BROKEN, errno.EROFS, errno.EPERM),
    "flock": (errno.ENOLCK, *_BROKEN, errno.ENOSYS, errno.EAGAIN, errno.EINTR),
    "unlock": (*_BROKEN, errno.ENOLCK),
    "dup": (errno.EMFILE,),
    "fallocate": (*_NO_ROOM, errno.EFBIG, *_BROKEN, errno.EOPNOTSUPP, errno.EINTR),
    "truncate": (*_NO_ROOM, errno.EFBIG, *_BROKEN, errno.EROFS, errno.EINTR),
    "mmap": (errno.ENOMEM, errno.ENFILE, errno.EAGAIN, errno.EACCES, errno.ENODEV),
    "msync": (*_BROKEN, errno.ENOMEM, errno.EBUSY),
    "fsync": (*_BROKEN, *_NO_ROOM, errno.EROFS, errno.EINTR),
    "opendir": (*_NO_DESCRIPTOR, errno.ENOMEM, errno.EACCES),
    "readdir": (*_BROKEN, errno.ESTALE),
    "read": (*_BROKEN, errno.ESTALE, errno.EINTR, SHORT),
    "write": (*_NO_ROOM, *_BROKEN, errno.EFBIG, errno.EINTR, SHORT),
    "readlink": (*_BROKEN, errno.ENOMEM, errno.EACCES),
    "memfd": (*_NO_DESCRIPTOR, errno.ENOMEM, errno.ENOSYS),
    "malloc": (errno.ENOMEM,),
}
#: Errors for files in /proc. They have no disk, but descriptors and memory may run out, and access
#: may be denied.
_PLAUSIBLE_IN_PROC = (*_NO_DESCRIPTOR, errno.ENOMEM, errno.EACCES, errno.EINTR, SHORT)
#: Errors that only delay a call: Python repeats calls after EINTR, and processes wait for locks.
_PASSES = (errno.EINTR, errno.EAGAIN)


def name_of(error: int) -> str:
    return "SHORT" if error == SHORT else errno.errorcode[error]


def errors_of(call: Call) -> tuple[int, ...]:
    """Returns the errors with which this call may fail."""
    possible = PLAUSIBLE[call.kind]
    if call.path.startswith("/proc/"):
        return tuple(error for error in possible if error in _PLAUSIBLE_IN_PROC)
    return possible


def faults_at(at: int, call: Call) -> list[Fault]:
    """Returns every fault that can begin with this call."""
    errors = errors_of(call)
    once = [Fault(at, error, sticky=False) for error in errors]
    return once + [Fault(at, error, sticky=True) for error in errors if error not in _PASSES]


class Injector:
    """The preloaded library, in a process that was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[_LIBRARY])
        self._library.faults_watch.argtypes = (ctypes.c_char_p,)
        self._library.faults_arm.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_ulonglong)
        self._library.faults_disarm.restype = ctypes.c_long
        self._library.faults_failed.restype = ctypes.c_long
        self._library.faults_calls.restype = ctypes.POINTER(_Call)
        self._library.faults_kind_name.restype = ctypes.c_char_p
        self._names = []
        while (name := self._library.faults_kind_name(len(self._names))) is not None:
            self._names.append(name.decode())
        if set(self._names) != set(PLAUSIBLE):
            raise RuntimeError("interposer.c and injector.py know different kinds of calls")

    def watch(self, *prefixes: str | Path) -> None:
        """Watches only files whose path begins with one of these prefixes."""
        self._library.faults_watch(None)
        for prefix in prefixes:
            self._library.faults_watch(os.fsencode(prefix))

    @contextmanager
    def armed(self, fault: Fault | None) -> Iterator[None]:
        """Counts calls in the block. One of them fails, or none if there is no fault."""
        at, error, kinds = (-1, 0, 0) if fault is None else (fault.at, fault.error, 0)
        if fault is not None and fault.sticky:
            kinds = sum(
                1 << number for number, name in enumerate(self._names) if error in PLAUSIBLE[name]
            )
        self._library.faults_arm(at, error, kinds)
        try:
            yield
        finally:
            self._seen = self._library.faults_disarm()

    @property
    def calls(self) -> list[Call]:
        """Returns the calls of the last block, in order."""
        found = self._library.faults_calls()
        return [
            Call(self._names[found[at].kind], os.fsdecode(found[at].path))
            for at in range(self._seen)
        ]

    @property
    def failed(self) -> int:
        """Returns how many calls failed in the last block."""
        return int(self._library.faults_failed())


class _Call(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("path", ctypes.c_char * 124))


@cache
def _built() -> Path:
    """Compiles the library once per process and removes it when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="shmbuffer-faults-")
    _kept.append(folder)
    library = Path(folder.name, "interposer.so")
    compiler = (os.environ.get("CC", "gcc"), "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra")
    subprocess.run([*compiler, "-Werror", "-o", library, SOURCE, "-ldl"], check=True)
    return library


_kept: list[tempfile.TemporaryDirectory[str]] = []


def preloaded_environment() -> dict[str, str]:
    """Returns the environment of a process that loads the library."""
    library = str(_built())
    return {**os.environ, "LD_PRELOAD": library, _LIBRARY: library, "PYTHONHASHSEED": "0"}
