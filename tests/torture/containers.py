"""Processes in pid and mount namespaces of their own, which see another boot id, as containers do.

The process that is started is the first of its namespace: all its children die with it.
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
    """An orphan below this process becomes its child (PR_SET_CHILD_SUBREAPER)."""
    _require(_libc.prctl(_ADOPT_ORPHANS, int(yes), 0, 0, 0))


def contained(body: Callable[[], None], boot_id: Path, *, own_proc: bool) -> int:
    """Forks ``body`` into namespaces of its own; it becomes a child of this process.

    Args:
        body: what it does.
        boot_id: a file, what it sees as the boot id.
        own_proc: whether /proc shows it its own namespace; else that of this process.

    Returns:
        Its pid in the namespace of this process, which has to `adopt_orphans`.
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
    """Whether this process may make such namespaces: it needs root, or as much."""

    def tries() -> None:
        try:
            _leave_namespaces(boot_id)
        except OSError:
            os._exit(1)

    return ended(fork(tries)) == 0


def _leave_namespaces(boot_id: Path) -> None:
    """For the children of this process new pids; for itself new mounts."""
    _require(_libc.unshare(_NEW_MOUNTS | _NEW_PIDS))
    _mount(None, b"/", None, _PRIVATE)
    _mount(bytes(boot_id), BOOT_ID, None, _BIND)


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> None:
    _require(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None))


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
