"""Ends processes that are not our children: all clients of a directory, or orphans by name.

     SIGTERM and SIGCONT ──the grace──▶ SIGKILL

Signals go through a pidfd of the proven process, so a reused pid is never hit. `stop` ends
collectors first, then plain clients, then learners, the coordinator last. While it holds a lock on
the control file, no coordinator starts a process, and an end on SIGTERM counts as no death.
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
"""Time that the kernel may need after SIGKILL, because the process may wait for a disk."""

ROUNDS = 3
"""Number of searches for processes of a role, because new ones may have attached meanwhile."""

ORDER = (Role.COLLECTOR, Role.CLIENT, Role.LEARNER, Role.COORDINATOR)

How = Literal["ended", "killed", "left"]


@dataclass(frozen=True)
class Stopped:
    """A process that `stop` has ended or left running."""

    pid: int  # in its own pid namespace
    role: str  # the last of its handles in `ORDER`; "collector" if it was spawned and has none
    name: str  # with which it was spawned, and its index; else ""
    how: How  # "ended" on SIGTERM, "killed" after the grace, or "left" running
    why: str = ""  # it was left

    def to_json(self) -> dict[str, Any]:
        """Returns a dict of plain values."""
        return asdict(self)


def end(processes: Collection[Identity], grace_s: float) -> dict[Identity, How]:
    """Ends processes with SIGTERM, then SIGKILL; returns how each has ended."""
    pidfds = {who: pidfd for who in processes if (pidfd := identity.open_pidfd(who)) is not None}
    try:
        for pidfd in pidfds.values():
            _send(pidfd, signal.SIGTERM)
            _send(pidfd, signal.SIGCONT)  # a stopped process takes no signal
        deaf = _still_there(pidfds.values(), grace_s)
        for pidfd in deaf:
            _send(pidfd, signal.SIGKILL)
        left = _still_there(deaf, AFTER_KILL_S)
    finally:
        for pidfd in pidfds.values():
            os.close(pidfd)

    def how(who: Identity) -> How:
        if who not in pidfds:  # it may have ended just now
            return "ended" if identity.prove_dead(who, lambda: False) else "left"
        pidfd = pidfds[who]
        return "left" if pidfd in left else "killed" if pidfd in deaf else "ended"

    return {who: how(who) for who in processes}


def stop(scratch_dir: str | os.PathLike[str], *, grace_s: float = 5.0) -> list[Stopped]:
    """Ends every client of a buffer except this process, in the `ORDER` of roles.

    It takes at most the grace period for each role. Returns how each process has ended.
    """
    with ExitStack() as undo:
        directory = undo.enter_context(Directory.open(scratch_dir))
        files = Files(directory)
        files.require_control()
        control = files.open_control(writable=False)
        control.superblock()  # raises before a foreign file is locked
        undo.enter_context(Lock()).hold(
            directory,
            layout.CONTROL,
            timeout=TESTER_PATIENCE_S,  # `is_being_stopped` tests it
            purpose="stops its clients",
            make=False,
        )
        registry = Registry(control, directory)
        done: dict[Identity, Stopped] = {}
        for last in ORDER:
            for _ in range(ROUNDS):
                found = _present(registry, directory.path, last, done)
                for who, how in end(found, grace_s).items():
                    why = why_left(who) if how == "left" else ""
                    role, name = found[who]
                    done[who] = Stopped(who.pid, role.name.lower(), name, how, why)
        for who, (role, name) in _present(registry, directory.path, ORDER[-1], done).items():
            why = "it was started while the others were stopped: stop the program that starts it"
            done[who] = Stopped(who.pid, role.name.lower(), name, "left", why)
        return list(done.values())


def is_being_stopped(scratch_dir: Path) -> bool:
    """True if any process runs `stop` there."""
    try:
        with Directory.open(scratch_dir) as directory:
            there = directory.exists(layout.CONTROL)
            return there and not is_free(directory, layout.CONTROL)
    except BufferNotFoundError:
        return False


def _present(
    registry: Registry, scratch_dir: Path, last: Role, done: Collection[Identity]
) -> dict[Identity, tuple[Role, str]]:
    """Returns the remaining living processes of roles up to ``last``, with role and name."""
    found: dict[Identity, tuple[Role, str]] = {}
    with suppress(BufferNotFoundError):  # the coordinator has removed it
        for one in roster.living(scratch_dir):
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
    """Returns the reason why a process could not be ended."""
    if who.pid_namespace != identity.current().pid_namespace:
        return "it is in another pid namespace: stop it there"
    return (
        "its identity cannot be proven, this user may not signal it, or it is waiting in the kernel"
    )


def _send(pidfd: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # a process that may not be signalled stays
        signal.pidfd_send_signal(pidfd, number)


def _still_there(pidfds: Collection[int], seconds: float) -> set[int]:
    """Returns the processes that still run after ``seconds``."""
    left, deadline_s = set(pidfds), time.monotonic() + seconds
    while left:
        remaining_s = deadline_s - time.monotonic()
        left -= {fd for fd in connection.wait(left, max(0.0, remaining_s)) if isinstance(fd, int)}
        if remaining_s <= 0:
            break
    return left
