"""Runs processes in their own pid and mount namespaces with another boot id, as containers do.

The process that is started is the first process of its namespace, so all its children die with it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.crash.harness import ended, fork

BOOT_ID = b"/proc/sys/kernel/random/boot_id"
_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_BIND, _PRIVATE = 0x1000, 0x40000 | 0x4000  # MS_BIND, MS_PRIVATE | MS_REC
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(yes: bool) -> None:
    """Makes orphans below this process its children (PR_SET_CHILD_SUBREAPER), or stops doing so."""
    _require(_libc.prctl(_ADOPT_ORPHANS, int(yes), 0, 0, 0))


def contained(body: Callable[[], None], boot_id: Path, *, own_proc: bool) -> int:
    """Forks a process that runs ``body`` in its own namespaces and becomes a child of this process.

    Args:
        body: the function that the process runs.
        boot_id: the file that it sees in place of the boot id.
        own_proc: mount a /proc of its own namespace. Otherwise it sees the /proc of this process.

    Returns:
        Its pid in the namespace of this process, which has to call `adopt_orphans` before.
    """

    def first() -> None:
        if own_proc:
            _mount(b"proc", b"/proc", b"proc", 0)
            _mount(bytes(boot_id), BOOT_ID, None, _BIND)
        body()

    def outside() -> None:
        _leave_namespaces(boot_id)
        pid = fork(first)
        os.setpgid(pid, pid)
        os.write(tell, str(pid).encode())

    hear, tell = os.pipe()
    assert ended(fork(outside)) == 0, "no namespace of its own; the traceback is above"
    told = int(os.read(hear, 16))
    os.close(hear)
    os.close(tell)
    return told


@cache
def are_possible(boot_id: Path) -> bool:
    """True if this process may create such namespaces, which needs root or CAP_SYS_ADMIN."""

    def tries() -> None:
        try:
            _leave_namespaces(boot_id)
        except OSError:
            os._exit(1)

    return ended(fork(tries)) == 0


def _leave_namespaces(boot_id: Path) -> None:
    """Creates a pid namespace for children of this process, and a mount namespace for itself."""
    _require(_libc.unshare(_NEW_MOUNTS | _NEW_PIDS))
    _mount(None, b"/", None, _PRIVATE)
    _mount(bytes(boot_id), BOOT_ID, None, _BIND)


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> None:
    _require(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None))


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
