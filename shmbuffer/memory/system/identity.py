"""Identifies a process, and proves that it is dead.

    boot id, pid namespace, pid, start time     four facts of the kernel; no clock and no heartbeat

A registry entry stores the four facts of its owner. A pid alone is not enough, because it is
reused, belongs to another process in another pid namespace, and means nothing after a reboot. If
the facts cannot decide, the owner's lock file does (locks.py), which the kernel unlocks when the
owner's last thread has ended.

A different boot id means that the machine was restarted, or that the other process is in a
container that shows its own boot id. The lock decides in that case, too.

Always true
  1. A live process that is wrongly considered dead would cost items, while the opposite mistake
     costs a wait or an error. A process is therefore alive unless it is proved to be dead.
  2. A stopped process is alive, however long it has been stopped. A process that has become another
     program (execve) keeps its pid and its start time, but no lock and no map, so it is dead.
  3. An unknown fact is 0. It proves neither equality nor difference.
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
_LARGEST_PID = 2**31 - 1  # the maximum of a pid_t; a larger number is damage
_INITIAL_TIME_NAMESPACE = 0xEFFFFFFA  # the kernel's ABI: TIME_NS_INIT_INO


@dataclass(frozen=True, slots=True)
class Identity:
    """The four facts that identify a process."""

    pid: int  # as the process itself sees it
    start_time: int  # clock ticks from boot until its start; 0 if unknown
    boot_id: bytes  # 16 bytes that differ after each boot; zeros if unknown
    pid_namespace: int  # inode of /proc/self/ns/pid; 0 if unknown


_current: Identity | None = None


def current() -> Identity:
    """Returns the identity of this process, which is cached, and computed again after a fork."""
    global _current
    if _current is None or _current.pid != os.getpid():
        _current = _identify_self()
    return _current


def _forget() -> None:
    global _current
    _current = None


# Comparing pids is not enough, because parent and child may both be pid 1, in different namespaces.
os.register_at_fork(after_in_child=_forget)


def boot_id() -> bytes:
    """Returns the 16 random bytes of this boot of the kernel; zeros if /proc/sys is hidden."""
    try:
        text = (_PROC / "sys/kernel/random/boot_id").read_text("ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return UNKNOWN_BOOT


def boot_offset_ns() -> int | None:
    """Returns the shift of CLOCK_BOOTTIME in this process's time namespace; None if unknown.

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
        # The file describes the namespace of future children, which is ours if both are equal.
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
    # If the offset is unknown, the clock is not adjusted, and a lease may end too early or too
    # late.
    _core.set_boot_offset(boot_offset_ns() or 0)


_set_boot_clock()
os.register_at_fork(after_in_child=_set_boot_clock)  # it may be in another namespace


def prove_dead(
    identity: Identity,
    lock_is_free: Callable[[], bool],
    is_another_program: Callable[[], bool] = lambda: False,
) -> bool:
    """True if a process is proved to be dead. Does not wait; takes about 100 µs if it is alive."""
    me = current()
    if is_of_another_boot(identity):
        return lock_is_free()
    same_namespace = 0 != identity.pid_namespace == me.pid_namespace
    if not same_namespace or not _is_a_pid(identity.pid) or not _proc_is_ours():
        return lock_is_free()
    seen = _state_and_start(identity.pid)
    if seen is None:  # the process is gone, or hidden by the mount option hidepid
        return not _exists(identity.pid) or lock_is_free()
    state, start_time = seen
    if 0 in (identity.start_time, me.start_time):
        return lock_is_free()
    if start_time != identity.start_time:
        return True
    # The first thread of a zombie has ended. Its other threads may still run, and then hold the
    # lock.
    return lock_is_free() if state in "ZXx" else is_another_program()


def is_of_another_boot(identity: Identity) -> bool:
    """True if the boot ids are known and differ: after a reboot, or in another container."""
    return UNKNOWN_BOOT != identity.boot_id != current().boot_id != UNKNOWN_BOOT


def open_pidfd(who: Identity) -> int | None:
    """Opens a descriptor (pidfd) of a running process, which no other process can receive.

    Returns None if the process has ended, or if its identity cannot be proved because it is in
    another pid namespace or a fact is unknown.
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
    """True if a process of our own pid namespace maps a file; also true if /proc does not tell."""
    try:
        with open(_PROC / str(pid) / "maps", "rb") as found:
            return any(int(line.split(None, 5)[4]) == inode for line in found)
    except OSError:
        return True


def process_of(tid: int) -> int:
    """Returns the process of a thread, or the thread's own number if the process is not visible."""
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
    # in another pid namespace, so its pid may be another process here
    OTHER_CONTAINER = "other container"
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
"""States by their letter in /proc; all other letters mean a running process."""


def _identify_self() -> Identity:
    """Computes the identity of this process."""
    try:
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    seen = _state_and_start("self") if boot_offset_ns() == 0 else None
    return Identity(os.getpid(), seen[1] if seen else 0, boot_id(), namespace)


def _state_and_start(pid: int | str) -> tuple[str, int] | None:
    """Returns fields 3 and 22 of a process's ``stat``, or None if /proc does not show it."""
    try:
        data = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # Field 2 is a name in parentheses that the process chose. It may contain ") ".
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def _is_a_pid(number: int) -> bool:
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
    """True if /proc shows our own pid namespace instead of an outer one (`unshare --pid`)."""
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return False
        status = (_PROC / "self/status").read_bytes()
    except OSError:
        return False
    pids = [line.split()[1:] for line in status.split(b"\n") if line.startswith(b"NSpid:")]
    return all(len(found) == 1 for found in pids)
