"""Identifies processes, and determines whether a process is dead.

    boot id, pid namespace, pid, start time     four values from the kernel; no clock, no heartbeat

A registry entry stores these four values of its owner. The pid alone is not sufficient: it is
reused, it is the pid of a different process in another pid namespace, and it is meaningless after a
reboot. If the four values do not show whether the owner is alive, its lock file does (locks.py).
The kernel releases this lock when the last thread of the owner has ended.

A different boot id means that the machine was rebooted, or that the other process runs in a
container with its own boot id. In this case, too, the lock file shows whether the owner is alive.

Always true
  1. A process counts as alive unless it is proved to be dead. If a live process were considered
     dead, items could be lost. The opposite mistake only causes a wait or an error.
  2. A stopped process counts as alive, however long it has been stopped. A process that has called
     execve(2) keeps its pid and start time, but loses its locks and maps, so its client is dead.
  3. The value 0 means that a fact is unknown. An unknown value is never considered equal to or
     different from another one.
If a process dies here: nothing is lost, because this module does not write anything.
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
_LARGEST_PID = 2**31 - 1  # the maximum of pid_t; a larger number means that the entry is damaged
_INITIAL_TIME_NAMESPACE = 0xEFFFFFFA  # the kernel's ABI: TIME_NS_INIT_INO


@dataclass(frozen=True, slots=True)
class Identity:
    """Four values from the kernel that together identify a process."""

    pid: int  # in the pid namespace of the process itself
    start_time: int  # clock ticks from boot to the start of the process; 0 if unknown
    boot_id: bytes  # 16 random bytes that change with each boot; zeros if unknown
    pid_namespace: int  # inode number of /proc/self/ns/pid; 0 if unknown


_current: Identity | None = None


def current() -> Identity:
    """Returns the identity of this process. It is cached, and computed again after a fork."""
    global _current
    if _current is None or _current.pid != os.getpid():
        _current = _identify_self()
    return _current


def _discard_current() -> None:
    """Discards the cached identity, which is the parent's after a fork."""
    global _current
    _current = None


# The comparison of pids in `current` is not enough, because the parent and the child may both have
# pid 1, in different pid namespaces.
os.register_at_fork(after_in_child=_discard_current)


def boot_id() -> bytes:
    """Returns the kernel's boot id, 16 random bytes, or zeros if /proc/sys cannot be read."""
    try:
        text = (_PROC / "sys/kernel/random/boot_id").read_text("ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return UNKNOWN_BOOT


def boot_offset_ns() -> int | None:
    """Returns the offset of CLOCK_BOOTTIME in this process's time namespace, in nanoseconds.

    The kernel adds the same offset to the start times of processes that it shows in /proc.

    Returns:
        The offset, 0 if there is no time namespace, or None if the offset is unknown.
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
        # timens_offsets describes the namespace of future children. Its offsets apply to this
        # process only if both namespaces are the same.
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
    """Passes the offset of CLOCK_BOOTTIME to the C core, which measures leases with this clock."""
    # If the offset is unknown, the clock is not adjusted. A lease may then expire too early or too
    # late.
    _core.set_boot_offset(boot_offset_ns() or 0)


_set_boot_clock()
os.register_at_fork(after_in_child=_set_boot_clock)  # the child may be in another time namespace


def prove_dead(
    identity: Identity,
    lock_is_free: Callable[[], bool],
    is_another_program: Callable[[], bool] = lambda: False,
) -> bool:
    """True if a process is certainly dead. Never waits; takes about 100 µs if the process is alive.

    Args:
        identity: Identity of the process.
        lock_is_free: Function that returns True if no process holds the client's lock file. It is
            called if the identity alone does not decide.
        is_another_program: Function that returns True if the process has called execve(2). It is
            called if the process exists, so that the pid and the start time are equal.
    """
    me = current()
    if is_of_another_boot(identity):
        return lock_is_free()
    same_namespace = 0 != identity.pid_namespace == me.pid_namespace
    if not same_namespace or not _is_a_pid(identity.pid) or not _proc_is_ours():
        return lock_is_free()
    seen = _state_and_start(identity.pid)
    if seen is None:  # the process has ended, or /proc hides it (hidepid)
        return not _exists(identity.pid) or lock_is_free()
    state, start_time = seen
    if 0 in (identity.start_time, me.start_time):
        return lock_is_free()
    if start_time != identity.start_time:
        return True
    # In a zombie, only the main thread has ended. Other threads may still run, and the process then
    # still holds its lock.
    return lock_is_free() if state in "ZXx" else is_another_program()


def is_of_another_boot(identity: Identity) -> bool:
    """True if both boot ids are known and differ, after a reboot or in another container."""
    return UNKNOWN_BOOT != identity.boot_id != current().boot_id != UNKNOWN_BOOT


def open_pidfd(who: Identity) -> int | None:
    """Opens a descriptor (pidfd) that refers to a running process, even if its pid is reused later.

    Returns:
        The descriptor. None if the process has ended, is in another pid namespace, or has an
        identity with an unknown value.
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
    seen = _state_and_start(who.pid)  # the pid cannot be reused while the descriptor is open
    if seen is not None and seen[1] == who.start_time:
        return pidfd
    os.close(pidfd)
    return None


def maps(pid: int, inode: int) -> bool:
    """True if a process maps the file with this inode number, or if its maps cannot be read.

    The process must be in the pid namespace of the calling process.
    """
    try:
        with open(_PROC / str(pid) / "maps", "rb") as found:
            return any(int(line.split(None, 5)[4]) == inode for line in found)
    except OSError:
        return True


def process_of(tid: int) -> int:
    """Returns the pid of the process that a thread belongs to, or ``tid`` if it cannot be read."""
    try:
        status = Path(f"/proc/{tid}/status").read_text("ascii", "replace")
    except OSError:
        return tid
    return next(
        (int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:")), tid
    )


class ProcessState(StrEnum):
    """The state of a client's process, as ``inspect``, ``ps``, ``top`` and error messages show it.

    A process in any state except DEAD counts as alive.
    """

    RUNNING = "running"
    STOPPED = "stopped"  # suspended by a signal (SIGSTOP) or a debugger
    DEAD = "dead"  # includes zombies: processes that have ended but were not waited for
    # in another pid namespace, so the pid may belong to a different process here
    OTHER_CONTAINER = "other container"
    # Only the client's lock file could show the state, but the directory belongs to another user.
    UNKNOWN = "unknown"


def process_state(pid: int) -> ProcessState:
    """Returns the state of a process in the pid namespace of this process."""
    if not _is_a_pid(pid):
        return ProcessState.DEAD
    seen = _state_and_start(pid)
    if seen is None:
        return ProcessState.RUNNING if _exists(pid) else ProcessState.DEAD
    return _STATES.get(seen[0], ProcessState.RUNNING)


_STATES = dict.fromkeys("Tt", ProcessState.STOPPED) | dict.fromkeys("ZXx", ProcessState.DEAD)
"""Process states by their letter in /proc/PID/stat. All other letters mean a running process."""


def _identify_self() -> Identity:
    """Computes the identity of this process."""
    try:
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    seen = _state_and_start("self") if boot_offset_ns() == 0 else None
    return Identity(os.getpid(), seen[1] if seen else 0, boot_id(), namespace)


def _state_and_start(pid: int | str) -> tuple[str, int] | None:
    """Returns the state and the start time of a process: fields 3 and 22 of /proc/PID/stat.

    Returns None if the file cannot be read.
    """
    try:
        data = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # Field 2 is the name of the process in parentheses. The name itself may contain ") ".
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def _is_a_pid(number: int) -> bool:
    """True if the number is in the range of valid pids."""
    return 0 < number <= _LARGEST_PID


def _exists(pid: int) -> bool:
    """True if a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _proc_is_ours() -> bool:
    """True if /proc shows the pid namespace of this process.

    After `unshare --pid` without a new mount of /proc, it shows an outer namespace.
    """
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return False
        status = (_PROC / "self/status").read_bytes()
    except OSError:
        return False
    pids = [line.split()[1:] for line in status.split(b"\n") if line.startswith(b"NSpid:")]
    return all(len(found) == 1 for found in pids)
