"""Who a process is, and the proof that it is dead.

    boot id, pid namespace, pid, start time     four facts of the kernel; no clock and no heartbeat

A registry entry keeps the four facts of its owner. A pid alone is not enough: it is used again, is
somebody else's in another pid namespace, and means nothing after a reboot. Where the facts cannot
decide, the owner's lock file does (locks.py): the kernel frees it when its last thread has ended.

A boot id that differs says that the machine was restarted, or that the other process is in a
container that shows its own: the lock decides there, too.

Always true
  1. A wrong "alive" costs a wait or an error; a wrong "dead" would cost items. So what cannot be
     proved is alive.
  2. A stopped process is alive, however long it has been stopped. One that has become another
     program (execve) keeps its pid and its start time, but no lock and no map: it is dead.
  3. An unknown fact is 0 and proves nothing, neither equality nor difference.
If a process dies here: nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shmbuffer._native import _core

UNKNOWN_BOOT = bytes(16)

_PROC = Path("/proc")
_LARGEST_PID = 2**31 - 1  # of a pid_t; beyond it is damage
_INITIAL_TIME_NAMESPACE = 0xEFFFFFFA  # the kernel's ABI: TIME_NS_INIT_INO


@dataclass(frozen=True, slots=True)
class Identity:
    """The four facts."""

    pid: int  # as the process itself sees it
    start_time: int  # clock ticks between boot and its start; 0 if not known
    boot_id: bytes  # 16 bytes, other ones after each boot; zeros if not known
    pid_namespace: int  # inode of /proc/self/ns/pid; 0 if not known


_current: Identity | None = None


def current() -> Identity:
    """Who this process is; looked up once, and again in a forked child."""
    global _current
    if _current is None or _current.pid != os.getpid():
        _current = _look_at_ourselves()
    return _current


def _forget() -> None:
    global _current
    _current = None


# Comparing pids is not enough: parent and child may be pid 1, each in a namespace of its own.
os.register_at_fork(after_in_child=_forget)


def boot_id() -> bytes:
    """The 16 bytes that the kernel drew when it started; zeros where /proc/sys is hidden."""
    try:
        text = (_PROC / "sys/kernel/random/boot_id").read_text("ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return UNKNOWN_BOOT


def boot_offset_ns() -> int | None:
    """By how much the time namespace of this process shifts its CLOCK_BOOTTIME; None if unknown.

    The kernel also shifts the start times that it shows to readers in such a namespace.
    """
    try:
        namespace = (_PROC / "self/ns/time").stat().st_ino
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    except OSError:
        return None
    if namespace == _INITIAL_TIME_NAMESPACE:
        return 0
    try:
        # The file tells of the namespace that our children will be in; ours, if that is the same.
        if (_PROC / "self/ns/time_for_children").stat().st_ino != namespace:
            return None
        offsets = (_PROC / "self/timens_offsets").read_text("ascii").splitlines()
    except OSError:
        return None
    for clock, seconds, nanoseconds in map(str.split, offsets):
        if clock in ("boottime", "7"):
            return int(seconds) * 10**9 + int(nanoseconds)
    return None


def _set_boot_clock() -> None:
    # Where the offset is unknown the clock stays as it is, and a lease may end too early or late.
    _core.set_boot_offset(boot_offset_ns() or 0)


_set_boot_clock()
os.register_at_fork(after_in_child=_set_boot_clock)  # it may be in another namespace


def prove_dead(
    identity: Identity,
    lock_is_free: Callable[[], bool],
    is_another_program: Callable[[], bool] = lambda: False,
) -> bool:
    """True if a process can be proved to be dead. Does not wait; some 100 µs if it is alive."""
    me = current()
    if is_of_another_boot(identity):
        return lock_is_free()
    same_namespace = 0 != identity.pid_namespace == me.pid_namespace
    if not same_namespace or not _is_a_pid(identity.pid) or not _proc_is_ours():
        return lock_is_free()
    seen = _state_and_start(identity.pid)
    if seen is None:  # gone, or hidden by the mount option hidepid
        return not _exists(identity.pid) or lock_is_free()
    state, start_time = seen
    if 0 in (identity.start_time, me.start_time):
        return lock_is_free()
    if start_time != identity.start_time:
        return True
    # In a zombie the first thread has ended; others may still run, and then they hold the lock.
    return lock_is_free() if state in "ZXx" else is_another_program()


def is_of_another_boot(identity: Identity) -> bool:
    """True if its boot id is known, and another one: after a reboot, or in another container."""
    return UNKNOWN_BOOT != identity.boot_id != current().boot_id != UNKNOWN_BOOT


def opened(who: Identity) -> int | None:
    """Returns a descriptor (pidfd) of a process that runs; a signal through it meets no other one.

    None where it has ended, and where it cannot be proved that this is the process: in another pid
    namespace, or with an unknown fact.
    """
    me = current()
    known = UNKNOWN_BOOT != who.boot_id == me.boot_id and 0 not in (who.start_time, me.start_time)
    here = 0 != who.pid_namespace == me.pid_namespace and _is_a_pid(who.pid) and _proc_is_ours()
    if not (known and here):
        return None
    try:
        pidfd = os.pidfd_open(who.pid)
    except OSError:
        return None
    seen = _state_and_start(who.pid)  # now that the descriptor cannot become another process's
    if seen is not None and seen[1] == who.start_time:
        return pidfd
    os.close(pidfd)
    return None


def maps(pid: int, inode: int) -> bool:
    """True if a process of our own pid namespace maps a file; True where /proc does not tell."""
    try:
        with open(_PROC / str(pid) / "maps", "rb") as found:
            return any(int(line.split(None, 5)[4]) == inode for line in found)
    except OSError:
        return True


def process_of(tid: int) -> int:
    """The process that a thread belongs to; the thread's own number where that cannot be seen."""
    try:
        status = Path(f"/proc/{tid}/status").read_text("ascii", "replace")
    except OSError:
        return tid
    return next(
        (int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:")), tid
    )


class ProcessState(StrEnum):
    """The state of a client's process, in the words of ``inspect``, ``ps``, ``top`` and errors.

    Every state but DEAD counts as alive.
    """

    RUNNING = "running"
    STOPPED = "stopped"  # suspended by a signal (SIGSTOP) or a debugger
    DEAD = "dead"  # also a zombie, which its parent has not waited for
    OTHER_CONTAINER = "other container"  # in another pid namespace, where its pid is another's here
    UNKNOWN = "unknown"  # only its lock could tell, and the directory belongs to another user


def process_state(pid: int) -> ProcessState:
    """Returns whether a process of this pid namespace is running, stopped or dead."""
    if not _is_a_pid(pid):
        return ProcessState.DEAD
    seen = _state_and_start(pid)
    if seen is None:
        return ProcessState.RUNNING if _exists(pid) else ProcessState.DEAD
    return _STATES.get(seen[0], ProcessState.RUNNING)


_STATES = dict.fromkeys("Tt", ProcessState.STOPPED) | dict.fromkeys("ZXx", ProcessState.DEAD)
"""States by their letter in /proc; all other letters are those of a running process."""


def _look_at_ourselves() -> Identity:
    try:
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    seen = _state_and_start("self") if boot_offset_ns() == 0 else None
    return Identity(os.getpid(), seen[1] if seen else 0, boot_id(), namespace)


def _state_and_start(pid: int | str) -> tuple[str, int] | None:
    """Fields 3 and 22 of a process's `stat`; None if /proc does not show it."""
    try:
        data = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # Field 2 is the name that the process gave itself, in parentheses, and ") " may be part of it.
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def _is_a_pid(number: int) -> bool:
    return 0 < number <= _LARGEST_PID


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _proc_is_ours() -> bool:
    """True if /proc shows the pids of our own namespace, and not of one above (`unshare --pid`)."""
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return False
        status = (_PROC / "self/status").read_bytes()
    except OSError:
        return False
    pids = [line.split()[1:] for line in status.split(b"\n") if line.startswith(b"NSpid:")]
    return all(len(found) == 1 for found in pids)
