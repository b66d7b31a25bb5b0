"""Ends processes that are not children of this process: all clients of a directory, or orphans.

     SIGTERM and SIGCONT ──grace period──▶ SIGKILL

Signals are sent through a pidfd whose process has been identified, so a process that has reused a
pid never gets a signal. `stop` ends collectors, then plain clients, then learners, and finally the
coordinator. Meanwhile `stop` holds a lock on the control file. While the lock is held, the
coordinator starts no processes, and does not count an exit on SIGTERM as a death.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from shmbuffer.errors import BufferNotFoundError
from shmbuffer.memory.clients import roster
from shmbuffer.memory.clients.locks import TESTER_PATIENCE_S, Lock, is_free
from shmbuffer.memory.clients.registry import Registry
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Role
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.identity import Identity
from shmbuffer.memory.system.region import Directory

AFTER_KILL_S = 5.0
"""Seconds to wait for the end of a process after SIGKILL. The process may be waiting for a disk."""

ROUNDS = 3
"""Number of searches for processes of a role. New processes may attach during a search."""

ORDER = (Role.COLLECTOR, Role.CLIENT, Role.LEARNER, Role.COORDINATOR)
"""Order of the roles in which `stop` ends processes."""

How = Literal["ended", "killed", "left"]
"""Result for a process: it ended on SIGTERM, was killed with SIGKILL, or was left running."""


@dataclass(frozen=True)
class Stopped:
    """A process that `stop` has ended or could not end."""

    pid: int  # pid in the process's own pid namespace
    role: str  # the role of its handles that is last in `ORDER`; "collector" if it has no handle
    name: str  # name and index of a spawned process, otherwise ""
    how: How  # "ended" on SIGTERM, "killed" after the grace period, or "left" running
    why: str = ""  # reason why the process was left running

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes as a dict that can be converted to JSON."""
        return asdict(self)


def end(processes: Collection[Identity], grace_s: float) -> dict[Identity, How]:
    """Ends processes with SIGTERM and then SIGKILL, and returns the result for each process.

    Args:
        processes: identities of the processes.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    pidfds = {who: pidfd for who in processes if (pidfd := identity.open_pidfd(who)) is not None}
    try:
        for pidfd in pidfds.values():
            _send(pidfd, signal.SIGTERM)
            _send(pidfd, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        stubborn = _wait_for_end(pidfds.values(), grace_s)
        for pidfd in stubborn:
            _send(pidfd, signal.SIGKILL)
        left = _wait_for_end(stubborn, AFTER_KILL_S)
    finally:
        for pidfd in pidfds.values():
            os.close(pidfd)

    def how(who: Identity) -> How:
        if who not in pidfds:  # no pidfd: the process has ended, or cannot be accessed
            return "ended" if identity.prove_dead(who, lambda: False) else "left"
        pidfd = pidfds[who]
        return "left" if pidfd in left else "killed" if pidfd in stubborn else "ended"

    return {who: how(who) for who in processes}


def stop(scratch_dir: str | os.PathLike[str], *, grace_s: float = 5.0) -> list[Stopped]:
    """Ends all clients of a buffer except this process, in the `ORDER` of their roles.

    Args:
        scratch_dir: directory of the buffer.
        grace_s: seconds between SIGTERM and SIGKILL, for each of the `ROUNDS` searches per role.

    Returns:
        The result for each process.
    """
    with ExitStack() as undo:
        directory = undo.enter_context(Directory.open(scratch_dir))
        files = Files(directory)
        files.require_control()
        control = files.open_control(writable=False)
        control.superblock()  # raises for a foreign file, which must not be locked
        undo.enter_context(Lock()).hold(
            directory,
            layout.CONTROL,
            timeout=TESTER_PATIENCE_S,  # `is_being_stopped` may hold the lock for a moment
            purpose="stops its clients",
            make=False,
        )
        registry = Registry(control, directory)
        done: dict[Identity, Stopped] = {}
        for last in ORDER:
            for _ in range(ROUNDS):
                found = _find_clients(registry, directory.path, last, done)
                for who, how in end(found, grace_s).items():
                    why = why_left(who) if how == "left" else ""
                    role, name = found[who]
                    done[who] = Stopped(who.pid, role.name.lower(), name, how, why)
        for who, (role, name) in _find_clients(registry, directory.path, ORDER[-1], done).items():
            why = "it was started during the stop; stop the program that starts it"
            done[who] = Stopped(who.pid, role.name.lower(), name, "left", why)
        return list(done.values())


def is_being_stopped(scratch_dir: Path) -> bool:
    """True if a process is running `stop` for this directory."""
    try:
        with Directory.open(scratch_dir) as directory:
            there = directory.exists(layout.CONTROL)
            return there and not is_free(directory, layout.CONTROL)
    except BufferNotFoundError:
        return False


def _find_clients(
    registry: Registry, scratch_dir: Path, last: Role, done: Collection[Identity]
) -> dict[Identity, tuple[Role, str]]:
    """Returns living processes that use a buffer, without this process.

    Args:
        registry: registry of the buffer.
        scratch_dir: directory of the buffer.
        last: last role in `ORDER` of the processes to return.
        done: processes to leave out.

    Returns:
        The role, and the name with the index of a spawned process or "", for each process.
    """
    found: dict[Identity, tuple[Role, str]] = {}
    with suppress(BufferNotFoundError):  # the coordinator has removed the directory
        for one in roster.find_living(scratch_dir):
            found[one.identity] = (Role.COLLECTOR, f"{one.name}-{one.index}")
    for entry, _ in registry.alive():
        who, role = registry.identity(entry), registry.role(entry)
        before, name = found.get(who, (ORDER[0], ""))
        found[who] = (max(role, before, key=ORDER.index), name)
    me = identity.current()
    return {
        who: it
        for who, it in found.items()
        if who != me and who not in done and ORDER.index(it[0]) <= ORDER.index(last)
    }


def why_left(who: Identity) -> str:
    """Returns the reason why a process could not be ended, as a clause for messages."""
    if who.pid_namespace != identity.current().pid_namespace:
        return "it is in another pid namespace and must be stopped there"
    return (
        "its identity cannot be proven, this user must not signal it, or it is waiting in the "
        "kernel"
    )


def _send(pidfd: int, number: int) -> None:
    """Sends a signal. Does nothing if the process has ended or this user must not signal it."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def _wait_for_end(pidfds: Collection[int], seconds: float) -> set[int]:
    """Waits up to ``seconds`` for processes to end, and returns those that are still running."""
    left, deadline_s = set(pidfds), time.monotonic() + seconds
    while left:
        remaining_s = deadline_s - time.monotonic()
        left -= {fd for fd in connection.wait(left, max(0.0, remaining_s)) if isinstance(fd, int)}
        if remaining_s <= 0:
            break
    return left
