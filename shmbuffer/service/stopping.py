"""How processes are ended that are not our children: all of a directory's, or orphans of a name.

     SIGTERM and SIGCONT ──the grace──▶ SIGKILL

Each is signalled through a descriptor (pidfd) of the process that was proven to be it, so a number
that another process has by now is never hit. `stop` ends collectors first, then plain clients, then
learners, the coordinator last. It holds a lock on the control file meanwhile: as long as somebody
does, no coordinator starts a process, and none that ends on SIGTERM counts as a death.
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
from shmbuffer.memory import identity, layout
from shmbuffer.memory.files import Files
from shmbuffer.memory.identity import Identity
from shmbuffer.memory.layout import Role
from shmbuffer.memory.locks import TESTER_PATIENCE_S, Lock, is_free
from shmbuffer.memory.region import Directory
from shmbuffer.memory.registry import Registry
from shmbuffer.service import roster

AFTER_KILL_S = 5.0
"""How long the kernel may take to end what was sent SIGKILL: it may wait for a disk first."""

ROUNDS = 3
"""How often we look for those of a role: one that was on its way has attached meanwhile."""

ORDER = (Role.COLLECTOR, Role.CLIENT, Role.LEARNER, Role.COORDINATOR)

How = Literal["ended", "killed", "left"]


@dataclass(frozen=True)
class Stopped:
    """A process that `stop` dealt with."""

    pid: int  # in the pid namespace that it lives in
    # of its handles the one that is ended last; "collector" of a spawned process that has not
    # attached
    role: str
    name: str  # that it was spawned under, with its index; else ""
    how: How  # "ended" on SIGTERM, "killed" after the grace, or "left": it could not be ended
    why: str = ""  # it was left, in words

    def to_json(self) -> dict[str, Any]:
        """As a dict of plain values."""
        return asdict(self)


def end(processes: Collection[Identity], grace_s: float) -> dict[Identity, How]:
    """Ends processes: SIGTERM, after the grace SIGKILL; says of each how that went."""
    pidfds = {who: pidfd for who in processes if (pidfd := identity.opened(who)) is not None}
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
    how: dict[Identity, How] = {}
    for who in processes:
        if who in pidfds:
            how[who] = (
                "left" if pidfds[who] in left else "killed" if pidfds[who] in deaf else "ended"
            )
        else:  # perhaps it has ended just now
            how[who] = "ended" if identity.prove_dead(who, lambda: False) else "left"
    return how


def stop(scratch_dir: str | os.PathLike[str], *, grace_s: float = 5.0) -> list[Stopped]:
    """Ends every client of a buffer but this process; one of several handles in its last role.

    Collectors first, spawned ones too, then plain clients, learners, the coordinator. Returns
    those, and those that were left (another pid namespace or user). Takes at most the grace a role.
    """
    with ExitStack() as undo:
        directory = undo.enter_context(Directory.open(scratch_dir))
        files = Files(directory)
        files.require_control()
        control = files.open_control(writable=False)
        control.superblock()  # of a foreign file not even the lock is touched
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
            why = "it came while the others were stopped: stop what starts it"
            done[who] = Stopped(who.pid, role.name.lower(), name, "left", why)
        return list(done.values())


def is_being_stopped(scratch_dir: Path) -> bool:
    """Whether `stop` is at work there, in any process."""
    try:
        with Directory.open(scratch_dir) as directory:
            there = directory.exists(layout.CONTROL)
            return there and not is_free(directory, layout.CONTROL)
    except BufferNotFoundError:
        return False


def _present(
    registry: Registry, scratch_dir: Path, last: Role, done: Collection[Identity]
) -> dict[Identity, tuple[Role, str]]:
    """Who lives and is to be ended by now: role and name of each process, in the order of roles."""
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
    """Why a process could not be ended."""
    if who.pid_namespace != identity.current().pid_namespace:
        return "it lives in another pid namespace: stop it there"
    return "it cannot be proved to be this process, may not be signalled, or waits in the kernel"


def _send(pidfd: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # a process that may not be signalled stays
        signal.pidfd_send_signal(pidfd, number)


def _still_there(pidfds: Collection[int], seconds: float) -> set[int]:
    """Those that have not ended after so many seconds."""
    left, deadline_s = set(pidfds), time.monotonic() + seconds
    while left:
        remaining_s = deadline_s - time.monotonic()
        left -= {fd for fd in connection.wait(left, max(0.0, remaining_s)) if isinstance(fd, int)}
        if remaining_s <= 0:
            break
    return left
